// The file or files of one model.
#pragma once

#include <emend/models/gguf/gguf_file.h>

#include <memory>
#include <string_view>
#include <vector>

namespace emend::models::detail {

/// A tensor and the file it lies in; null pointers if there is none.
struct LocatedTensor {
  const GgufFile* file = nullptr;
  const GgufTensor* tensor = nullptr;
  explicit operator bool() const noexcept { return tensor != nullptr; }
};

/// All parts of a model. Metadata are those of the first part.
class GgufFiles {
 public:
  /// Opens `path`, and the other parts if its metadata say that there are some. Throws Error(kInvalidArgument) if
  /// `path` is not the first part, Error(kNotFound) naming a missing part, Error(kCorruption) if a tensor is in two
  /// parts.
  explicit GgufFiles(const std::filesystem::path& path);

  [[nodiscard]] const GgufFile& metadata() const noexcept { return *parts_.front(); }
  [[nodiscard]] const std::vector<std::shared_ptr<const GgufFile>>& parts() const noexcept { return parts_; }
  [[nodiscard]] LocatedTensor find(std::string_view name) const;

 private:
  std::vector<std::shared_ptr<const GgufFile>> parts_;
};

/// float32 values of a whole small tensor (rotary tables).
[[nodiscard]] std::vector<double> small_tensor(const LocatedTensor& located);

}  // namespace emend::models::detail
