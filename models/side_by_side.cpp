#include <emend/devices/cores.h>
#include <emend/models/compute_copy.h>
#include <emend/models/side_by_side.h>

#include <algorithm>

namespace emend::models {

void side_by_side(const Model& model, int64_t n, const std::function<void(int64_t)>& work) {
  const auto devices = model.placement().devices();
  if (std::ranges::all_of(devices, [](c10::Device d) { return d.is_cpu(); }) && hooks_idle_above(model, 0))
    return devices::each_on_a_core(n, work);
  for (int64_t i = 0; i < n; ++i) work(i);
}

size_t groups_of_rows(const Model& model, size_t rows) {
  if (!std::ranges::all_of(model.placement().devices(), devices::in_host_memory)) return 1;
  return static_cast<size_t>(devices::parts_for_cores(static_cast<int64_t>(rows), 64, 48));
}

}  // namespace emend::models
