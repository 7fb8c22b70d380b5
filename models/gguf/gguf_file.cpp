#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/models/gguf/gguf_file.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

namespace emend::models {
namespace {

constexpr uint64_t kMaxKeyBytes = 65535;       // as the format's description says
constexpr uint64_t kMaxTensorNameBytes = 255;  // ggml's own limit is 63; longer names are harmless here
constexpr uint64_t kMaxAlignment = 1 << 20;
constexpr uint32_t kMaxDimensions = 4;

struct ScalarType {
  std::string_view name;
  uint32_t bytes;  // 0: not a scalar
  bool is_signed = false;
};
constexpr std::array<ScalarType, 13> kScalars = {{{"uint8", 1},
                                                  {"int8", 1, true},
                                                  {"uint16", 2},
                                                  {"int16", 2, true},
                                                  {"uint32", 4},
                                                  {"int32", 4, true},
                                                  {"float32", 4},
                                                  {"bool", 1},
                                                  {"string", 0},
                                                  {"array", 0},
                                                  {"uint64", 8},
                                                  {"int64", 8, true},
                                                  {"float64", 8}}};

uint32_t scalar_bytes(GgufValueType type) {
  return static_cast<size_t>(type) < kScalars.size() ? kScalars[static_cast<size_t>(type)].bytes : 0;
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::string in_quotes(std::string_view text) {
  return "\"" + std::string(text.substr(0, 80)) + "\"";
}

}  // namespace

double shortest_decimal(float value) {
  if (!std::isfinite(value)) return value;
  std::array<char, 48> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  double result = value;
  std::from_chars(text.data(), end, result);
  return result;
}

std::string to_string(GgufValueType type) {
  const auto number = static_cast<size_t>(type);
  return number < kScalars.size() ? std::string(kScalars[number].name) : "type " + std::to_string(number);
}

int64_t GgufTensor::rows() const {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
  return n;
}

/// Walks the header once. Every read is checked against the end of the file.
class GgufFile::Parser {
 public:
  explicit Parser(GgufFile& gguf)
      : gguf_(gguf), begin_(reinterpret_cast<const char*>(gguf.file_->data())), size_(gguf.file_->size()) {}

  void parse() {
    read_preamble();
    for (uint64_t i = 0; i < n_keys_; ++i) read_entry(i);
    read_alignment();
    for (uint64_t i = 0; i < n_tensors_; ++i) read_tensor(i);
    place_tensors();
  }

 private:
  [[noreturn]] void corrupt(const std::string& got, const std::string& expected) const {
    throw Error(ErrorClass::kCorruption,
                {gguf_.path_.string(), got, expected, "the file is truncated or damaged: fetch or write it again"});
  }

  [[nodiscard]] uint64_t left() const { return size_ - at_; }

  std::string_view take(uint64_t bytes, const std::string& what) {
    if (bytes > left())
      corrupt(what + " needs " + std::to_string(bytes) + " bytes at offset " + std::to_string(at_),
              "no more than the " + std::to_string(left()) + " that are left in the file");
    const std::string_view view(begin_ + at_, bytes);
    at_ += bytes;
    return view;
  }
  template <class T>
  T take_number(const std::string& what) {
    return load<T>(take(sizeof(T), what).data());
  }
  std::string_view take_string(uint64_t longest, const std::string& what) {
    const auto length = take_number<uint64_t>("the length of " + what);
    if (length > longest || length > left())
      corrupt(what + " claims " + std::to_string(length) + " bytes at offset " + std::to_string(at_),
              "at most " + std::to_string(std::min(longest, left())));
    return take(length, what);
  }

  // As take_string, without building a message a string: vocabularies have hundreds of thousands.
  void skip_string(const std::string& what) {
    if (left() < 8 || load<uint64_t>(begin_ + at_) > left() - 8)
      corrupt("a string of " + what + " at offset " + std::to_string(at_) + " reaches past the end",
              "a string inside the file");
    at_ += 8 + load<uint64_t>(begin_ + at_);
  }

  void read_preamble() {
    const std::string_view magic = take(4, "the magic number");
    if (magic != "GGUF") corrupt("the file begins with " + printable(magic), "\"GGUF\"");
    const auto version = take_number<uint32_t>("the version");
    if (version != 0 && (version & 0xFFFF) == 0)
      throw Error(ErrorClass::kUnsupported,
                  {gguf_.path_.string(), "the file is big-endian", "a little-endian GGUF file",
                   "convert it with gguf-convert-endian of the gguf Python package"});
    if (version != 2 && version != 3)
      throw Error(ErrorClass::kUnsupported, {gguf_.path_.string(), "GGUF version " + std::to_string(version),
                                             "version 2 or 3", "convert the model again with a current llama.cpp"});
    n_tensors_ = take_number<uint64_t>("the number of tensors");
    n_keys_ = take_number<uint64_t>("the number of keys");
    // A key needs at least its length, its type and one byte; a tensor 8 + 4 + 8 + 4 + 8 bytes.
    if (n_keys_ > left() / 13) corrupt(std::to_string(n_keys_) + " keys claimed", "a number that fits the file");
    if (n_tensors_ > left() / 32)
      corrupt(std::to_string(n_tensors_) + " tensors claimed", "a number that fits the file");
  }

  static std::string printable(std::string_view bytes) {
    std::string text = "bytes";
    for (size_t i = 0; i < bytes.size(); ++i) text += " " + hex(bytes.substr(i, 1));
    return text;
  }

  void read_entry(uint64_t index) {
    const std::string key(take_string(kMaxKeyBytes, "key " + std::to_string(index)));
    const std::string what = "the value of " + in_quotes(key);
    GgufValue value;
    value.type = static_cast<GgufValueType>(take_number<uint32_t>("the type of " + in_quotes(key)));
    if (value.type == GgufValueType::kArray) {
      value.element = static_cast<GgufValueType>(take_number<uint32_t>("the element type of " + in_quotes(key)));
      value.count = take_number<uint64_t>("the length of " + in_quotes(key));
      value.payload = take_values(value.element, value.count, what);
    } else {
      value.payload = take_values(value.type, 1, what);
    }
    if (!gguf_.values_.emplace(key, value).second) corrupt("key " + in_quotes(key) + " occurs twice", "unique keys");
    gguf_.keys_.push_back(key);
  }

  std::string_view take_values(GgufValueType type, uint64_t count, const std::string& what) {
    if (type == GgufValueType::kString) {
      if (count > left() / 8)
        corrupt(what + " claims " + std::to_string(count) + " strings", "a number that fits the file");
      const uint64_t start = at_;
      for (uint64_t i = 0; i < count; ++i) skip_string(what);
      return {begin_ + start, at_ - start};
    }
    const uint32_t bytes = scalar_bytes(type);
    if (bytes == 0) corrupt(what + " has " + to_string(type), "a scalar, a string or a flat array");
    if (count > left() / bytes)
      corrupt(what + " claims " + std::to_string(count) + " values", "a number that fits the file");
    return take(count * bytes, what);
  }

  void read_alignment() {
    const int64_t alignment = gguf_.integer("general.alignment").value_or(32);
    if (alignment < 1 || alignment > static_cast<int64_t>(kMaxAlignment) ||
        !std::has_single_bit(static_cast<uint64_t>(alignment)))
      gguf_.fail_key("general.alignment", std::to_string(alignment),
                     "a power of two up to " + std::to_string(kMaxAlignment));
    gguf_.alignment_ = static_cast<uint64_t>(alignment);
  }

  void read_tensor(uint64_t index) {
    GgufTensor tensor;
    tensor.name = take_string(kMaxTensorNameBytes, "the name of tensor " + std::to_string(index));
    const std::string what = "tensor " + in_quotes(tensor.name);
    const auto dimensions = take_number<uint32_t>(what);
    if (dimensions < 1 || dimensions > kMaxDimensions)
      corrupt(what + " has " + std::to_string(dimensions) + " dimensions", "1 to 4");
    uint64_t values = 1;
    for (uint32_t i = 0; i < dimensions; ++i) {
      const auto n = take_number<uint64_t>(what);
      if (n < 1 || n > (uint64_t{1} << 48) / values)
        corrupt(what + " has a dimension of " + std::to_string(n), "positive dimensions of less than 2^48 values");
      values *= n;
      tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(n));
    }
    tensor.type = static_cast<GgmlType>(take_number<uint32_t>(what));
    if (!is_readable(tensor.type))
      throw Error(ErrorClass::kUnsupported, {gguf_.path_.string(), what + " is stored as " + to_string(tensor.type),
                                             "a floating-point or quantised type that ggml can dequantise",
                                             "convert the model to F16 or Q8_0 first"});
    if (tensor.row_values() % block_values(tensor.type) != 0)
      corrupt(what + " has rows of " + std::to_string(tensor.row_values()) + " values",
              "a multiple of " + std::to_string(block_values(tensor.type)) + " for " + to_string(tensor.type));
    tensor.bytes = row_bytes(tensor.type, static_cast<int64_t>(values));  // < 2^51: cannot overflow
    tensor.offset = take_number<uint64_t>(what);                          // from the start of the data, for now
    if (tensor.offset % gguf_.alignment_ != 0)
      corrupt(what + " starts at " + std::to_string(tensor.offset),
              "a multiple of the alignment " + std::to_string(gguf_.alignment_));
    if (!gguf_.tensor_index_.emplace(tensor.name, gguf_.tensors_.size()).second)
      corrupt(what + " occurs twice", "unique names");
    gguf_.tensors_.push_back(std::move(tensor));
  }

  void place_tensors() {
    if (gguf_.tensors_.empty()) return;
    const uint64_t begin = (at_ + gguf_.alignment_ - 1) / gguf_.alignment_ * gguf_.alignment_;
    std::vector<const GgufTensor*> order;
    for (GgufTensor& tensor : gguf_.tensors_) {
      const uint64_t room = size_ > begin ? size_ - begin : 0;
      if (tensor.offset > room || tensor.bytes > room - tensor.offset)
        corrupt("tensor " + in_quotes(tensor.name) + " occupies " + std::to_string(tensor.bytes) + " bytes from " +
                    std::to_string(tensor.offset) + " of a data section of " + std::to_string(room),
                "a range inside the file");
      tensor.offset += begin;
      order.push_back(&tensor);
    }
    std::ranges::sort(order, [](auto* a, auto* b) { return a->offset < b->offset; });
    for (size_t i = 1; i < order.size(); ++i)
      if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset)
        corrupt("tensors " + in_quotes(order[i - 1]->name) + " and " + in_quotes(order[i]->name) + " overlap",
                "tensors that do not share bytes");
    // Bytes behind the last one: the alignment is not that of the writer, and every tensor would be shifted.
    const uint64_t end = order.back()->offset + order.back()->bytes, step = std::max<uint64_t>(gguf_.alignment_, 32);
    if (size_ > end + step - 1)
      corrupt(std::to_string(size_ - end) + " bytes behind the last tensor, with an alignment of " +
                  std::to_string(gguf_.alignment_),
              "a file that ends with its tensors");
  }

  GgufFile& gguf_;
  const char* begin_;
  uint64_t size_;
  uint64_t at_ = 0;
  uint64_t n_tensors_ = 0, n_keys_ = 0;
};

GgufFile::GgufFile(const std::filesystem::path& path) : path_(path), file_(std::make_shared<MappedFile>(path)) {
  Parser(*this).parse();
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

const std::byte* GgufFile::data(const GgufTensor& tensor) const {
  return file_->data() + tensor.offset;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

void GgufFile::fail_key(std::string_view key, const std::string& got, const std::string& expected) const {
  throw Error(ErrorClass::kCorruption, {path_.string() + ": key " + std::string(key), got, expected,
                                        "the file is damaged, or written for another architecture"});
}

namespace {

// An integer where the type is one and the value fits int64; bool counts as 0 and 1.
std::optional<int64_t> integer_of(GgufValueType type, const char* at) {
  const uint32_t bytes = scalar_bytes(type);
  if (bytes == 0 || type == GgufValueType::kFloat32 || type == GgufValueType::kFloat64) return std::nullopt;
  int64_t value = 0;
  std::memcpy(&value, at, bytes);
  if (type == GgufValueType::kUint64 && value < 0) return std::nullopt;
  const uint32_t unused = kScalars[static_cast<size_t>(type)].is_signed ? 64 - 8 * bytes : 0;
  return value << unused >> unused;
}

std::optional<double> number_of(GgufValueType type, const char* at) {
  if (type == GgufValueType::kFloat32) return shortest_decimal(load<float>(at));
  if (type == GgufValueType::kFloat64) return load<double>(at);
  const auto integer = type == GgufValueType::kBool ? std::nullopt : integer_of(type, at);
  return integer ? std::optional<double>(*integer) : std::nullopt;
}

// What `read` makes of the value of a key; nullopt without the key.
template <class Read>
auto one(const GgufFile& file, std::string_view key, const char* expected, Read read) -> decltype(read({})) {
  const GgufValue* value = file.find(key);
  if (!value) return std::nullopt;
  auto result = read(*value);
  if (!result) file.fail_key(key, "a value of type " + to_string(value->type), expected);
  return result;
}

// The same for each element of an array of scalars.
template <class T>
std::vector<T> list(const GgufFile& file, std::string_view key, const char* expected,
                    std::optional<T> (*read)(GgufValueType, const char*)) {
  std::vector<T> values;
  const GgufValue* array = file.find(key);
  if (!array) return values;
  if (array->type != GgufValueType::kArray) file.fail_key(key, "a value of type " + to_string(array->type), expected);
  const size_t step = scalar_bytes(array->element);
  for (uint64_t i = 0; i < array->count; ++i) {
    const auto element = step == 0 ? std::nullopt : read(array->element, array->payload.data() + i * step);
    if (!element) file.fail_key(key, "a list of " + to_string(array->element), expected);
    values.push_back(*element);
  }
  return values;
}

template <class T>
T required(const GgufFile& file, std::string_view key, const char* expected, std::optional<T> value) {
  if (!value) file.fail_key(key, "missing", expected);
  return *std::move(value);
}

}  // namespace

std::optional<int64_t> GgufFile::integer(std::string_view key) const {
  return one(*this, key, "an integer", [](const GgufValue& value) {
    return value.type == GgufValueType::kBool ? std::nullopt : integer_of(value.type, value.payload.data());
  });
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const auto result =
      one(*this, key, "a number", [](const GgufValue& value) { return number_of(value.type, value.payload.data()); });
  if (result && !std::isfinite(*result)) fail_key(key, "a number that is not finite", "a finite number");
  return result;
}

std::optional<bool> GgufFile::flag(std::string_view key) const {
  return one(*this, key, "true or false", [](const GgufValue& value) {
    return value.type == GgufValueType::kBool ? std::optional(value.payload[0] != 0) : std::nullopt;
  });
}

std::optional<std::string> GgufFile::text(std::string_view key) const {
  return one(*this, key, "a string", [](const GgufValue& value) {
    return value.type == GgufValueType::kString ? std::optional(std::string(value.payload.substr(8))) : std::nullopt;
  });
}

std::vector<std::string> GgufFile::texts(std::string_view key) const {
  const auto read = [](const GgufValue& value) -> std::optional<std::vector<std::string>> {
    if (value.type != GgufValueType::kArray || value.element != GgufValueType::kString) return std::nullopt;
    std::vector<std::string> texts;
    texts.reserve(value.count);
    const char* at = value.payload.data();  // lengths were checked on opening
    for (uint64_t i = 0; i < value.count; ++i, at += 8 + load<uint64_t>(at))
      texts.emplace_back(at + 8, load<uint64_t>(at));
    return texts;
  };
  return one(*this, key, "a list of strings", read).value_or(std::vector<std::string>());
}

std::vector<int64_t> GgufFile::integers(std::string_view key) const {
  return list<int64_t>(*this, key, "a list of integers", integer_of);
}
std::vector<double> GgufFile::numbers(std::string_view key) const {
  return list<double>(*this, key, "a list of numbers", number_of);
}
int64_t GgufFile::required_integer(std::string_view key) const {
  return required(*this, key, "an integer", integer(key));
}
std::string GgufFile::required_text(std::string_view key) const {
  return required(*this, key, "a string", text(key));
}

}  // namespace emend::models
