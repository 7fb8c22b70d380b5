#include <emend/core/option.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

namespace emend {
namespace {

std::string text_of(const bool*) {
  return "";
}

template <class Value>
std::string text_of(const Value* value) {
  std::ostringstream text;
  text << *value;
  return text.str();
}

template <class Value>
std::string text_of(const std::vector<Value>* values) {
  return join(*values, ",", [](const Value& value) { return text_of(&value); });
}

std::string text_of(const CountOrAuto& count) {
  return *count.value == count.automatic ? "auto" : std::to_string(*count.value);
}

// "a whole number from 0 on", "a number above 0 up to 1".
std::string limits_text(const Limits& limits, bool whole) {
  const auto number = [&](double value) {
    std::ostringstream text;
    text << std::setprecision(17) << value;
    return text.str();
  };
  const bool bounded = limits.max < std::numeric_limits<double>::infinity();
  const std::string kind = whole ? "a whole number" : "a number";
  if (limits.min == -std::numeric_limits<double>::infinity())
    return kind + (bounded ? " of at most " + number(limits.max) : "");
  const std::string to = bounded && limits.below ? ", below " + number(limits.max) : "";
  if (limits.above)
    return kind + " above " + number(limits.min) + (bounded && to.empty() ? " up to " + number(limits.max) : to);
  return kind + " from " + number(limits.min) + (!to.empty() ? to : bounded ? " to " + number(limits.max) : " on");
}

template <class Number>
std::string fault_of_number(const std::string& text, const Limits& limits) {
  Number value{};
  const char* begin = text.data() + (text.starts_with("+") ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  const auto number = static_cast<double>(value);
  const bool good = error == std::errc() && end == text.data() + text.size() && std::isfinite(number) &&
                    (limits.below ? number < limits.max : number <= limits.max) &&
                    (limits.above ? number > limits.min : number >= limits.min);
  const bool wide = sizeof(Number) > 4;
  const std::string most =
      wide && std::is_integral_v<Number> && error == std::errc::result_out_of_range ? " that 64 bits hold" : "";
  return good ? "" : "\"" + text + "\"; expected " + limits_text(limits, std::is_integral_v<Number>) + most;
}

// As fault_of reads it, which was asked before: "010" is ten.
template <class Value>
void read_value(std::string_view text, Value& value) {
  if constexpr (std::is_arithmetic_v<Value>)
    std::from_chars(text.data() + (text.starts_with("+") ? 1 : 0), text.data() + text.size(), value);
  else
    value = text;
}

template <class Slot>
constexpr bool kIsList = false;
template <class Value>
constexpr bool kIsList<std::vector<Value>*> = true;

void set_option(const Option& option, const nlohmann::json& value) {
  const auto refuse = [&](const std::string& expected) {
    throw Error(ErrorClass::kInvalidArgument, {field_name(option.spellings().back()), value.dump(), expected, ""});
  };
  for (const auto& one : value.is_array() ? value : nlohmann::json::array({value})) {
    const std::string text = one.is_string() ? one.get<std::string>() : one.dump();
    if (!option.choices.empty() && std::ranges::find(option.choices, text) == option.choices.end())
      refuse("one of " + join(option.choices));
    if (const auto fault = option.is_flag() ? "" : fault_of(option, text); !fault.empty())
      refuse(fault.substr(fault.find("expected ") + 9));
  }
  try {
    std::visit(
        [&]<class Slot>(const Slot& slot) {
          if constexpr (std::is_same_v<Slot, CountOrAuto>)
            *slot.value = value == "auto" ? slot.automatic : value.get<int64_t>();
          else if constexpr (kIsList<Slot>)
            (value.is_array() ? value : nlohmann::json::array({value})).get_to(*slot);
          else
            value.get_to(*slot);
        },
        option.value);
  } catch (const nlohmann::json::exception&) {
    refuse("a value of its type");
  }
}

}  // namespace

std::string Option::text() const {
  return std::visit([](const auto& slot) { return text_of(slot); }, value);
}

OptionGroup& OptionGroup::add(std::string names, OptionValue value, std::string meaning, OptionForm form) {
  options_.list_.push_back({std::move(form), std::move(names), heading_, std::move(meaning), std::move(value)});
  return *this;
}

OptionGroup& OptionGroup::field(std::string_view name, OptionValue value, std::string meaning, OptionForm form) {
  for (auto* other : {&form.needs, &form.excludes})
    if (!other->empty()) *other = option_spelling(*other);
  return add(option_spelling(name), std::move(value), std::move(meaning), std::move(form));
}

const Option* Options::find(const std::string& name) const {
  for (const auto& option : list_)
    if (std::ranges::count(option.spellings(), name) > 0) return &option;
  return nullptr;
}

Option& Options::at(const std::string& name) {
  if (const Option* found = find(name)) return list_[static_cast<size_t>(found - list_.data())];
  throw std::out_of_range("no option " + name + " was declared");
}

std::vector<std::string> list_items(const std::string& text) {
  std::vector<std::string> items;
  for (size_t begin = 0; begin <= text.size(); begin += items.back().size() + 1)
    items.push_back(text.substr(begin, text.find(',', begin) - begin));
  return items;
}

std::string fault_of(const Option& option, const std::string& text) {
  if (text.empty()) {
    const bool may_be = option.type == "TEXT" && std::ranges::none_of(option.spellings(), [](const auto& name) {
                          return !name.starts_with("-");
                        });
    return may_be ? "" : "an empty text; expected " + (option.type.empty() ? "a value" : option.type);
  }
  const bool hexadecimal = text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (option.digits > 0 && (!hexadecimal || text.size() < static_cast<size_t>(option.digits)))
    return "\"" + text + "\"; expected " + std::to_string(option.digits) + " hexadecimal digits or more";
  return std::visit(
      [&]<class Slot>(const Slot& slot) -> std::string {
        if constexpr (std::is_same_v<Slot, int*> || std::is_same_v<Slot, std::vector<int>*>)
          return fault_of_number<int>(text, option.limits);
        else if constexpr (std::is_same_v<Slot, int64_t*> || std::is_same_v<Slot, std::vector<int64_t>*>)
          return fault_of_number<int64_t>(text, option.limits);
        else if constexpr (std::is_same_v<Slot, uint64_t*>)
          return fault_of_number<uint64_t>(text, {.min = std::max(0.0, option.limits.min), .max = option.limits.max});
        else if constexpr (std::is_same_v<Slot, double*> || std::is_same_v<Slot, std::vector<double>*>)
          return fault_of_number<double>(text, option.limits);
        else if constexpr (std::is_same_v<Slot, CountOrAuto>)
          return text == "auto" || (text.size() <= 15 && text.find_first_not_of("0123456789") == text.npos)
                     ? ""
                     : "\"" + text + "\"; expected a number of " + slot.unit + " from 0 on, or auto";
        else
          return "";
      },
      option.value);
}

void assign(const Option& option, const std::vector<std::string>& values) {
  std::visit(
      [&]<class Slot>(const Slot& slot) {
        if constexpr (std::is_same_v<Slot, CountOrAuto>) {
          *slot.value = values.at(0) == "auto" ? slot.automatic : std::stoll(values.at(0));
        } else if constexpr (kIsList<Slot>) {
          slot->clear();
          for (const auto& value : values) read_value(value, slot->emplace_back());
        } else if constexpr (!std::is_same_v<Slot, bool*>) {
          read_value(values.at(0), *slot);
        }
      },
      option.value);
}

std::string contradiction(const Option& option) {
  auto* const* words = std::get_if<std::vector<std::string>*>(&option.value);
  std::map<std::string, std::string> values;
  if (!words || option.type != "KEY=VALUE") return "";
  for (const auto& word : **words) {
    const auto [known, is_new] = values.emplace(word.substr(0, word.find('=')), word);
    if (!is_new && known->second != word) return known->second + " and " + word + "; give one of them";
  }
  return "";
}

std::string field_name(const std::string& spelling) {
  std::string name = lower(spelling);
  name.erase(0, name.find_first_not_of('-'));
  std::ranges::replace(name, '-', '_');
  return name;
}

std::string action_of(const Options& options) {
  for (const Option& option : options.all())
    if (!option.choices.empty() && (option.names[0] != '-' || option.required)) return option.text();
  return "";
}

bool is_of(const Option& option, const std::string& action) {
  return option.only.empty() || std::ranges::find(option.only, action) != option.only.end();
}

void set_options(const Options& options, const std::string& action, const nlohmann::json& values) {
  std::vector<std::string> names;
  const auto given = [&](const std::string& name) {
    const auto found = values.find(name);
    return found != values.end() && *found != false;
  };
  for (const Option& option : options.all()) {
    if (!is_of(option, action)) continue;
    const std::string& name = names.emplace_back(field_name(option.spellings().back()));
    if (values.contains(name)) set_option(option, values.at(name));
    for (const auto& other : {option.needs, option.excludes}) {
      const bool wanted = other == option.needs;
      if (other.empty() || !given(name) || given(field_name(other)) == wanted) continue;
      refuse({name, wanted ? "nothing to act on" : "what takes its effect away",
              field_name(other) + (wanted ? " with it" : " without it"), ""});
    }
    if (option.required && !values.contains(name) && name != "action") refuse({name, "nothing", option.meaning, ""});
  }
  for (const auto& [name, value] : values.items())
    if (std::ranges::find(names, name) == names.end())
      refuse({name, "no option of " + action, "one of " + join(names), did_you_mean(name, names)});
}

}  // namespace emend
