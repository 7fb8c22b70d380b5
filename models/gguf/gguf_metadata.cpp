#include <emend/models/gguf/gguf_metadata.h>

#include <algorithm>
#include <limits>

namespace emend::models {
namespace {

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_type(std::string& to, GgufValueType type) {
  put(to, static_cast<uint32_t>(type));
}

void put_text(std::string& to, std::string_view text) {
  put(to, static_cast<uint64_t>(text.size()));
  to += text;
}

std::string list_head(GgufValueType element, size_t count) {
  std::string value;
  put_type(value, GgufValueType::kArray);
  put_type(value, element);
  put(value, static_cast<uint64_t>(count));
  return value;
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
  std::string value;
  if (number >= 0 && number <= std::numeric_limits<uint32_t>::max()) {
    put_type(value, GgufValueType::kUint32);
    put(value, static_cast<uint32_t>(number));
  } else {
    put_type(value, GgufValueType::kInt64);
    put(value, number);
  }
  set(key, std::move(value));
}

void GgufMetadata::set_number(std::string_view key, double number) {
  std::string value;
  put_type(value, GgufValueType::kFloat32);
  put(value, static_cast<float>(number));
  set(key, std::move(value));
}

void GgufMetadata::set_flag(std::string_view key, bool flag) {
  std::string value;
  put_type(value, GgufValueType::kBool);
  put(value, static_cast<uint8_t>(flag));
  set(key, std::move(value));
}

void GgufMetadata::set_text(std::string_view key, std::string_view text) {
  std::string value;
  put_type(value, GgufValueType::kString);
  put_text(value, text);
  set(key, std::move(value));
}

void GgufMetadata::set_texts(std::string_view key, const std::vector<std::string>& texts) {
  std::string value = list_head(GgufValueType::kString, texts.size());
  for (const auto& text : texts) put_text(value, text);
  set(key, std::move(value));
}

void GgufMetadata::set_integers(std::string_view key, const std::vector<int32_t>& numbers) {
  std::string value = list_head(GgufValueType::kInt32, numbers.size());
  for (const int32_t number : numbers) put(value, number);
  set(key, std::move(value));
}

void GgufMetadata::set_numbers(std::string_view key, const std::vector<float>& numbers) {
  std::string value = list_head(GgufValueType::kFloat32, numbers.size());
  for (const float number : numbers) put(value, number);
  set(key, std::move(value));
}

void GgufMetadata::set_flags(std::string_view key, const std::vector<bool>& flags) {
  std::string value = list_head(GgufValueType::kBool, flags.size());
  for (const bool flag : flags) put(value, static_cast<uint8_t>(flag));
  set(key, std::move(value));
}

void GgufMetadata::copy(std::string_view key, const GgufValue& from) {
  std::string value;
  if (from.type == GgufValueType::kArray)
    value = list_head(from.element, from.count);
  else
    put_type(value, from.type);
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
  for (const Entry& entry : entries_) {
    put_text(text, entry.key);
    text += entry.value;
  }
  return text;
}

}  // namespace emend::models
