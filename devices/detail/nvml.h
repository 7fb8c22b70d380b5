// GPU names and free memory from NVIDIA's management library, which answers without a CUDA context.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace emend::devices::detail {

struct GpuInfo {
  std::string name, bus, driver;
  int64_t total_bytes = 0, free_bytes = 0;  ///< 0 of a slice (MIG): the library would tell those of the whole GPU
};

/// Of the CUDA device `index` as this process numbers them. Empty if the library or the device is absent.
[[nodiscard]] std::optional<GpuInfo> query_gpu(int index);

}  // namespace emend::devices::detail
