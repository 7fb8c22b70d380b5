#include <emend/core/text.h>
#include <emend/models/detail/jinja_value.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <utf8proc.h>

#include <algorithm>
#include <cmath>

namespace emend::models::detail::jinja {
namespace {

constexpr size_t kMostSteps = 2'000'000;
constexpr size_t kMostBytesInAll = 256U << 20;
constexpr int kDeepestValue = 100;  // lists and dicts in each other

int deeper(int depth) {
  if (depth >= kDeepestValue) throw Fault{"a value that is nested too deeply"};
  return depth + 1;
}

[[noreturn]] void too_large() {
  throw Fault{"a text of more than 16 MiB"};
}

// str.isprintable(): letters, marks, numbers, punctuation and symbols, which follow each other.
bool is_shown(char32_t code) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code));
  return code == ' ' || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_SO);
}

void quote(std::string& out, const std::string& text) {
  const char mark = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  out += mark;
  for (size_t at = 0; at < text.size(); at += utf8_length(text[at])) {
    const std::string_view character = std::string_view(text).substr(at, utf8_length(text[at]));
    const char32_t code = decode_utf8(character.data());
    const size_t short_form = std::string_view("\n\r\t").find(character);
    if (character[0] == mark || character == "\\") {
      append(out, "\\" + std::string(character));
    } else if (short_form != std::string_view::npos) {
      append(out, std::string("\\") + "nrt"[short_form]);
    } else if (is_shown(code)) {
      append(out, character);
    } else {
      append(out, formatted(code < 0x100     ? "\\x%02x"
                            : code < 0x10000 ? "\\u%04x"
                                             : "\\U%08x",
                            static_cast<unsigned>(code)));
    }
  }
  out += mark;
}

void quote_json(std::string& out, const std::string& text) {
  static constexpr std::string_view kFrom = "\"\\\n\r\t\f\b", kTo = "\"\\nrtfb";
  out += '"';
  for (const char c : text) {
    if (const size_t which = kFrom.find(c); which != kFrom.npos) {
      append(out, std::string("\\") + kTo[which]);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      append(out, formatted("\\u%04x", static_cast<unsigned>(c)));
    } else {
      append(out, std::string_view(&c, 1));
    }
  }
  out += '"';
}

std::string repr_of_float(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e16);
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value,
                                 fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, end.ptr);
  return fixed && text.find('.') == text.npos ? text + ".0" : text;
}

template <class Range, class Each>
void write_all(std::string& out, const Range& range, std::string_view open, std::string_view close, const Each& each,
               std::string_view between = ", ") {
  append(out, open);
  for (bool first = true; const auto& one : range) {
    if (!std::exchange(first, false)) append(out, between);
    each(one);
  }
  append(out, close);
}

// str(), and repr() of what stands inside of a list or dict.
void write(std::string& out, const Value& value, bool inside) {
  if (const auto* text = value.text()) return inside ? quote(out, *text) : append(out, *text);
  if (value.undefined()) return append(out, inside ? "Undefined" : "");
  if (value.none()) return append(out, "None");
  if (const auto* flag = std::get_if<bool>(&value.data)) return append(out, *flag ? "True" : "False");
  if (const auto whole = value.whole()) return append(out, std::to_string(*whole));
  if (const auto real = value.real()) return append(out, repr_of_float(*real));
  if (const List* list = value.list()) {
    require_list(*list, "the text");
    const bool one = list->tuple && list->items.size() == 1;
    return write_all(out, list->items, list->tuple ? "(" : "[",
                     one           ? ",)"
                     : list->tuple ? ")"
                                   : "]",
                     [&](const Value& item) { write(out, item, true); });
  }
  if (const Dict* dict = value.dict())
    return write_all(out, *dict, "{", "}", [&](const auto& entry) {
      quote(out, entry.first);
      append(out, ": ");
      write(out, entry.second, true);
    });
  throw Fault{"the text of a " + type_name(value)};
}

void write_json(std::string& out, const Value& value, const JsonStyle& style, size_t level) {
  const auto line = [&](size_t depth) {
    if (style.indent) append(out, "\n" + std::string(depth * static_cast<size_t>(*style.indent), ' '));
  };
  const auto all = [&](const auto& range, const char* open, const char* close, const auto& each) {
    const auto on_its_line = [&](const auto& one) {
      line(level + 1);
      each(one);
    };
    write_all(out, range, open, "", on_its_line, style.between);
    if (!range.empty()) line(level);
    append(out, close);
  };
  if (const auto* text = value.text()) return quote_json(out, *text);
  if (value.none()) return append(out, "null");
  if (const auto* flag = std::get_if<bool>(&value.data)) return append(out, *flag ? "true" : "false");
  if (const auto* real = std::get_if<double>(&value.data); real && !std::isfinite(*real))
    return append(out, std::isnan(*real) ? "NaN" : *real > 0 ? "Infinity" : "-Infinity");
  if (value.real()) return write(out, value, false);
  if (const List* list = value.list()) {
    require_list(*list, "JSON");
    return all(list->items, "[", "]", [&](const Value& item) { write_json(out, item, style, level + 1); });
  }
  if (const Dict* dict = value.dict())
    return all(*dict, "{", "}", [&](const auto& entry) {
      quote_json(out, entry.first);
      append(out, style.colon);
      write_json(out, entry.second, style, level + 1);
    });
  throw Fault{"JSON of " + type_name(value)};
}

const Value* found(const Dict& dict, std::string_view key) {
  const auto entry = std::ranges::find(dict, key, [](const auto& one) { return std::string_view(one.first); });
  return entry == dict.end() ? nullptr : &entry->second;
}

int64_t length(const std::string& text) {
  return static_cast<int64_t>(width_of(text));
}

// The characters [begin, end) of `text`.
std::string part(std::string_view text, int64_t begin, int64_t end) {
  size_t from = 0;
  for (int64_t at = 0; at < begin; ++at) from += utf8_length(text[from]);
  size_t to = from;
  for (int64_t at = begin; at < end; ++at) to += utf8_length(text[to]);
  return std::string(text.substr(from, to - from));
}

[[noreturn]] void wrong_operands(std::string_view op, const Value& a, const Value& b) {
  throw Fault{type_name(a) + " " + std::string(op) + " " + type_name(b)};
}

template <class Shared>
const Shared* shared(const Value& value) {
  const auto* held = std::get_if<std::shared_ptr<const Shared>>(&value.data);
  return held ? held->get() : nullptr;
}

}  // namespace

void append(std::string& out, std::string_view text) {
  if (out.size() + text.size() > kMostBytes) too_large();
  out += text;
}

const std::string* Value::text() const {
  return shared<std::string>(*this);
}
const List* Value::list() const {
  return shared<List>(*this);
}
const Dict* Value::dict() const {
  return shared<Dict>(*this);
}
std::optional<int64_t> Value::whole() const {
  if (const auto* flag = std::get_if<bool>(&data)) return *flag ? 1 : 0;
  const auto* number = std::get_if<int64_t>(&data);
  return number ? std::optional(*number) : std::nullopt;
}
std::optional<double> Value::real() const {
  if (const auto number = whole()) return static_cast<double>(*number);
  const auto* number = std::get_if<double>(&data);
  return number ? std::optional(*number) : std::nullopt;
}

void Work::step(size_t count) {
  if (count > kMostSteps || (steps_ += count) > kMostSteps) throw Fault{"more than 2 million steps"};
}

Value Work::text(std::string text) {
  if (text.size() > kMostBytes) too_large();
  if ((bytes_ += text.size()) > kMostBytesInAll) throw Fault{"texts of more than 256 MiB together"};
  return {std::make_shared<const std::string>(std::move(text))};
}

Value Work::list(std::vector<Value> items, bool tuple, bool lazy) {
  step(items.size());
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth);
  return {std::make_shared<const List>(List{std::move(items), tuple, lazy}), deeper(depth)};
}

Value Work::dict(Dict values) {
  step(values.size());
  int depth = 0;
  for (const auto& [key, item] : values) depth = std::max(depth, item.depth);
  return {std::make_shared<const Dict>(std::move(values)), deeper(depth)};
}

Value Work::space(Dict values) {
  return {&spaces_.emplace_back(Space{std::move(values)})};
}

Value Work::from_json(const nlohmann::ordered_json& json) {
  if (json.is_null()) return {None()};
  if (json.is_boolean()) return {json.get<bool>()};
  if (json.is_number_integer()) return {json.get<int64_t>()};
  if (json.is_number()) return {json.get<double>()};
  if (json.is_string()) {
    auto content = json.get<std::string>();
    if (first_invalid_utf8(content)) throw Fault{"a text that is not valid UTF-8", true};
    return text(std::move(content));
  }
  if (json.is_array()) {
    std::vector<Value> items;
    for (const auto& item : json) items.push_back(from_json(item));
    return list(std::move(items));
  }
  Dict values;
  for (const auto& [key, item] : json.items()) values.emplace_back(key, from_json(item));
  return dict(std::move(values));
}

void Work::read(const Value& value) {
  const List* list = value.list();
  const Dict* dict = value.dict();
  const auto* text = value.text();
  step(1 + (list ? list->items.size() : dict ? dict->size() : text ? text->size() / 64 : 0));
}

void Work::search(std::string_view in, std::string_view what) {
  step(in.size() / 64 * (1 + what.size() / 64));
}

void put(Work& work, Dict& dict, const std::string& key, Value value) {
  work.step(1 + dict.size() / 16);
  const auto entry = std::ranges::find(dict, key, &Dict::value_type::first);
  if (entry == dict.end()) {
    dict.emplace_back(key, std::move(value));
  } else {
    entry->second = std::move(value);
  }
}

std::string type_name(const Value& value) {
  static constexpr const char* kNames[] = {"undefined", "None", "bool", "int",      "float",
                                           "str",       "list", "dict", "function", "namespace"};
  if (const auto* missing = std::get_if<Undefined>(&value.data); missing && !missing->name.empty())
    return "'" + missing->name + "', which is undefined";
  return kNames[value.data.index()];
}

void require_list(const List& list, const char* what) {
  if (list.lazy) throw Fault{std::string(what) + " of a generator, which needs \"| list\""};
}

bool truth(const Value& value) {
  if (const auto* text = value.text()) return !text->empty();
  if (const List* list = value.list()) return list->lazy || !list->items.empty();
  if (const Dict* dict = value.dict()) return !dict->empty();
  if (const auto real = value.real()) return *real != 0;
  return !value.undefined() && !value.none();
}

bool equal(Work& work, const Value& a, const Value& b) {
  work.step();
  if (a.whole() && b.whole()) return *a.whole() == *b.whole();
  if (a.real() && b.real()) return *a.real() == *b.real();
  if (a.data.index() != b.data.index()) return false;
  if (const auto* text = a.text()) {
    work.step(text->size() / 64);
    return *text == *b.text();
  }
  if (const List* list = a.list())
    return list->tuple == b.list()->tuple &&
           std::ranges::equal(list->items, b.list()->items,
                              [&](const Value& x, const Value& y) { return equal(work, x, y); });
  if (const Dict* dict = a.dict())
    return dict->size() == b.dict()->size() && std::ranges::all_of(*dict, [&](const auto& entry) {
             work.read(b);
             const Value* other = found(*b.dict(), entry.first);
             return other && equal(work, entry.second, *other);
           });
  if (const auto* space = std::get_if<Space*>(&a.data)) return *space == std::get<Space*>(b.data);
  return a.undefined() || a.none();
}

int order(Work& work, const Value& a, const Value& b) {
  work.step();
  const auto sign = [](const auto& x, const auto& y) { return x < y ? -1 : x > y ? 1 : 0; };
  if (a.whole() && b.whole()) return sign(*a.whole(), *b.whole());
  if (a.real() && b.real()) return sign(*a.real(), *b.real());
  if (a.text() && b.text()) {
    work.step(std::min(a.text()->size(), b.text()->size()) / 64);
    return sign(*a.text(), *b.text());
  }
  if (a.list() && b.list() && a.list()->tuple == b.list()->tuple) {
    const auto &x = a.list()->items, &y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!equal(work, x[i], y[i])) return order(work, x[i], y[i]);
    return sign(x.size(), y.size());
  }
  wrong_operands("<", a, b);
}

std::string str(const Value& value) {
  std::string text;
  write(text, value, false);
  return text;
}

std::string json_text(const Value& value, const JsonStyle& style) {
  std::string text;
  write_json(text, value, style, 0);
  return text;
}

std::vector<Value> iterate(Work& work, const Value& value) {
  work.read(value);
  std::vector<Value> items;
  if (const List* list = value.list()) return list->items;
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, item] : *dict) items.push_back(work.text(key));
  } else if (const auto* text = value.text()) {
    work.step(text->size());
    for (const auto character : characters(*text)) items.push_back(work.text(std::string(character)));
  } else if (!value.undefined()) {
    throw Fault{"a loop over " + type_name(value)};
  }
  return items;
}

bool contains(Work& work, const Value& all, const Value& one) {
  work.read(all);
  if (const auto* text = all.text()) {
    if (!one.text()) wrong_operands("in", one, all);
    work.search(*text, *one.text());
    return text->find(*one.text()) != text->npos;
  }
  if (const Dict* dict = all.dict()) return one.text() && found(*dict, *one.text());
  if (const List* list = all.list())
    return std::ranges::any_of(list->items, [&](const Value& item) { return equal(work, item, one); });
  if (!all.undefined()) wrong_operands("in", one, all);
  return false;
}

Value attribute(Work& work, const Value& value, const std::string& name) {
  if (value.undefined()) throw Fault{"an attribute (" + name + ") of " + type_name(value)};
  if (has_method(value, name)) return {std::make_shared<const Callable>(Callable{name, value})};
  const auto* space = std::get_if<Space*>(&value.data);
  const Dict* dict = space ? &(*space)->values : value.dict();
  if (dict) {
    work.step(dict->size() / 16);
    if (const Value* held = found(*dict, name)) return *held;
  }
  return {Undefined{name}};
}

Value item(Work& work, const Value& value, const Value& key) {
  if (value.undefined()) throw Fault{"an element of " + type_name(value)};
  if (const auto* name = key.text()) {
    const Dict* dict = value.dict();
    const Value* held = dict ? found(*dict, *name) : nullptr;
    return held ? *held : attribute(work, value, *name);
  }
  const List* list = value.list();
  const auto* text = value.text();
  if (list && key.whole()) require_list(*list, "an element");
  if (const auto index = key.whole(); index && (list || text)) {
    work.step(text ? text->size() / 64 : 0);
    const int64_t size = text ? length(*text) : std::ssize(list->items);
    const int64_t at = *index < 0 ? *index + size : *index;
    if (at >= 0 && at < size) return text ? work.text(part(*text, at, at + 1)) : list->items[static_cast<size_t>(at)];
  }
  return {Undefined{key.text() || key.whole() ? str(key) : "element"}};
}

// The places that Python's slice goes through.
Value sliced(Work& work, const Value& value, const Value& from, const Value& to, const Value& by) {
  if (!value.text() && !value.list()) throw Fault{"a part of " + type_name(value)};
  if (const List* list = value.list()) require_list(*list, "a part");
  work.read(value);
  const auto* whole = value.text();
  const int64_t size = whole ? length(*whole) : std::ssize(value.list()->items);
  const auto number = [](const Value& v) -> std::optional<int64_t> {
    if (!v.none() && !v.whole()) throw Fault{"a part from or to " + type_name(v)};
    return v.whole();
  };
  const int64_t step = std::clamp<int64_t>(number(by).value_or(1), -size - 1, size + 1);
  if (step == 0) throw Fault{"a part in steps of 0"};
  const auto place = [&](const Value& v, int64_t otherwise) {
    const auto given = number(v);
    if (!given) return otherwise;
    const int64_t at = *given < 0 ? *given + size : *given;
    return step > 0 ? std::clamp<int64_t>(at, 0, size) : std::clamp<int64_t>(at, -1, size - 1);
  };
  const int64_t begin = place(from, step > 0 ? 0 : size - 1), end = place(to, step > 0 ? size : -1);
  if (whole && step == 1) return work.text(part(*whole, begin, end));
  work.step(whole ? whole->size() : 0);
  const auto all = whole ? characters(*whole) : std::vector<std::string_view>();
  std::string text;
  std::vector<Value> items;
  for (int64_t at = begin; step > 0 ? at < end : at > end; at += step) {
    if (whole) {
      text += all[static_cast<size_t>(at)];
    } else {
      items.push_back(value.list()->items[static_cast<size_t>(at)]);
    }
  }
  return whole ? work.text(std::move(text)) : work.list(std::move(items), value.list()->tuple);
}

}  // namespace emend::models::detail::jinja
