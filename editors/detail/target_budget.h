// How many facts fit into one step of the target optimisation.
#pragma once

#include <emend/devices/runtime.h>
#include <emend/editors/steps/targets.h>

#include <span>

namespace emend::editors::detail {

/// Bytes that a problem holds while it is active: what autograd keeps of its suffix tokens in the layers that run at
/// every step, its cached keys and values, and the KL rows' first distributions. `upper` is what runs the steps (the
/// model or a compute copy).
[[nodiscard]] int64_t problem_bytes(const models::Model& upper, const TargetProblem& problem, int first_layer);

/// Bytes that all active problems may hold together: a third of a GPU's free memory, little as that may be; on a CPU
/// enough for a few hundred tokens or half a GiB (more buy no speed there), as far as a quarter of the free memory
/// goes. Of a model on several devices each holds the share of its layers, and the tightest decides.
[[nodiscard]] int64_t active_bytes(const models::Model& upper, int first_layer);

/// The same for the `layers` above the edited one, on the devices of `machine`; `most_on_cpu`: where one is the host,
/// unless half a GiB is more.
[[nodiscard]] int64_t tightest_room(std::span<const devices::DeviceInfo> machine, std::span<const at::Device> layers,
                                    int64_t most_on_cpu);

/// Sets of facts that go through the layers above side by side. One for each GPU, so that all have work; two on a
/// single one where facts are so many that both have full batches, so that it works while the host reads a step and
/// queues the next.
[[nodiscard]] int lanes_for(size_t gpus, size_t facts);

/// Problems waiting for their turn, longest first: attention pads to the longest row of a batch.
class TargetQueue {
 public:
  /// most_facts 0: as many as fit into active_bytes. The room is shared out among `lanes` sets of active problems.
  TargetQueue(const models::Model& upper, std::span<const TargetProblem> problems, int first_layer, int64_t most_facts,
              int lanes = 1);

  [[nodiscard]] bool empty() const noexcept { return next_ == order_.size(); }
  /// Problems that may join the `active` ones of a lane now. None while there is so little room that a pass of their
  /// own would be small, unless they are the last; at least one if nothing is active.
  [[nodiscard]] std::vector<size_t> take(const std::vector<size_t>& active);

 private:
  std::vector<size_t> order_;
  std::vector<int64_t> bytes_;  ///< of each problem
  size_t next_ = 0;
  int64_t most_facts_, most_bytes_;  ///< of a lane
};

}  // namespace emend::editors::detail
