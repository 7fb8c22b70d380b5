// Typed access to config.json with messages that name file, key, what was got and expected.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::models {

/// A view of one JSON object; the object must outlive it. A null value counts as absent.
class ConfigReader {
 public:
  using Names = std::vector<std::string>;
  /// `where` is the file, and the path inside it for nested objects ("config.json: rope_scaling").
  ConfigReader(const nlohmann::json& object, std::string where);

  [[nodiscard]] bool has(const std::string& key) const { return find({key}) != nullptr; }  ///< present and not null
  /// True if the key is there with the value null (where that differs from being absent).
  [[nodiscard]] bool is_null(const std::string& key) const;
  /// The value under the first of the names that is present and not null, or nullptr.
  [[nodiscard]] const nlohmann::json* find(const Names& names) const;

  /// Readers of a required value throw Error(kCorruption) if it is absent; all throw if it has another type.
  /// Integers must be positive and at most 2^31, unless `least` says otherwise.
  [[nodiscard]] int64_t integer(const Names& names, int64_t least = 1) const;
  [[nodiscard]] int64_t integer_or(const Names& names, int64_t otherwise, int64_t least = 1) const {
    return find(names) ? integer(names, least) : otherwise;
  }
  [[nodiscard]] double number(const Names& names) const;  ///< positive and finite
  [[nodiscard]] double number_or(const Names& names, double otherwise) const {
    return find(names) ? number(names) : otherwise;
  }
  [[nodiscard]] bool flag_or(const Names& names, bool otherwise) const;
  [[nodiscard]] std::string text_or(const Names& names, const std::string& otherwise) const;
  [[nodiscard]] std::vector<double> numbers(const Names& names) const;
  [[nodiscard]] std::vector<std::string> texts(const Names& names) const;
  /// The nested object under the first of the names that is present; an empty one if none is.
  [[nodiscard]] ConfigReader object(const Names& names) const;

  /// Throws Error(kCorruption) about a key.
  [[noreturn]] void fail(const std::string& key, const std::string& got, const std::string& expected,
                         const std::string& advice = "compare with the published config.json of the model") const;
  /// The same as Error(kUnsupported).
  [[noreturn]] void unsupported(const std::string& key, const std::string& got, const std::string& expected,
                                const std::string& advice) const;

  [[nodiscard]] const std::string& where() const noexcept { return where_; }
  [[nodiscard]] const nlohmann::json& json() const noexcept { return *object_; }

 private:
  const nlohmann::json* object_;
  std::string where_;
};

}  // namespace emend::models
