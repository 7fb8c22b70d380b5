// Storage types: names, sizes, rounding errors, fall-backs, and values as the gguf Python package reads them.
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/models/gguf/detail/gguf_container.h>
#include <emend/models/gguf/ggml_type.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/error_of.h"

namespace emend::models {
namespace gguf_types_test {

constexpr GgmlType kWritable[] = {GgmlType::kF32,  GgmlType::kF16,    GgmlType::kBF16,  GgmlType::kQ8_0,
                                  GgmlType::kQ6_K, GgmlType::kQ5_K,   GgmlType::kQ4_K,  GgmlType::kQ3_K,
                                  GgmlType::kQ2_K, GgmlType::kQ5_1,   GgmlType::kQ5_0,  GgmlType::kQ4_1,
                                  GgmlType::kQ4_0, GgmlType::kIQ4_NL, GgmlType::kIQ4_XS};

TEST(GgufTypes, NamesAreReadInAnyCase) {
  for (const GgmlType type : kWritable) EXPECT_EQ(parse_ggml_type(to_string(type)), type);
  EXPECT_EQ(parse_ggml_type("q4_k"), GgmlType::kQ4_K);
  EXPECT_EQ(to_string(GgmlType::kIQ4_NL), "IQ4_NL");
  EXPECT_THROW((void)parse_ggml_type("Q4_K_M"), Error);
  EXPECT_EQ(to_string(static_cast<GgmlType>(9999)), "type 9999");
}

TEST(GgufTypes, UnknownAndIntegerTypesAreNotReadable) {
  for (const uint32_t number : {4u, 24u, 26u, 27u, 31u, 36u, 43u, 1000u, 0xFFFFFFFFu})
    EXPECT_FALSE(is_readable(static_cast<GgmlType>(number))) << number;
  for (const GgmlType type : kWritable) EXPECT_TRUE(is_readable(type));
}

TEST(GgufTypes, RowsThatAreNotWholeBlocksFallBackAsInLlamaCpp) {
  EXPECT_EQ(type_for_row(GgmlType::kQ4_K, 512), GgmlType::kQ4_K);
  EXPECT_EQ(type_for_row(GgmlType::kQ4_K, 576), GgmlType::kQ5_0);
  EXPECT_EQ(type_for_row(GgmlType::kQ2_K, 576), GgmlType::kQ4_0);
  EXPECT_EQ(type_for_row(GgmlType::kQ3_K, 576), GgmlType::kQ4_0);
  EXPECT_EQ(type_for_row(GgmlType::kQ5_K, 576), GgmlType::kQ5_1);
  EXPECT_EQ(type_for_row(GgmlType::kQ6_K, 576), GgmlType::kQ8_0);
  EXPECT_EQ(type_for_row(GgmlType::kIQ4_XS, 576), GgmlType::kIQ4_NL);
  EXPECT_EQ(type_for_row(GgmlType::kQ6_K, 24), GgmlType::kF16);
  EXPECT_EQ(type_for_row(GgmlType::kQ8_0, 40), GgmlType::kF16);
  EXPECT_EQ(type_for_row(GgmlType::kF16, 7), GgmlType::kF16);
}

// Relative root mean square errors for normal values; each bound is 1.3 times what ggml's own formulas give.
TEST(GgufTypes, RoundingErrorsAreThoseOfTheType) {
  at::manual_seed(1);
  const at::Tensor values = at::randn({64, 512});
  const std::map<GgmlType, double> bounds = {
      {GgmlType::kF32, 0},        {GgmlType::kF16, 2.7e-4}, {GgmlType::kBF16, 2.2e-3}, {GgmlType::kQ8_0, 0.0072},
      {GgmlType::kQ6_K, 0.024},   {GgmlType::kQ5_K, 0.045}, {GgmlType::kQ5_1, 0.050},  {GgmlType::kQ5_0, 0.058},
      {GgmlType::kQ4_K, 0.092},   {GgmlType::kQ4_1, 0.105}, {GgmlType::kQ4_0, 0.120},  {GgmlType::kIQ4_NL, 0.105},
      {GgmlType::kIQ4_XS, 0.105}, {GgmlType::kQ3_K, 0.19},  {GgmlType::kQ2_K, 0.39}};
  for (const GgmlType type : kWritable) {
    const at::Tensor bytes = detail::encode(values, type, "t");
    EXPECT_EQ(bytes.nbytes(), 64 * row_bytes(type, 512)) << to_string(type);
    const double error = ((detail::decode(bytes, type, values) - values).norm() / values.norm()).item<double>();
    EXPECT_LE(error, bounds.at(type)) << to_string(type);
    if (type != GgmlType::kF32) {
      EXPECT_GT(error, bounds.at(type) / 3) << to_string(type);
    }
  }
}

TEST(GgufTypes, ValuesThatDoNotFitAreRefusedByName) {
  at::Tensor values = at::ones({2, 256});
  values[1][3] = 70000;
  for (const GgmlType type : {GgmlType::kF32, GgmlType::kBF16, GgmlType::kQ8_0})
    EXPECT_NO_THROW((void)detail::encode(values, type, "w"));
  const std::string message =
      testing::error_of([&] { (void)detail::encode(values, GgmlType::kF16, "file: tensor w"); }, ErrorClass::kNumeric);
  EXPECT_NE(message.find("file: tensor w: values too large for F16, up to 70000"), std::string::npos) << message;
  values[1][3] = 1e9;  // more than a block's scale holds
  EXPECT_THROW((void)detail::encode(values, GgmlType::kQ8_0, "w"), Error);
  EXPECT_THROW((void)detail::encode(values, GgmlType::kQ4_1, "w"), Error);
  values[1][3] = 3.4e38;  // of float32, and more than bfloat16 holds
  EXPECT_THROW((void)detail::encode(values, GgmlType::kBF16, "w"), Error);
  EXPECT_NO_THROW((void)detail::encode(values, GgmlType::kF32, "w"));
  values[0][0] = std::nan("");
  for (const GgmlType type : kWritable) EXPECT_THROW((void)detail::encode(values, type, "w"), Error) << to_string(type);
}

TEST(GgufTypes, BlocksHaveTheValuesThatThePythonPackageReads) {
  std::ifstream in(EMEND_SOURCE_DIR "/tests/fixtures/gguf_py.json");
  const auto record = nlohmann::json::parse(in);
  ASSERT_EQ(record["magic"], "emend gguf values");
  int checked = 0;
  for (const auto& [name, entry] : record["blocks"].items()) {
    const auto type = static_cast<GgmlType>(entry["number"].get<uint32_t>());
    ASSERT_TRUE(is_readable(type)) << name;
    const auto hex = entry["bytes"].get<std::string>();
    std::string bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    const int64_t rows = entry["shape"][0], columns = entry["shape"][1];
    ASSERT_EQ(bytes.size(), rows * row_bytes(type, columns)) << name;
    std::vector<float> values(rows * columns);
    for (int64_t r = 0; r < rows; ++r)
      dequantise_row(type, bytes.data() + r * row_bytes(type, columns), values.data() + r * columns, columns);
    for (float& value : values) value += 0.0F;  // -0 is written as 0
    const std::string_view raw(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    EXPECT_EQ(sha256_hex(raw).substr(0, 16), entry["hash"]) << name;
    ++checked;
  }
  EXPECT_EQ(checked, 16);
}

}  // namespace gguf_types_test
}  // namespace emend::models
