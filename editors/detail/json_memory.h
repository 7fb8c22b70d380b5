// JSON as bytes: the memory of an editor is made of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

namespace emend::editors::detail {

/// uint8, on the host.
[[nodiscard]] at::Tensor bytes_of(const nlohmann::json& json);
/// Throws nlohmann's exception where the bytes, of any dtype and device, are none.
[[nodiscard]] nlohmann::json json_of(const at::Tensor& bytes);

}  // namespace emend::editors::detail
