// Writing the GGUF container, one tensor at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/gguf/gguf_file.h>

#include <functional>

namespace emend::models::detail {

/// A tensor to be written. `bytes` is called once, in order, and gives the stored bytes (uint8, contiguous).
struct GgufOutput {
  std::string name;
  GgmlType type = GgmlType::kF32;
  std::vector<int64_t> shape;  ///< rows first
  std::function<at::Tensor()> bytes;
};

/// Writes header, metadata, tensor table and data, atomically. Returns the size of the file. Throws Error(kIo).
uint64_t write_container(const std::filesystem::path& path, const GgufMetadata& metadata, uint64_t alignment,
                         const std::vector<GgufOutput>& tensors);

/// Stored bytes of float32 values [rows, columns] or [n]. Throws Error(kNumeric) with `where` for values that are not
/// finite, before or after conversion.
[[nodiscard]] at::Tensor encode(const at::Tensor& values, GgmlType type, const std::string& where);
/// Back to float32, in the shape of `like`.
[[nodiscard]] at::Tensor decode(const at::Tensor& bytes, GgmlType type, const at::Tensor& like);

}  // namespace emend::models::detail
