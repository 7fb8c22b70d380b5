// Arrays of numpy's .npz files, as published statistics come: a zip archive with one .npy member an array.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

namespace emend {

/// An opened archive. Goals: numbers (float, integer, bool) of any size, stored or deflated. Non-goals: writing;
/// strings and pickled objects, which are listed but not read.
class NpzFile {
 public:
  /// Throws Error(kNotFound) if there is no file, Error(kCorruption) if it is no zip archive.
  explicit NpzFile(std::filesystem::path path);

  /// Names of the members without ".npy", in the archive's order.
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] bool contains(const std::string& name) const;

  /// A host tensor of its own in the array's dtype. Throws Error(kNotFound) naming the member, Error(kCorruption) for a
  /// damaged one (the archive's checksum is compared), Error(kUnsupported) for strings, objects and big-endian numbers.
  [[nodiscard]] at::Tensor read(const std::string& name) const;

 private:
  std::filesystem::path path_;
  std::vector<std::string> names_;
};

}  // namespace emend
