// Filters and tests of a template.
#include <emend/core/text.h>
#include <emend/models/detail/jinja_value.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

namespace emend::models::detail::jinja {
namespace {

using Filter = Value (*)(Work&, const Value&, Arguments&);
using Test = bool (*)(Work&, const Value&, Arguments&);

// The value that `path` ("a", "a.0.b", a number) names inside of `value`.
Value inside(Work& work, Value value, const Value& path) {
  if (!path.text()) return item(work, value, path);
  const std::string names = *path.text() + ".";
  for (size_t begin = 0, end; (end = names.find('.', begin)) != names.npos; begin = end + 1) {
    const std::string name = names.substr(begin, end - begin);
    const auto number = number_in<int64_t>(name);
    value = number && *number >= 0 ? item(work, value, {*number}) : item(work, value, work.text(name));
  }
  return value;
}

Value without_case(Work& work, const Value& value) {
  return value.text() ? work.text(lower_case(*value.text())) : value;
}

// What `attribute` and `case_sensitive` make of each element for comparing.
std::function<Value(const Value&)> key_of(Work& work, Arguments& arguments) {
  const bool sensitive = arguments.take_flag("case_sensitive", false);
  const Value path = arguments.take("attribute", {None()});
  return [&work, sensitive, path](const Value& value) {
    Value key = path.none() ? value : inside(work, value, path);
    return sensitive ? key : without_case(work, key);
  };
}

Value sorted(Work& work, std::vector<Value> items, const std::function<Value(const Value&)>& key, bool backwards) {
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& one : items) keyed.emplace_back(key(one), std::move(one));
  std::ranges::stable_sort(keyed, [&](const auto& a, const auto& b) {
    return backwards ? order(work, b.first, a.first) < 0 : order(work, a.first, b.first) < 0;
  });
  items.clear();
  for (auto& [by, one] : keyed) items.push_back(std::move(one));
  return work.list(std::move(items));
}

Value dictsort(Work& work, const Value& value, Arguments& arguments) {
  if (!value.dict()) throw Fault{"dictsort of " + type_name(value)};
  const bool sensitive = arguments.take_flag("case_sensitive", false);
  const size_t by = arguments.take_text("by", "key") == "value" ? 1 : 0;
  const bool backwards = arguments.take_flag("reverse", false);
  std::vector<Value> pairs;
  for (const auto& [key, held] : *value.dict()) pairs.push_back(work.list({work.text(key), held}, true));
  const auto key = [&](const Value& pair) {
    const Value& part = pair.list()->items[by];
    return sensitive ? part : without_case(work, part);
  };
  return sorted(work, std::move(pairs), key, backwards);
}

Value join_filter(Work& work, const Value& value, Arguments& arguments) {
  const std::string between = str(arguments.take("d", work.text("")));
  const Value path = arguments.take("attribute", {None()});
  std::string all;
  for (bool first = true; const Value& one : iterate(work, value)) {
    if (!std::exchange(first, false)) append(all, between);
    append(all, str(path.none() ? one : inside(work, one, path)));
  }
  return work.text(std::move(all));
}

// map and select take everything that is not true for an empty list.
std::vector<Value> any_of(Work& work, const Value& value) {
  return truth(value) ? iterate(work, value) : std::vector<Value>();
}

Value map(Work& work, const Value& value, Arguments& arguments) {
  std::vector<Value> items = any_of(work, value);
  if (arguments.list.empty()) {
    const Value path = arguments.take("attribute"), otherwise = arguments.take("default");
    if (path.undefined()) throw Fault{"map without a filter or attribute"};
    for (Value& one : items) {
      one = inside(work, one, path);
      if (one.undefined()) one = otherwise;
    }
  } else {
    const std::string name = arguments.take_text("filter");
    for (Value& one : items) {
      Arguments own{{arguments.list.begin() + 1, arguments.list.end()}, arguments.named};
      one = apply_filter(work, name, one, own);
    }
    arguments = {};
  }
  return work.list(std::move(items), false, /*lazy=*/true);
}

// select, reject, selectattr, rejectattr: by the truth of an element or its attribute, or by a test with arguments.
Value chosen(Work& work, const Value& value, Arguments& arguments, bool by_attribute, bool wanted) {
  const Value path = by_attribute ? arguments.take("attribute") : Value();
  const bool plain = arguments.list.size() <= arguments.taken;
  const std::string test = plain ? "" : arguments.take_text("test");
  const auto rest = arguments.list.begin() + static_cast<std::ptrdiff_t>(arguments.taken);
  std::vector<Value> items;
  for (const Value& one : any_of(work, value)) {
    const Value looked_at = by_attribute ? inside(work, one, path) : one;
    Arguments own{{rest, arguments.list.end()}, arguments.named};
    if ((plain ? truth(looked_at) : apply_test(work, test, looked_at, own)) == wanted) items.push_back(one);
  }
  arguments = {};
  return work.list(std::move(items), false, /*lazy=*/true);
}

Value tojson(Work& work, const Value& value, Arguments& arguments) {
  JsonStyle style;
  const bool ascii = arguments.take_flag("ensure_ascii", false);
  const Value indent = arguments.take("indent", {None()}), separators = arguments.take("separators", {None()});
  if (ascii || arguments.take_flag("sort_keys", false)) throw Fault{"tojson with ensure_ascii or sort_keys"};
  if (!indent.none() && (!indent.whole() || *indent.whole() > 100))
    throw Fault{"tojson with an indent that is no small number"};
  if (!indent.none()) style = {std::max<int64_t>(*indent.whole(), 0), ",", ": "};
  if (const List* list = separators.list()) {
    if (list->items.size() != 2) throw Fault{"tojson with other than two separators"};
    style.between = str(list->items[0]);
    style.colon = str(list->items[1]);
  }
  return work.text(json_text(value, style));
}

Value indented(Work& work, const Value& value, Arguments& arguments) {
  const Value width = arguments.take("width", {int64_t{4}});
  if (width.whole() && *width.whole() > 1000) throw Fault{"indent by more than 1000"};
  const std::string blank =
      width.text() ? *width.text()
                   : std::string(static_cast<size_t>(std::max<int64_t>(width.whole().value_or(0), 0)), ' ');
  const bool first = arguments.take_flag("first", false), blanks = arguments.take_flag("blank", false);
  std::string all;
  const auto lines = split_lines(str(value) + "\n");
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) all += "\n";
    if (i == 0 ? first : blanks || !lines[i].empty()) all += blank;
    append(all, lines[i]);
  }
  return work.text(std::move(all));
}

Value as_whole(Work&, const Value& value, Arguments& arguments) {
  const Value otherwise = arguments.take("default", {int64_t{0}});
  if (value.undefined()) throw Fault{"the number of an undefined value"};
  if (const auto whole = value.whole()) return {*whole};
  std::optional<double> real = value.real();
  if (const auto* text = value.text()) {
    std::string_view digits = strip(*text, {}, true, true);
    if (digits.starts_with('+')) digits.remove_prefix(1);
    if (const auto whole = number_in<int64_t>(digits)) return {*whole};
    real = number_in<double>(digits);
  }
  if (!real || std::isnan(*real) || (value.text() && std::isinf(*real))) return otherwise;
  if (std::abs(*real) >= 9e18) throw Fault{"a number that does not fit into 64 bits"};
  return {static_cast<int64_t>(*real)};
}

Value reversed(Work& work, const Value& value, Arguments&) {
  return sliced(work, value.text() ? value : work.list(iterate(work, value)), {None()}, {None()}, {int64_t{-1}});
}

Value length_of(Work&, const Value& value, Arguments&) {
  if (const auto* text = value.text()) return {static_cast<int64_t>(width_of(*text))};
  if (const List* list = value.list()) {
    require_list(*list, "the length");
    return {std::ssize(list->items)};
  }
  if (const Dict* dict = value.dict()) return {std::ssize(*dict)};
  if (!value.undefined()) throw Fault{"the length of " + type_name(value)};
  return {int64_t{0}};
}

Value items_of(Work& work, const Value& value, Arguments& arguments) {
  if (value.undefined()) return work.list({});
  if (!value.dict()) throw Fault{"the items of " + type_name(value)};
  return call_method(work, value, "items", arguments);
}

// What the method of a text does.
Value by_method(Work& work, const Value& value, const char* method, Arguments& arguments) {
  return call_method(work, work.text(str(value)), method, arguments);
}

Value replace_filter(Work& work, const Value& value, Arguments& arguments) {
  arguments.list.resize(std::max<size_t>(arguments.list.size(), 2));
  for (size_t i = 0; i < 2; ++i) arguments.list[i] = work.text(str(arguments.list[i]));
  return by_method(work, value, "replace", arguments);
}

Value otherwise(Work& work, const Value& value, Arguments& arguments) {
  const Value given = arguments.take("default_value", work.text(""));
  const bool falsy = arguments.take_flag("boolean", false);
  return value.undefined() || (falsy && !truth(value)) ? given : value;
}

Value first_of(Work& work, const Value& value, Arguments&) {
  const auto items = iterate(work, value);
  return items.empty() ? Value() : items.front();
}

Value last_of(Work& work, const Value& value, Arguments&) {
  if (const List* list = value.list()) require_list(*list, "the last element");
  const auto items = iterate(work, value);
  return items.empty() ? Value() : items.back();
}

Value sort_filter(Work& work, const Value& value, Arguments& arguments) {
  const bool backwards = arguments.take_flag("reverse", false);
  return sorted(work, iterate(work, value), key_of(work, arguments), backwards);
}

Value as_text(Work& work, const Value& value, Arguments&) {
  return work.text(str(value));
}

const std::map<std::string_view, Filter>& filters() {
  static const std::map<std::string_view, Filter> all = {
      {"capitalize", [](Work& w, const Value& v, Arguments& a) { return by_method(w, v, "capitalize", a); }},
      {"count", length_of},
      {"d", otherwise},
      {"default", otherwise},
      {"dictsort", dictsort},
      {"first", first_of},
      {"indent", indented},
      {"int", as_whole},
      {"items", items_of},
      {"join", join_filter},
      {"last", last_of},
      {"length", length_of},
      {"list", [](Work& w, const Value& v, Arguments&) { return w.list(iterate(w, v)); }},
      {"lower", [](Work& w, const Value& v, Arguments& a) { return by_method(w, v, "lower", a); }},
      {"map", map},
      {"reject", [](Work& w, const Value& v, Arguments& a) { return chosen(w, v, a, false, false); }},
      {"rejectattr", [](Work& w, const Value& v, Arguments& a) { return chosen(w, v, a, true, false); }},
      {"replace", replace_filter},
      {"reverse", reversed},
      {"safe", as_text},
      {"select", [](Work& w, const Value& v, Arguments& a) { return chosen(w, v, a, false, true); }},
      {"selectattr", [](Work& w, const Value& v, Arguments& a) { return chosen(w, v, a, true, true); }},
      {"sort", sort_filter},
      {"string", as_text},
      {"title", [](Work& w, const Value& v, Arguments&) { return w.text(word_titled(str(v))); }},
      {"tojson", tojson},
      {"trim", [](Work& w, const Value& v, Arguments& a) { return by_method(w, v, "strip", a); }},
      {"upper", [](Work& w, const Value& v, Arguments& a) { return by_method(w, v, "upper", a); }},
  };
  return all;
}

template <bool wanted>
bool is_flag(Work&, const Value& value, Arguments&) {
  const auto* flag = std::get_if<bool>(&value.data);
  return flag && *flag == wanted;
}

int ordered(Work& work, const Value& value, Arguments& arguments) {
  return order(work, value, arguments.take("other"));
}

bool is_odd(const Value& value) {
  if (!value.whole()) throw Fault{"the rest of " + type_name(value)};
  return *value.whole() % 2 != 0;
}

const std::map<std::string_view, Test>& tests() {
  const Test is_equal = [](Work& w, const Value& v, Arguments& a) { return equal(w, v, a.take("other")); };
  const Test differs = [](Work& w, const Value& v, Arguments& a) { return !equal(w, v, a.take("other")); };
  const Test above = [](Work& w, const Value& v, Arguments& a) { return ordered(w, v, a) > 0; };
  const Test below = [](Work& w, const Value& v, Arguments& a) { return ordered(w, v, a) < 0; };
  const Test at_least = [](Work& w, const Value& v, Arguments& a) { return ordered(w, v, a) >= 0; };
  const Test at_most = [](Work& w, const Value& v, Arguments& a) { return ordered(w, v, a) <= 0; };
  static const std::map<std::string_view, Test> all = {
      {"boolean", [](Work&, const Value& v, Arguments&) { return std::holds_alternative<bool>(v.data); }},
      {"defined", [](Work&, const Value& v, Arguments&) { return !v.undefined(); }},
      {"even", [](Work&, const Value& v, Arguments&) { return !is_odd(v); }},
      {"false", is_flag<false>},
      {"float", [](Work&, const Value& v, Arguments&) { return std::holds_alternative<double>(v.data); }},
      {"in", [](Work& w, const Value& v, Arguments& a) { return contains(w, a.take("seq"), v); }},
      {"integer", [](Work&, const Value& v, Arguments&) { return std::holds_alternative<int64_t>(v.data); }},
      {"iterable", [](Work&, const Value& v, Arguments&) { return v.text() || v.list() || v.dict() || v.undefined(); }},
      {"mapping", [](Work&, const Value& v, Arguments&) { return v.dict() != nullptr; }},
      {"none", [](Work&, const Value& v, Arguments&) { return v.none(); }},
      {"number", [](Work&, const Value& v, Arguments&) { return v.real().has_value(); }},
      {"odd", [](Work&, const Value& v, Arguments&) { return is_odd(v); }},
      {"sequence", [](Work&, const Value& v,
                      Arguments&) { return v.text() || v.dict() || v.undefined() || (v.list() && !v.list()->lazy); }},
      {"string", [](Work&, const Value& v, Arguments&) { return v.text() != nullptr; }},
      {"true", is_flag<true>},
      {"undefined", [](Work&, const Value& v, Arguments&) { return v.undefined(); }},
      {"eq", is_equal},
      {"==", is_equal},
      {"equalto", is_equal},
      {"ne", differs},
      {"!=", differs},
      {"gt", above},
      {">", above},
      {"greaterthan", above},
      {"ge", at_least},
      {">=", at_least},
      {"lt", below},
      {"<", below},
      {"lessthan", below},
      {"le", at_most},
      {"<=", at_most},
  };
  return all;
}

}  // namespace

Value Arguments::take(std::string_view name, Value otherwise) {
  if (taken < list.size()) return list[taken++];
  const auto given = std::ranges::find_if(named, [&](const auto& one) { return one.first == name; });
  if (given == named.end()) return otherwise;
  Value value = given->second;
  named.erase(given);
  return value;
}

bool Arguments::has(std::string_view name) const {
  return taken < list.size() || std::ranges::find(named, name, &Dict::value_type::first) != named.end();
}

bool Arguments::take_flag(std::string_view name, bool otherwise) {
  return truth(take(name, {otherwise}));
}

int64_t Arguments::take_whole(std::string_view name, int64_t otherwise) {
  const Value value = take(name, {otherwise});
  if (!value.whole()) throw Fault{type_name(value) + " for " + std::string(name) + ", a whole number"};
  return *value.whole();
}

std::string Arguments::take_text(std::string_view name, const char* otherwise) {
  const Value value = take(name);
  if (value.undefined() && otherwise) return otherwise;
  if (!value.text()) throw Fault{type_name(value) + " for " + std::string(name) + ", a text"};
  return *value.text();
}

void Arguments::done() const {
  if (!named.empty()) throw Fault{"the argument " + named[0].first};
  if (taken < list.size()) throw Fault{"an argument too many"};
}

Value apply_filter(Work& work, const std::string& name, const Value& value, Arguments& arguments) {
  const auto filter = filters().find(name);
  if (filter == filters().end()) throw Fault{"the filter \"" + name + "\""};
  work.read(value);
  Value result = filter->second(work, value, arguments);
  arguments.done();
  return result;
}

bool apply_test(Work& work, const std::string& name, const Value& value, Arguments& arguments) {
  const auto test = tests().find(name);
  if (test == tests().end()) throw Fault{"the test \"" + name + "\""};
  work.read(value);
  const bool result = test->second(work, value, arguments);
  arguments.done();
  return result;
}

}  // namespace emend::models::detail::jinja
