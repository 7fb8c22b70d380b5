// Storage types of GGUF tensors: names, block sizes, and conversion from and to float32 through ggml.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace emend::models {

/// The numbers that GGUF files use. Types without a name here (importance-matrix and ternary types, …) can be read
/// if ggml can dequantise them; writing is limited to the named ones.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

/// "F32", "Q4_K", …; "type 99" for a number that ggml does not know.
[[nodiscard]] std::string to_string(GgmlType type);
/// A writable type by name, in any case; also float32, float16, bfloat16. Throws Error(kInvalidArgument) with the list.
[[nodiscard]] GgmlType parse_ggml_type(std::string_view name);

/// The dtype of F32, F16 and BF16, whose values are stored as they are; nothing for other types.
[[nodiscard]] std::optional<c10::ScalarType> plain_dtype(GgmlType type);
/// The reverse.
[[nodiscard]] std::optional<GgmlType> plain_type(c10::ScalarType dtype);

/// Whether ggml can turn the type into float32. False for integers, removed types and unknown numbers.
[[nodiscard]] bool is_readable(GgmlType type) noexcept;
/// Values in a block: rows must be a multiple of it. 1 for F32, F16, BF16. Only for readable types.
[[nodiscard]] int64_t block_values(GgmlType type);
/// Bytes of `values` values; `values` must be a multiple of block_values. Only for readable types.
[[nodiscard]] size_t row_bytes(GgmlType type, int64_t values);

/// Dequantises one row of `values` values. `from` need not be aligned for the quantised types.
void dequantise_row(GgmlType type, const void* from, float* to, int64_t values);
/// Quantises `rows` rows of `values` values, as llama.cpp does without an importance matrix. Thread-safe.
void quantise_rows(GgmlType type, const float* from, void* to, int64_t rows, int64_t values);

/// The type that llama.cpp uses instead of `type` where a row of `values` values is not a whole number of blocks:
/// Q2_K, Q3_K → Q4_0, Q4_K → Q5_0, Q5_K → Q5_1, Q6_K → Q8_0, and F16 where 32 does not divide the row either.
[[nodiscard]] GgmlType type_for_row(GgmlType type, int64_t values);

}  // namespace emend::models
