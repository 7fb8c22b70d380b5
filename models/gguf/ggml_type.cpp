#include <emend/core/text.h>
#include <emend/models/gguf/ggml_type.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>

namespace emend::models {
namespace {

struct NamedType {
  GgmlType type;
  std::string_view name;
};
constexpr std::array<NamedType, 15> kNamed = {{
    {GgmlType::kF32, "F32"},
    {GgmlType::kF16, "F16"},
    {GgmlType::kBF16, "BF16"},
    {GgmlType::kQ8_0, "Q8_0"},
    {GgmlType::kQ6_K, "Q6_K"},
    {GgmlType::kQ5_K, "Q5_K"},
    {GgmlType::kQ4_K, "Q4_K"},
    {GgmlType::kQ3_K, "Q3_K"},
    {GgmlType::kQ2_K, "Q2_K"},
    {GgmlType::kQ5_1, "Q5_1"},
    {GgmlType::kQ5_0, "Q5_0"},
    {GgmlType::kQ4_1, "Q4_1"},
    {GgmlType::kQ4_0, "Q4_0"},
    {GgmlType::kIQ4_NL, "IQ4_NL"},
    {GgmlType::kIQ4_XS, "IQ4_XS"},
}};

constexpr std::array<std::pair<GgmlType, c10::ScalarType>, 3> kPlain = {{{GgmlType::kF32, c10::ScalarType::Float},
                                                                         {GgmlType::kF16, c10::ScalarType::Half},
                                                                         {GgmlType::kBF16, c10::ScalarType::BFloat16}}};

ggml_type native(GgmlType type) {
  return static_cast<ggml_type>(type);
}

const ggml_type_traits& traits(GgmlType type) {
  EMEND_CHECK(static_cast<uint32_t>(type) < GGML_TYPE_COUNT, "type number out of range");
  return *ggml_get_type_traits(native(type));
}

}  // namespace

std::string to_string(GgmlType type) {
  for (const auto& named : kNamed)
    if (named.type == type) return std::string(named.name);
  const auto number = static_cast<uint32_t>(type);
  if (number < GGML_TYPE_COUNT)
    if (const char* name = ggml_get_type_traits(native(type))->type_name) return name;
  return "type " + std::to_string(number);
}

GgmlType parse_ggml_type(std::string_view name) {
  std::string upper(name);
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  static const std::map<std::string, std::string> kTorchNames = {
      {"FLOAT32", "F32"}, {"FLOAT16", "F16"}, {"BFLOAT16", "BF16"}, {"FP32", "F32"}, {"FP16", "F16"}};
  if (const auto other = kTorchNames.find(upper); other != kTorchNames.end()) upper = other->second;
  for (const auto& named : kNamed)
    if (named.name == upper) return named.type;
  const auto name_of = [](const auto& named) { return std::string(named.name); };
  // llama.cpp's mixtures (Q4_K_M) are named after the type of most of their tensors.
  const std::string most = upper.substr(0, upper.find("_K_") + 2);
  const bool mixture = std::ranges::any_of(kNamed, [&](const auto& named) { return named.name == most; });
  refuse({"GGUF type", "\"" + shorten(name, 40) + "\"", "one of " + join(kNamed, ", ", name_of),
          mixture ? "use " + most + ": all matrices get the one type" : did_you_mean(upper, kNamed, "", name_of)});
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
size_t block_bytes(GgmlType type) {
  return traits(type).type_size;
}

size_t row_bytes(GgmlType type, int64_t values) {
  return static_cast<size_t>(values / block_values(type)) * block_bytes(type);
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
