// What the files of an edited folder should hold.
#pragma once

#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/pack.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace emend::testing {

/// Bytes by path.
using Files = std::map<std::string, std::string>;

/// A pack as the oracle knows it.
struct KnownPack {
  std::filesystem::path path;
  std::string id;
  editors::EditPack pack;
  bool usable = true;  ///< whole, and for this model
};

/// Everything below a folder; folders have no bytes.
inline Files files_under(const std::filesystem::path& folder) {
  Files files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    files[entry.path().string()] = entry.is_regular_file() ? read_file(entry.path()) : "";
  return files;
}

/// The weights of the original with packs added: read, add in float64, round to float32 a pack and to the type at last.
inline std::string expected_bytes(const std::filesystem::path& original,
                                  const std::vector<const KnownPack*>& in_force) {
  std::string bytes = read_file(original);
  const SafetensorsFile file(original);
  for (const auto& [name, info] : file.tensors()) {
    at::Tensor value = file.tensor(name);
    bool changed = false;
    for (const KnownPack* known : in_force)
      for (const auto& delta : known->pack.deltas) {
        if (delta.weight != name) continue;
        value = (value.to(at::kDouble) + (delta.low_rank() ? delta.left_DR.mm(delta.right_FR.t()) : delta.dense_DF))
                    .to(at::kFloat);
        changed = true;
      }
    if (!changed) continue;
    value = value.to(info.dtype).contiguous();
    std::memcpy(bytes.data() + info.offset, value.const_data_ptr(), info.bytes);
  }
  return bytes;
}

}  // namespace emend::testing
