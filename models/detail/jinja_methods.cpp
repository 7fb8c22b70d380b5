// Methods of texts and dicts, and the functions that transformers gives to templates.
#include <emend/core/text.h>
#include <emend/models/detail/jinja_value.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <map>

namespace emend::models::detail::jinja {
namespace {

std::string changed(std::string_view text, const std::function<char32_t(char32_t)>& change) {
  std::string result;
  for (const auto character : characters(text)) append_utf8(result, change(decode_utf8(character.data())));
  return result;
}
// str.isspace()
bool is_blank(char32_t c) {
  return is_white_space(c) || (c >= 0x1C && c <= 0x1F);
}
// Python writes these with several letters (SpecialCasing.txt of Unicode), or by what stands around them.
[[noreturn]] void letters() {
  throw Fault{"the other case of a letter that has several letters there"};
}
char32_t upper(char32_t c, utf8proc_int32_t (*change)(utf8proc_int32_t) = utf8proc_toupper) {
  static constexpr char32_t kAlone[] = {0xDF, 0x149, 0x1F0, 0x390, 0x3B0, 0x587};
  if (std::ranges::find(kAlone, c) != std::end(kAlone) || (c >= 0x1E96 && c <= 0x1E9A) ||
      (c >= 0x1F50 && c <= 0x1FFC) || (c >= 0xFB00 && c <= 0xFB17))
    letters();
  return static_cast<char32_t>(change(static_cast<utf8proc_int32_t>(c)));
}
char32_t lower_of(char32_t c) {
  if (c == 0x130 || c == 0x3A3) letters();  // a dotted capital I, a sigma that may be a word's last
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}

std::string capitalized(std::string_view text) {
  bool first = true;
  return changed(text,
                 [&](char32_t c) { return std::exchange(first, false) ? upper(c, utf8proc_totitle) : lower_of(c); });
}

std::string titled(std::string_view text) {
  bool in_word = false;
  return changed(text, [&](char32_t c) {
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    const bool letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
    return std::exchange(in_word, letter) ? lower_of(c) : upper(c, utf8proc_totitle);
  });
}

// str.split() and str.rsplit() at white space.
std::vector<std::string_view> split_at_blanks(std::string_view text, int64_t most, bool right) {
  std::vector<std::string_view> parts;
  for (text = strip(text, {}, !right, right); !text.empty() && most != 0; --most) {
    size_t cut = right ? text.size() : 0;
    if (right) {
      for (size_t at; cut > 0 && !is_space(text.substr(at = last_character(text.substr(0, cut))));) cut = at;
    } else {
      while (cut < text.size() && !is_space(text.substr(cut))) cut += utf8_length(text[cut]);
    }
    parts.push_back(right ? text.substr(cut) : text.substr(0, cut));
    text = strip(right ? text.substr(0, cut) : text.substr(cut), {}, !right, right);
  }
  if (!text.empty()) parts.push_back(text);
  return parts;
}

// At most `most` times if that is not negative.
std::vector<std::string_view> split(std::string_view text, const std::optional<std::string>& by, int64_t most,
                                    bool right) {
  std::vector<std::string_view> parts;
  if (!by) {
    parts = split_at_blanks(text, most, right);
  } else {
    if (by->empty()) throw Fault{"split at an empty text"};
    for (size_t at; most != 0 && (at = right ? text.rfind(*by) : text.find(*by)) != text.npos; --most) {
      parts.push_back(right ? text.substr(at + by->size()) : text.substr(0, at));
      text = right ? text.substr(0, at) : text.substr(at + by->size());
    }
    parts.push_back(text);
  }
  if (right) std::ranges::reverse(parts);
  return parts;
}

std::optional<std::string> optional_text(Arguments& arguments, std::string_view name) {
  const Value given = arguments.take(name, {None()});
  if (given.none()) return std::nullopt;
  if (!given.text()) throw Fault{type_name(given) + " for a text"};
  return *given.text();
}

Value parts_of_text(Work& work, const std::vector<std::string_view>& parts) {
  std::vector<Value> items;
  for (const auto one : parts) items.push_back(work.text(std::string(one)));
  return work.list(std::move(items));
}

Value splitting(Work& work, const std::string& text, Arguments& arguments, bool right) {
  const auto by = optional_text(arguments, "sep");
  by ? work.search(text, *by) : work.step(text.size() / 8);
  return parts_of_text(work, split(text, by, arguments.take_whole("maxsplit", -1), right));
}

bool starts_or_ends(const std::string& text, const Value& with, bool ends) {
  const auto one = [&](const Value& part) {
    if (!part.text()) throw Fault{type_name(part) + " for a text"};
    return ends ? text.ends_with(*part.text()) : text.starts_with(*part.text());
  };
  return with.list() ? std::ranges::any_of(with.list()->items, one) : one(with);
}

std::string joined(Work& work, const std::string& between, const Value& parts) {
  std::string all;
  for (bool first = true; const Value& one : iterate(work, parts)) {
    if (!one.text()) throw Fault{"a text joined with " + type_name(one)};
    if (!std::exchange(first, false)) append(all, between);
    append(all, *one.text());
  }
  return all;
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to, int64_t most) {
  if (from.empty()) throw Fault{"replace of an empty text"};
  std::string result;
  size_t at = 0;
  for (size_t next; most != 0 && (next = text.find(from, at)) != text.npos; --most) {
    append(result.append(text, at, next - at), to);
    at = next + from.size();
  }
  return result.append(text, at);
}

using Method = Value (*)(Work&, const std::string&, Arguments&);

template <bool left, bool right>
Value stripped(Work& work, const std::string& text, Arguments& arguments) {
  const auto of = optional_text(arguments, "chars");
  work.search(text, of.value_or(""));
  return work.text(std::string(strip(text, of, left, right)));
}

const std::map<std::string_view, Method>& text_methods() {
  static const std::map<std::string_view, Method> methods = {
      {"strip", stripped<true, true>},
      {"lstrip", stripped<true, false>},
      {"rstrip", stripped<false, true>},
      {"split", [](Work& w, const std::string& t, Arguments& a) { return splitting(w, t, a, false); }},
      {"rsplit", [](Work& w, const std::string& t, Arguments& a) { return splitting(w, t, a, true); }},
      {"startswith",
       [](Work&, const std::string& t, Arguments& a) { return Value{starts_or_ends(t, a.take("prefix"), false)}; }},
      {"endswith",
       [](Work&, const std::string& t, Arguments& a) { return Value{starts_or_ends(t, a.take("suffix"), true)}; }},
      {"upper", [](Work& w, const std::string& t,
                   Arguments&) { return w.text(changed(t, [](char32_t c) { return upper(c); })); }},
      {"lower", [](Work& w, const std::string& t, Arguments&) { return w.text(lower_case(t)); }},
      {"capitalize", [](Work& w, const std::string& t, Arguments&) { return w.text(capitalized(t)); }},
      {"title", [](Work& w, const std::string& t, Arguments&) { return w.text(titled(t)); }},
      {"replace",
       [](Work& w, const std::string& t, Arguments& a) {
         const std::string from = a.take_text("old"), to = a.take_text("new");
         w.search(t, from);
         return w.text(replaced(t, from, to, a.take_whole("count", -1)));
       }},
      {"join", [](Work& w, const std::string& t, Arguments& a) { return w.text(joined(w, t, a.take("iterable"))); }},
  };
  return methods;
}

Value dict_method(Work& work, const Dict& dict, const std::string& name, Arguments& arguments) {
  if (name == "get") {
    const Value key = arguments.take("key"), otherwise = arguments.take("default", {None()});
    const auto entry =
        std::ranges::find_if(dict, [&](const auto& one) { return key.text() && one.first == *key.text(); });
    return entry == dict.end() ? otherwise : entry->second;
  }
  if (name == "copy") return work.dict(dict);
  std::vector<Value> all;
  for (const auto& [key, value] : dict) {
    if (name == "items") all.push_back(work.list({work.text(key), value}, true));
    if (name == "keys") all.push_back(work.text(key));
    if (name == "values") all.push_back(value);
  }
  return work.list(std::move(all));
}

Value range(Work& work, Arguments& arguments) {
  const bool one = arguments.list.size() == 1;
  const int64_t first = arguments.take_whole("start", 0);
  const int64_t begin = one ? 0 : first, end = one ? first : arguments.take_whole("stop", 0);
  const int64_t by = one ? 1 : arguments.take_whole("step", 1);
  if (by == 0) throw Fault{"a range in steps of 0"};
  constexpr int64_t kFar = 100'000;  // transformers' sandbox allows no longer range either
  std::vector<Value> numbers;
  for (int64_t at = begin; by > 0 ? at < end : at > end;) {
    if (std::ssize(numbers) == kFar) throw Fault{"a range of more than 100000 numbers"};
    numbers.push_back({at});
    if (__builtin_add_overflow(at, by, &at)) break;
  }
  return work.list(std::move(numbers));
}

std::string now(const std::string& format) {
  const std::time_t time = std::time(nullptr);
  std::tm local{};
  localtime_r(&time, &local);
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  char text[512];
  return {text, strftime_l(text, sizeof text, format.c_str(), &local, plain)};
}

// dict(a=1), dict(other, a=1), namespace(…)
Dict given_values(Work& work, Arguments& arguments) {
  Dict values;
  if (!arguments.list.empty()) {
    const Value first = arguments.take("");
    if (!first.dict()) throw Fault{"a dict of " + type_name(first)};
    values = *first.dict();
  }
  for (auto& [name, value] : std::exchange(arguments.named, {})) put(work, values, name, value);
  return values;
}

}  // namespace

bool has_method(const Value& value, std::string_view name) {
  static constexpr std::string_view kOfDicts[] = {"get", "items", "keys", "values", "copy"};
  return value.text() ? text_methods().contains(name)
                      : value.dict() && std::ranges::find(kOfDicts, name) != std::end(kOfDicts);
}

Value call_method(Work& work, const Value& self, const std::string& name, Arguments& arguments) {
  work.read(self);
  Value result = self.text() ? text_methods().at(name)(work, *self.text(), arguments)
                             : dict_method(work, *self.dict(), name, arguments);
  arguments.done();
  return result;
}

bool is_function(std::string_view name) {
  return name == "range" || name == "namespace" || name == "dict" || name == "raise_exception" ||
         name == "strftime_now";
}

Value call_function(Work& work, const std::string& name, Arguments& arguments) {
  Value result;
  if (name == "range") result = range(work, arguments);
  if (name == "namespace") result = work.space(given_values(work, arguments));
  if (name == "dict") result = work.dict(given_values(work, arguments));
  if (name == "strftime_now") result = work.text(now(arguments.take_text("format")));
  if (name == "raise_exception") throw Fault{str(arguments.take("message")), true};
  arguments.done();
  return result;
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> all;
  for (size_t at = 0; at < text.size(); at += utf8_length(text[at]))
    all.push_back(text.substr(at, utf8_length(text[at])));
  return all;
}

bool is_space(std::string_view character) {
  return is_blank(decode_utf8(character.data()));
}

std::string_view strip(std::string_view text, const std::optional<std::string>& of, bool left, bool right) {
  const auto goes = [&](std::string_view character) {
    return of ? of->find(character) != of->npos : is_space(character);
  };
  while (left && !text.empty() && goes(text.substr(0, utf8_length(text[0])))) text.remove_prefix(utf8_length(text[0]));
  while (right && !text.empty() && goes(text.substr(last_character(text)))) text = text.substr(0, last_character(text));
  return text;
}

std::string lower_case(std::string_view text) {
  return changed(text, lower_of);
}

std::string word_titled(std::string_view text) {
  bool in_word = false;
  return changed(text, [&](char32_t c) {
    const bool between = is_blank(c) || std::u32string_view(U"-({[<").find(c) != std::u32string_view::npos;
    return std::exchange(in_word, !between) ? lower_of(c) : upper(c);
  });
}

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  std::string line;
  const auto all = characters(text);
  for (size_t i = 0; i < all.size(); ++i) {
    const char32_t c = decode_utf8(all[i].data());
    const bool ends = (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) {
      line += all[i];
      continue;
    }
    if (c == '\r' && i + 1 < all.size() && all[i + 1] == "\n") ++i;
    lines.push_back(std::exchange(line, {}));
  }
  if (!line.empty()) lines.push_back(std::move(line));
  return lines;
}

}  // namespace emend::models::detail::jinja
