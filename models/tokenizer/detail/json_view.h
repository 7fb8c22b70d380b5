// Reading a JSON document whose faults are reported with file and key: "tokenizer.json: model.vocab: …".
#pragma once

#include <emend/core/error.h>
#include <emend/core/json.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::models::detail {

/// "Sequence" steps within one another, at most.
inline constexpr int kMaxSequenceDepth = 32;

/// A value in a JSON document that knows its file and key path. Cheap to copy; the document must outlive it.
class JsonView {
 public:
  JsonView(const nlohmann::json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  /// "FILE: key PATH", for messages.
  [[nodiscard]] std::string where() const { return path_.empty() ? file_ : file_ + ": key \"" + path_ + "\""; }
  [[nodiscard]] const std::string& file() const { return file_; }
  [[nodiscard]] const nlohmann::json& value() const { return *value_; }
  [[nodiscard]] bool is_null() const { return value_->is_null(); }

  /// True if this is an object with a non-null member `key`.
  [[nodiscard]] bool has(const std::string& key) const;
  /// The member `key`. Throws Error(kCorruption) if this is no object or the member is missing.
  [[nodiscard]] JsonView at(const std::string& key) const;
  /// The elements of an array. Throws otherwise.
  [[nodiscard]] std::vector<JsonView> elements() const;
  [[nodiscard]] JsonView element(size_t i) const {  ///< of an array that has it
    return {(*value_)[i], file_, path_ + "[" + std::to_string(i) + "]"};
  }

  [[nodiscard]] const std::string& string() const;
  [[nodiscard]] int64_t integer(int64_t lowest, int64_t highest) const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] bool boolean_or(const std::string& key, bool fallback) const {
    return has(key) ? at(key).boolean() : fallback;
  }
  [[nodiscard]] std::string string_or(const std::string& key, const std::string& fallback) const {
    return has(key) ? at(key).string() : fallback;
  }

  /// Throws Error(kCorruption): this value is `got` where `expected` should be.
  [[noreturn]] void fail(const std::string& expected) const;
  /// Throws Error(kUnsupported): valid, but not something emend can do.
  [[noreturn]] void unsupported(const std::string& what, const std::string& expected) const;

 private:
  const nlohmann::json* value_;
  std::string file_, path_;
};

}  // namespace emend::models::detail
