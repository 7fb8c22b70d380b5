// How each field type is read from a raw value: what fits, what is refused and what the refusal says.
#include <emend/core/text.h>
#include <emend/hparams/schema.h>

#include <algorithm>
#include <cmath>

namespace emend::hparams::detail {
namespace {

std::string integral_text(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15 ? std::to_string(static_cast<int64_t>(value))
                                                              : nlohmann::json(value).dump();
}

/// A finite number spelled in `raw`. Quoted numbers are taken from YAML only: EasyEdit turns them into floats too.
std::optional<double> number(const RawValue& raw) {
  if (raw.kind != RawValue::Kind::kScalar || (raw.quoted && raw.json)) return std::nullopt;
  const auto value = number_in<double>(std::string_view(raw.text).substr(raw.text.starts_with('+') ? 1 : 0));
  return value && std::isfinite(*value) ? value : std::nullopt;
}

/// "at least 0", "from 0 to 1", "above 0", or empty.
std::string range_text(const FieldOptions& options) {
  if (options.above)
    return " above " + integral_text(*options.above) +
           (options.max ? " and at most " + integral_text(*options.max) : "");
  if (options.min && options.max) return " from " + integral_text(*options.min) + " to " + integral_text(*options.max);
  if (options.min) return " of at least " + integral_text(*options.min);
  if (options.max) return " of at most " + integral_text(*options.max);
  return "";
}

bool in_range(double value, const FieldOptions& options) {
  return !(options.above && value <= *options.above) && !(options.min && value < *options.min) &&
         !(options.max && value > *options.max);
}

std::string one_of_text(const FieldOptions& options) {
  return options.one_of.empty() ? "" : "one of " + join(options.one_of);
}

/// Reads every item with `read_item`; the first refusal wins.
template <class V>
std::string read_list(const RawValue& raw, const FieldOptions& options, std::vector<V>& out, const char* name) {
  if (raw.line == 0 && raw.kind == RawValue::Kind::kScalar) {
    RawValue list;
    list.kind = RawValue::Kind::kSequence;
    list.items = {raw};
    list.line = 1;
    return read_list(list, options, out, name);
  }
  std::string expected = "a list of ";
  expected.append(name).append(range_text(options));
  if (raw.kind != RawValue::Kind::kSequence) return expected + ", such as [4, 5]";
  if (static_cast<int64_t>(raw.items.size()) < options.min_items)
    return expected + " with at least " + counted(static_cast<size_t>(options.min_items), "item");
  std::vector<V> values;
  for (const RawValue& item : raw.items) {
    V value{};
    if (const std::string refusal = read_value(item, options, value); !refusal.empty())
      return expected + "; " + item.show() + " is not " + refusal;
    values.push_back(std::move(value));
  }
  out = std::move(values);
  return "";
}

}  // namespace

std::string read_value(const RawValue& raw, const FieldOptions&, bool& out) {
  if (raw.kind == RawValue::Kind::kScalar && !raw.quoted) {
    const std::string word = lower(raw.text);
    const bool yes = word == "true" || word == "yes" || word == "on";
    if (yes || word == "false" || word == "no" || word == "off") {
      out = yes;
      return "";
    }
  }
  return "true or false";
}

std::string read_value(const RawValue& raw, const FieldOptions& options, int64_t& out) {
  const auto value = number(raw);
  // 25.0 and 1e5 are integers too: YAML and JSON writers do not keep the difference.
  if (!value || *value != std::floor(*value) || std::abs(*value) > 9007199254740992.0 || !in_range(*value, options))
    return "an integer" + range_text(options);
  out = static_cast<int64_t>(*value);
  return "";
}

std::string read_value(const RawValue& raw, const FieldOptions& options, double& out) {
  const auto value = number(raw);
  if (!value || !in_range(*value, options)) return "a number" + range_text(options);
  out = *value;
  return "";
}

std::string read_value(const RawValue& raw, const FieldOptions& options, std::string& out) {
  const bool fits = raw.kind == RawValue::Kind::kScalar && (raw.quoted || !raw.json);
  if (!options.one_of.empty() &&
      (!fits || std::find(options.one_of.begin(), options.one_of.end(), raw.text) == options.one_of.end()))
    return one_of_text(options);
  if (!fits) return "a string";
  out = raw.text;
  return "";
}

std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<int64_t>& out) {
  return read_list(raw, options, out, "integers");
}
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<double>& out) {
  return read_list(raw, options, out, "numbers");
}
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<std::string>& out) {
  return read_list(raw, options, out, "strings");
}
std::string read_value(const RawValue& raw, const FieldOptions& options, std::vector<std::vector<int64_t>>& out) {
  FieldOptions inner = options;
  inner.min_items = 0;
  if (raw.kind != RawValue::Kind::kSequence) return "a list of lists, such as [[5, 10], [10, 10]]";
  std::vector<std::vector<int64_t>> lists;
  for (const RawValue& item : raw.items) {
    std::vector<int64_t> list;
    if (!read_value(item, inner, list).empty())
      return "a list of lists of integers" + range_text(options) + ", such as [[5, 10], [10, 10]]; " + item.show() +
             " is not one of them";
    lists.push_back(std::move(list));
  }
  if (static_cast<int64_t>(lists.size()) < options.min_items)
    return "at least " + std::to_string(options.min_items) + " lists";
  out = std::move(lists);
  return "";
}

bool is_absent(const RawValue& raw, bool flag) {
  const bool scalar = raw.kind == RawValue::Kind::kScalar && !(raw.quoted && raw.json);
  return raw.kind == RawValue::Kind::kNull || (scalar && lower(raw.text) == "none") ||
         (!flag && scalar && !raw.quoted && lower(raw.text) == "false");
}

std::string limits_text(const FieldOptions& options) {
  if (!options.one_of.empty()) return one_of_text(options);
  std::string text = range_text(options);
  if (!text.empty()) text.erase(0, 1);
  return text;
}

}  // namespace emend::hparams::detail
