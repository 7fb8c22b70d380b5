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

size_t groups_of_rows(const Model& model, size_t rows, size_t most) {
  constexpr size_t kTwo = 48;
  if (rows < kTwo || !std::ranges::all_of(model.placement().devices(), devices::in_host_memory)) return 1;
  const size_t groups = (rows + most - 1) / most;
  return groups <= 2 ? 2 : (groups + 3) / 4 * 4;
}

}  // namespace emend::models
