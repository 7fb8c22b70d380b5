// Spreading a decoder's parts over devices: accelerate's filling rules, and an even cut for simulated
// devices.
#pragma once

#include <emend/devices/memory_model.h>

#include <vector>

namespace emend::devices::detail {

/// A device and the bytes that may be put on it.
struct Capacity {
  c10::Device device;
  int64_t bytes = 0;
};

enum class Strategy { kBalanced, kBalancedLow0, kSequential };

/// Fills the accelerators in order, as accelerate does; what is left goes to the CPU, fits or not.
///   kSequential    each device is filled before the next; on the first, room for the largest part still to
///   come is kept kBalanced      every device but the last takes at most size / n + 1.25 × the largest block
///   kBalancedLow0  the same over n − 1 devices; the first takes only what the others cannot
/// Parts of a tied model's head go with the embedding. The room kept on the first device is given up before a
/// layer would go to the CPU for it.
[[nodiscard]] PlacementPlan fill(const MemoryModel& model, const std::vector<Capacity>& accelerators,
                                 Strategy strategy);

/// Contiguous runs of layers over all `devices`, as equal in bytes as can be (least sum of squares). Every
/// device gets a layer if there are enough; with more devices than layers the embedding, then the head, get
/// their own.
[[nodiscard]] PlacementPlan spread_evenly(const MemoryModel& model, const std::vector<c10::Device>& devices);

}  // namespace emend::devices::detail
