// Edit packs. The checksum is put right first, so that damage reaches what lies behind it.
#include <emend/core/safetensors.h>
#include <emend/core/sha256.h>
#include <emend/editors/packs/pack.h>

#include "fuzz.h"

namespace emend::fuzz {
namespace {

// The tensors in the order in which the manifest names them.
std::vector<std::string> order_of(const nlohmann::json& manifest) {
  std::vector<std::string> names;
  size_t number = 0;
  for (const auto& entry : manifest.at("deltas")) {
    const std::string prefix = std::to_string(number++) + ".";
    if (entry.at("form") == "dense") {
      names.push_back(prefix + "dense");
    } else {
      names.push_back(prefix + "left");
      names.push_back(prefix + "right");
    }
  }
  number = 0;
  if (manifest.contains("runtime"))
    for (const auto& entry : manifest.at("runtime")) {
      const std::string prefix = "runtime." + std::to_string(number++) + ".";
      for (const auto& [name, shape] : entry.at("tensors").items()) names.push_back(prefix + name);
    }
  return names;
}

std::string checksum_of(const SafetensorsFile& file) {
  const std::string& manifest = file.metadata().at("manifest");
  Sha256 hash;
  hash.update(manifest);
  for (const auto& name : order_of(nlohmann::json::parse(manifest))) {
    const at::Tensor tensor = file.tensor(name).contiguous();
    hash.update(name);
    hash.update(std::string(c10::toString(tensor.scalar_type())));
    for (const int64_t size : tensor.sizes()) hash.update(" " + std::to_string(size));
    hash.update(tensor.const_data_ptr(), tensor.nbytes());
  }
  return hash.hex();
}

std::string with_checksum(std::string bytes) {
  const std::string key = "\"checksum\":\"";
  const size_t at = bytes.find(key);
  if (at == std::string::npos || at + key.size() + 64 > bytes.size()) return bytes;
  try {
    const MemoryFile file(bytes);
    bytes.replace(at + key.size(), 64, checksum_of(SafetensorsFile(file.path())));
  } catch (const std::exception&) {
    // Not even a safetensors file with a manifest: as it is.
  }
  return bytes;
}

}  // namespace

EMEND_FUZZ_TARGET(pack) {
  const MemoryFile file(with_checksum(std::string(input)));
  expect_error_or_success([&] {
    const auto pack = editors::load_pack(file.path());
    for (const auto& delta : pack.deltas) {
      int64_t values = 1;
      for (const int64_t n : delta.shape()) values *= n;
      if (values > 0 && values <= 1 << 16) (void)delta.norm();
    }
  });
}

}  // namespace emend::fuzz
