// Reader of the GGUF container: key-value metadata and a table of tensors over one mapped file.
//
// Goals: everything in the header is checked against the size of the file before it is used, so that a damaged or
// hostile file ends in an Error after bounded time and memory; nothing is copied on opening. Written here rather than
// taken from ggml, whose reader accepts ranges past the end and gives no reasons (docs/adr/0018). Non-goals: version 1
// of the format, big-endian files, arrays of arrays (no known file has them).
#pragma once

#include <emend/models/gguf/ggml_type.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace emend {
class MappedFile;
}

namespace emend::models {

/// The container's numbers for types of metadata values.
enum class GgufValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};
/// "uint32", "string", …
[[nodiscard]] std::string to_string(GgufValueType type);

/// The double with the shortest decimal form of a float32: 1e-5 rather than 9.999999747378752e-06.
[[nodiscard]] double shortest_decimal(float value);

/// One metadata value, undecoded. `payload` is what follows the type (and, for arrays, the element type and count).
struct GgufValue {
  GgufValueType type = GgufValueType::kUint32;
  GgufValueType element = GgufValueType::kUint32;  ///< arrays only
  uint64_t count = 0;                              ///< arrays only
  std::string_view payload;                        ///< points into the mapped file
};

// Metadata of a GGUF file to be written: keys with encoded values, in order.

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

struct GgufTensor {
  std::string name;
  GgmlType type = GgmlType::kF32;
  std::vector<int64_t> shape;  ///< in the order of a tensor library: rows first, the file's order reversed
  uint64_t offset = 0;         ///< first byte, from the start of the file
  uint64_t bytes = 0;

  [[nodiscard]] int64_t row_values() const { return shape.empty() ? 1 : shape.back(); }
  [[nodiscard]] int64_t rows() const;  ///< values / row_values()
};

/// An opened file. Immutable; safe to use from several threads.
class GgufFile {
 public:
  /// Maps and validates: magic, version (2 or 3), counts, string lengths, value types, unique keys and names,
  /// alignment, dimensions (1 to 4, positive, product without overflow, rows of whole blocks), and byte ranges inside
  /// the file that are aligned and do not overlap. Throws Error(kNotFound), Error(kCorruption) or Error(kUnsupported)
  /// with the file and the key or tensor.
  explicit GgufFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] uint64_t alignment() const noexcept { return alignment_; }

  /// Tensors in the order of the file.
  [[nodiscard]] const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const GgufTensor* find_tensor(std::string_view name) const;
  /// First byte of a tensor of this file.
  [[nodiscard]] const std::byte* data(const GgufTensor& tensor) const;

  /// Keys in the order of the file.
  [[nodiscard]] const std::vector<std::string>& keys() const noexcept { return keys_; }
  [[nodiscard]] const GgufValue* find(std::string_view key) const;

  /// Readers of one value. Absent keys give nullopt (or an empty list); a value of another type, or an integer that
  /// does not fit int64, throws Error(kCorruption) naming file and key.
  [[nodiscard]] std::optional<int64_t> integer(std::string_view key) const;
  [[nodiscard]] std::optional<double> number(std::string_view key) const;  ///< float32 as its shortest decimal value
  [[nodiscard]] std::optional<bool> flag(std::string_view key) const;
  [[nodiscard]] std::optional<std::string> text(std::string_view key) const;
  [[nodiscard]] std::vector<std::string> texts(std::string_view key) const;
  [[nodiscard]] std::vector<int64_t> integers(std::string_view key) const;
  [[nodiscard]] std::vector<double> numbers(std::string_view key) const;
  /// The same for keys that must be there: throws Error(kCorruption) naming file and key.
  [[nodiscard]] int64_t required_integer(std::string_view key) const;
  [[nodiscard]] std::string required_text(std::string_view key) const;

  /// Throws Error(kCorruption): "FILE: key K: got; expected …".
  [[noreturn]] void fail_key(std::string_view key, const std::string& got, const std::string& expected) const;

 private:
  class Parser;
  std::filesystem::path path_;
  std::shared_ptr<MappedFile> file_;
  uint64_t alignment_ = 32;
  std::vector<std::string> keys_;
  std::map<std::string, GgufValue, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_index_;
};

}  // namespace emend::models
