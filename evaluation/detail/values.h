// Tolerant reading of JSON that others wrote, and numbers for people.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace emend::evaluation::detail {

/// "85.8"; "–" if absent. Halves go away from 0, as in the pages' scripts.
[[nodiscard]] std::string fixed(std::optional<double> value, int digits = 1);
/// "0.97", "< 0.001".
[[nodiscard]] std::string probability(double value);

/// The member at a path of keys, or null.
[[nodiscard]] const nlohmann::json& member(const nlohmann::json& object, std::initializer_list<std::string_view> path);
/// The same for "health.lambada", or a single name.
[[nodiscard]] const nlohmann::json& at_path(const nlohmann::json& object, std::string_view path);
[[nodiscard]] std::optional<double> as_number(const nlohmann::json& value);
[[nodiscard]] inline nlohmann::json or_null(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}
[[nodiscard]] inline std::optional<double> number(const nlohmann::json& object, std::string_view key) {
  return as_number(member(object, {key}));
}
/// A string as it is, a number or truth value as text, else `fallback`.
[[nodiscard]] std::string as_text(const nlohmann::json& value, const std::string& fallback = "");
[[nodiscard]] inline std::string text(const nlohmann::json& object, std::string_view key,
                                      const std::string& fallback = "") {
  return as_text(member(object, {key}), fallback);
}
/// The 95 % interval [low, high] of a figure in a family's summary, or null.
[[nodiscard]] const nlohmann::json& interval_of(const nlohmann::json& summary, const std::string& key);
/// Numbers of a list; what is not a number becomes NaN.
[[nodiscard]] std::vector<double> numbers(const nlohmann::json& list);

}  // namespace emend::evaluation::detail
