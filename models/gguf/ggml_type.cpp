#include <emend/core/text.h>
#include <emend/models/gguf/ggml_type.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>

namespace emend::models {
namespace {

constexpr std::array kWritable = {GgmlType::kF32,  GgmlType::kF16,    GgmlType::kBF16,  GgmlType::kQ8_0,
                                  GgmlType::kQ6_K, GgmlType::kQ5_K,   GgmlType::kQ4_K,  GgmlType::kQ3_K,
                                  GgmlType::kQ2_K, GgmlType::kQ5_1,   GgmlType::kQ5_0,  GgmlType::kQ4_1,
                                  GgmlType::kQ4_0, GgmlType::kIQ4_NL, GgmlType::kIQ4_XS};

constexpr std::array<std::pair<GgmlType, c10::ScalarType>, 3> kPlain = {{{GgmlType::kF32, c10::ScalarType::Float},
                                                                         {GgmlType::kF16, c10::ScalarType::Half},
                                                                         {GgmlType::kBF16, c10::ScalarType::BFloat16}}};

std::string upper(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](unsigned char c) { return std::toupper(c); });
  return result;
}

ggml_type native(GgmlType type) {
  return static_cast<ggml_type>(type);
}

const ggml_type_traits& traits(GgmlType type) {
  EMEND_CHECK(static_cast<uint32_t>(type) < GGML_TYPE_COUNT, "type number out of range");
  return *ggml_get_type_traits(native(type));
}

}  // namespace

std::string to_string(GgmlType type) {
  const auto number = static_cast<uint32_t>(type);
  const char* name = number < GGML_TYPE_COUNT ? ggml_get_type_traits(native(type))->type_name : nullptr;
  if (!name) return "type " + std::to_string(number);
  return std::ranges::count(kWritable, type) > 0 ? upper(name) : name;
}

GgmlType parse_ggml_type(std::string_view name) {
  std::string wanted = upper(name);
  static const std::map<std::string, std::string> kTorchNames = {
      {"FLOAT32", "F32"}, {"FLOAT16", "F16"}, {"BFLOAT16", "BF16"}, {"FP32", "F32"}, {"FP16", "F16"}};
  if (const auto other = kTorchNames.find(wanted); other != kTorchNames.end()) wanted = other->second;
  const auto name_of = [](GgmlType type) { return to_string(type); };
  if (const auto found = std::ranges::find(kWritable, wanted, name_of); found != kWritable.end()) return *found;
  // llama.cpp's mixtures (Q4_K_M) are named after the type of most of their tensors.
  const std::string most = wanted.substr(0, wanted.find("_K_") + 2);
  const bool mixture = std::ranges::count(kWritable, most, name_of) > 0;
  refuse({"GGUF type", "\"" + shorten(name, 40) + "\"", "one of " + join(kWritable, ", ", name_of),
          mixture ? "use " + most + ": all matrices get the one type" : did_you_mean(wanted, kWritable, "", name_of)});
}

std::optional<c10::ScalarType> plain_dtype(GgmlType type) {
  for (const auto& [plain, dtype] : kPlain)
    if (plain == type) return dtype;
  return std::nullopt;
}

std::optional<GgmlType> plain_type(c10::ScalarType dtype) {
  for (const auto& [type, plain] : kPlain)
    if (plain == dtype) return type;
  return std::nullopt;
}

bool is_readable(GgmlType type) noexcept {
  if (type == GgmlType::kF32) return true;
  const auto number = static_cast<uint32_t>(type);
  if (number >= GGML_TYPE_COUNT) return false;
  const ggml_type_traits* known = ggml_get_type_traits(native(type));
  return known->to_float != nullptr && known->blck_size > 0 && known->type_size > 0;
}

int64_t block_values(GgmlType type) {
  return traits(type).blck_size;
}

size_t row_bytes(GgmlType type, int64_t values) {
  return static_cast<size_t>(values / block_values(type)) * traits(type).type_size;
}

void dequantise_row(GgmlType type, const void* from, float* to, int64_t values) {
  if (type == GgmlType::kF32)
    std::copy_n(static_cast<const char*>(from), values * sizeof(float), reinterpret_cast<char*>(to));
  else
    traits(type).to_float(from, to, values);
}

void quantise_rows(GgmlType type, const float* from, void* to, int64_t rows, int64_t values) {
  EMEND_CHECK(values % block_values(type) == 0, "rows must be whole blocks");
  if (type == GgmlType::kF32)
    std::copy_n(reinterpret_cast<const char*>(from), rows * values * sizeof(float), static_cast<char*>(to));
  else if (rows > 0 && values > 0)
    ggml_quantize_chunk(native(type), from, to, 0, rows, values, nullptr);
}

GgmlType type_for_row(GgmlType type, int64_t values) {
  if (values % block_values(type) == 0) return type;
  static const std::map<GgmlType, GgmlType> kSmallerBlocks = {
      {GgmlType::kQ2_K, GgmlType::kQ4_0}, {GgmlType::kQ3_K, GgmlType::kQ4_0}, {GgmlType::kQ4_K, GgmlType::kQ5_0},
      {GgmlType::kQ5_K, GgmlType::kQ5_1}, {GgmlType::kQ6_K, GgmlType::kQ8_0}, {GgmlType::kIQ4_XS, GgmlType::kIQ4_NL}};
  const auto found = kSmallerBlocks.find(type);
  const GgmlType smaller = found == kSmallerBlocks.end() ? type : found->second;
  return values % block_values(smaller) == 0 ? smaller : GgmlType::kF16;
}

}  // namespace emend::models
