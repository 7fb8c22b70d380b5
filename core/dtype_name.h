// The names that PyTorch and config.json give to number formats.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace emend {

/// "float32", "float16", "bfloat16", "float64"; LibTorch's own name for every other dtype.
[[nodiscard]] std::string dtype_name(c10::ScalarType dtype);

}  // namespace emend
