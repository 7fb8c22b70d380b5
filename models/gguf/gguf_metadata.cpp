#include <emend/models/gguf/gguf_metadata.h>

#include <algorithm>
#include <limits>

namespace emend::models {
namespace {

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

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
  const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
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
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
}

std::string GgufMetadata::encoded() const {
  std::string text;
  for (const Entry& entry : entries_) text += with_length(entry.key) + entry.value;
  return text;
}

}  // namespace emend::models
