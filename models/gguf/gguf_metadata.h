// Metadata of a GGUF file to be written: keys with encoded values, in order.
#pragma once

#include <emend/models/gguf/gguf_file.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models {

/// An ordered list of keys. Setting a key again replaces its value in place.
class GgufMetadata {
 public:
  void set_integer(std::string_view key, int64_t value);  ///< as uint32, or int64 where it does not fit
  void set_number(std::string_view key, double value);    ///< as float32
  void set_flag(std::string_view key, bool value);        ///< each replaces an earlier value
  void set_text(std::string_view key, std::string_view value);
  void set_texts(std::string_view key, const std::vector<std::string>& values);
  void set_integers(std::string_view key, const std::vector<int32_t>& values);
  void set_numbers(std::string_view key, const std::vector<float>& values);
  void set_flags(std::string_view key, const std::vector<bool>& values);
  /// A value of an opened file, unchanged.
  void copy(std::string_view key, const GgufValue& value);
  void append(const GgufMetadata& other);

  [[nodiscard]] bool contains(std::string_view key) const;  ///< was the key set?
  [[nodiscard]] size_t size() const noexcept { return entries_.size(); }
  /// All entries as they stand in the file.
  [[nodiscard]] std::string encoded() const;

 private:
  struct Entry {
    std::string key;
    std::string value;  ///< type number and payload
  };
  void set(std::string_view key, std::string value);
  std::vector<Entry> entries_;
};

}  // namespace emend::models
