#include <emend/core/text.h>
#include <emend/evaluation/detail/values.h>

#include <cmath>

namespace emend::evaluation::detail {

using nlohmann::json;

std::string fixed(std::optional<double> value, int digits) {
  if (!value || !std::isfinite(*value)) return "–";
  // A product that is exactly a half is moved on: printf would take the even neighbour.
  const double scale = std::pow(10.0, digits), scaled = *value * scale;
  const bool half = std::fma(*value, scale, -scaled) == 0 && std::fabs(scaled - std::trunc(scaled)) == 0.5;
  const std::string text = formatted("%.*f", digits, half ? std::round(scaled) / scale : *value);
  return text.find_first_of("123456789") == std::string::npos && text.starts_with('-') ? text.substr(1) : text;
}

std::string probability(double value) {
  if (!std::isfinite(value)) return "–";
  if (value < 0.001) return "< 0.001";
  return formatted("%.*f", value < 0.1 ? 3 : 2, value);
}

const json& member(const json& object, std::initializer_list<std::string_view> path) {
  static const json null;
  const json* at = &object;
  for (std::string_view key : path) {
    if (!at->is_object()) return null;
    const auto found = at->find(key);
    if (found == at->end()) return null;
    at = &*found;
  }
  return *at;
}

const json& at_path(const json& object, std::string_view path) {
  const auto dot = path.find('.');
  return dot == path.npos ? member(object, {path}) : member(object, {path.substr(0, dot), path.substr(dot + 1)});
}

const json& interval_of(const json& summary, const std::string& key) {
  const json& own = member(summary, {"ci95", key});
  return own.is_null() ? member(summary, {key + "_ci95"}) : own;
}

std::optional<double> as_number(const json& value) {
  if (!value.is_number()) return std::nullopt;
  return value.get<double>();
}

std::string as_text(const json& value, const std::string& fallback) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  return fallback;
}

std::vector<double> numbers(const json& list) {
  std::vector<double> out;
  if (list.is_array())
    for (const auto& value : list) out.push_back(as_number(value).value_or(NAN));
  return out;
}

}  // namespace emend::evaluation::detail
