// How tensors enter a fingerprint.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/core/sha256.h>

#include <string>

namespace emend::models::detail {

/// Name, dtype, shape and bytes of a tensor on the CPU.
void hash_tensor(Sha256& hash, const std::string& name, const at::Tensor& tensor);

}  // namespace emend::models::detail
