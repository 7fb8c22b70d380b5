// Reader and writer of the safetensors format (8-byte header length, JSON header, tensor data).
//
// Goals: every offset is validated before a tensor exists; opening maps the file and copies nothing; writing is
// atomic. Non-goals: FP8 and packed types, which are refused by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emend {

class MappedFile;

/// What PyTorch and config.json call it: "float32", "float16", "bfloat16", "float64"; LibTorch's own name for others.
[[nodiscard]] std::string dtype_name(at::ScalarType dtype);

/// "[2, 3]", for messages.
[[nodiscard]] std::string shape_text(at::IntArrayRef shape);

/// Name, dtype and shape of one tensor in a file, and where its bytes are.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  ///< first byte, from the start of the file
  uint64_t bytes = 0;
};

/// An opened file. Copies share the mapping; tensors keep it alive.
class SafetensorsFile {
 public:
  /// Maps the file and validates its header: length within the file (and at most 100 MB), well-formed JSON without
  /// duplicate names, known dtypes, non-negative shapes whose product does not overflow, byte ranges that match
  /// shape and dtype, lie inside the file and do not overlap.
  /// Throws Error(kNotFound), Error(kCorruption) or Error(kUnsupported), naming the file and the tensor.
  explicit SafetensorsFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] const std::map<std::string, TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  [[nodiscard]] bool contains(const std::string& name) const { return tensors_.count(name) > 0; }  ///< a tensor's name

  /// The tensor, on the CPU, as a view of the mapping (copy-on-write: in-place changes never reach the file).
  /// Throws Error(kNotFound) naming the file and the closest name.
  [[nodiscard]] at::Tensor tensor(const std::string& name) const;

 private:
  std::filesystem::path path_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Writes tensors (any device, any strides) and metadata in the order given, atomically.
/// Throws Error(kInvalidArgument) for a duplicate name or a dtype the format lacks, Error(kIo) as AtomicFile does.
void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// Writes `target` as a copy of `source` in which the named tensors have new values; header and every other byte stay
/// as they are, so that writing the old values back restores the file bit for bit. Atomic; `source` may be `target`.
/// Throws Error(kNotFound) for a name that the file lacks, Error(kInvalidArgument) if shape or dtype differ.
void patch_safetensors(const std::filesystem::path& source, const std::filesystem::path& target,
                       const std::map<std::string, at::Tensor>& replacements);

}  // namespace emend
