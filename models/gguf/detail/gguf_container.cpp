#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/gguf/detail/gguf_container.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace emend::models {

namespace detail {
namespace {

constexpr uint32_t kVersion = 3;

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

uint64_t padded(uint64_t size, uint64_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

uint64_t stored_bytes(const GgufOutput& tensor) {
  return row_bytes(tensor.type, c10::multiply_integers(tensor.shape));
}

// Rows that a thread takes at a time: about 64 k values.
int64_t grain(int64_t columns) {
  return std::max<int64_t>(1, 65536 / std::max<int64_t>(columns, 1));
}

std::pair<int64_t, int64_t> matrix_of(const at::Tensor& values) {
  const int64_t columns = values.dim() == 1 ? values.numel() : values.size(-1);
  return {columns == 0 ? 0 : values.numel() / columns, columns};
}

// A sum is not finite if any term is not; only a sum that overflows needs the second look.
bool all_finite(const at::Tensor& values) {
  return at::isfinite(values.sum(at::kFloat)).item<bool>() || at::isfinite(values).all().item<bool>();
}

}  // namespace

uint64_t write_container(const std::filesystem::path& path, const GgufMetadata& metadata, uint64_t alignment,
                         const std::vector<GgufOutput>& tensors) {
  std::string head = "GGUF";
  put(head, kVersion);
  put(head, static_cast<uint64_t>(tensors.size()));
  put(head, static_cast<uint64_t>(metadata.size()));
  head += metadata.encoded();
  uint64_t offset = 0;
  for (const GgufOutput& tensor : tensors) {
    put(head, static_cast<uint64_t>(tensor.name.size()));
    head += tensor.name;
    put(head, static_cast<uint32_t>(tensor.shape.size()));
    for (auto n = tensor.shape.rbegin(); n != tensor.shape.rend(); ++n) put(head, static_cast<uint64_t>(*n));
    put(head, static_cast<uint32_t>(tensor.type));
    put(head, offset);
    offset += padded(stored_bytes(tensor), alignment);
  }
  head.append(padded(head.size(), alignment) - head.size(), '\0');
  AtomicFile file(path);
  file.write(head);
  for (const GgufOutput& tensor : tensors) {
    const at::Tensor bytes = tensor.bytes();
    const uint64_t size = stored_bytes(tensor);
    EMEND_CHECK(bytes.nbytes() == size && bytes.is_contiguous(), "stored bytes match type and shape");
    file.write(bytes.const_data_ptr(), size);
    file.write(std::string(padded(size, alignment) - size, '\0'));
  }
  const uint64_t total = file.size();
  file.commit();
  return total;
}

at::Tensor encode(const at::Tensor& values, GgmlType type, const std::string& where) {
  if (!all_finite(values))
    throw Error(ErrorClass::kNumeric,
                {where, "values that are not finite", "finite values", "the model is damaged; nothing was written"});
  const at::Tensor from = values.contiguous();
  if (const auto dtype = plain_dtype(type)) {
    const at::Tensor to = from.to(*dtype);
    const bool half = type == GgmlType::kF16;
    if (!all_finite(to))
      throw Error(ErrorClass::kNumeric, {where,
                                         std::string("values too large for ") + (half ? "F16" : "BF16") + ", up to " +
                                             formatted("%.6g", from.abs().max().item<double>()),
                                         half ? "at most 65504" : "at most 3.3895e+38",
                                         half ? "write BF16 or F32 instead" : "write F32 instead"});
    return to.reshape({-1}).view(at::kByte);
  }
  const auto [rows, columns] = matrix_of(from);
  at::Tensor bytes = at::empty({static_cast<int64_t>(rows * row_bytes(type, columns))}, at::kByte);
  const auto* source = from.const_data_ptr<float>();
  auto* target = bytes.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, rows, grain(columns), [&, columns = columns](int64_t begin, int64_t end) {
    quantise_rows(type, source + begin * columns, target + begin * row_bytes(type, columns), end - begin, columns);
  });
  // The scales of blocks are of 16 bits.
  const double largest = from.abs().max().item<double>();
  if (largest > 6e4 && !all_finite(decode(bytes, type, from)))
    throw Error(ErrorClass::kNumeric,
                {where, "values too large for " + std::string(to_string(type)) + ", up to " + std::to_string(largest),
                 "what the scales of its blocks hold", "write BF16 or F32 instead"});
  return bytes;
}

at::Tensor decode(const at::Tensor& bytes, GgmlType type, const at::Tensor& like) {
  if (const auto dtype = plain_dtype(type)) return bytes.view(*dtype).reshape(like.sizes()).to(at::kFloat);
  at::Tensor values = at::empty(like.sizes(), at::kFloat);
  const auto [rows, columns] = matrix_of(like);
  const auto* source = bytes.const_data_ptr<uint8_t>();
  auto* target = values.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&, columns = columns](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      dequantise_row(type, source + r * row_bytes(type, columns), target + r * columns, columns);
  });
  return values;
}
}  // namespace detail

namespace {

using detail::put;

std::string with_length(std::string_view text) {
  std::string bytes;
  put(bytes, static_cast<uint64_t>(text.size()));
  return bytes += text;
}

template <class T>
std::string scalar(GgufValueType type, T value) {
  std::string bytes;
  put(bytes, type);
  put(bytes, value);
  return bytes;
}

std::string list_head(GgufValueType element, size_t count) {
  std::string bytes = scalar(GgufValueType::kArray, element);
  put(bytes, static_cast<uint64_t>(count));
  return bytes;
}

template <class Stored, class List>
std::string list(GgufValueType element, const List& values) {
  std::string bytes = list_head(element, values.size());
  for (const Stored value : values) put(bytes, value);
  return bytes;
}

}  // namespace

void GgufMetadata::set(std::string_view key, std::string value) {
  const auto it = std::ranges::find_if(entries_, [&](const Entry& entry) { return entry.key == key; });
  if (it != entries_.end())
    it->value = std::move(value);
  else
    entries_.push_back({std::string(key), std::move(value)});
}

void GgufMetadata::set_integer(std::string_view key, int64_t number) {
  const bool fits = number >= 0 && number <= std::numeric_limits<uint32_t>::max();
  set(key,
      fits ? scalar(GgufValueType::kUint32, static_cast<uint32_t>(number)) : scalar(GgufValueType::kInt64, number));
}

void GgufMetadata::set_number(std::string_view key, double number) {
  set(key, scalar(GgufValueType::kFloat32, static_cast<float>(number)));
}

void GgufMetadata::set_flag(std::string_view key, bool flag) {
  set(key, scalar(GgufValueType::kBool, static_cast<uint8_t>(flag)));
}

void GgufMetadata::set_text(std::string_view key, std::string_view text) {
  std::string bytes;
  put(bytes, GgufValueType::kString);
  set(key, bytes + with_length(text));
}

void GgufMetadata::set_texts(std::string_view key, const std::vector<std::string>& texts) {
  std::string bytes = list_head(GgufValueType::kString, texts.size());
  for (const auto& text : texts) bytes += with_length(text);
  set(key, std::move(bytes));
}

void GgufMetadata::set_integers(std::string_view key, const std::vector<int32_t>& numbers) {
  set(key, list<int32_t>(GgufValueType::kInt32, numbers));
}

void GgufMetadata::set_numbers(std::string_view key, const std::vector<float>& numbers) {
  set(key, list<float>(GgufValueType::kFloat32, numbers));
}

void GgufMetadata::set_flags(std::string_view key, const std::vector<bool>& flags) {
  set(key, list<uint8_t>(GgufValueType::kBool, flags));
}

void GgufMetadata::copy(std::string_view key, const GgufValue& from) {
  std::string value;
  if (from.type == GgufValueType::kArray)
    value = list_head(from.element, from.count);
  else
    put(value, from.type);
  value += from.payload;
  set(key, std::move(value));
}

void GgufMetadata::append(const GgufMetadata& other) {
  for (const Entry& entry : other.entries_) set(entry.key, entry.value);
}

bool GgufMetadata::contains(std::string_view key) const {
  return std::ranges::any_of(entries_, [&](const Entry& entry) { return entry.key == key; });
}

std::string GgufMetadata::encoded() const {
  std::string text;
  for (const Entry& entry : entries_) text += with_length(entry.key) + entry.value;
  return text;
}

}  // namespace emend::models
