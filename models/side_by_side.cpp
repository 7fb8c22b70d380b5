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

void parts_side_by_side(const Model& model, size_t n, int64_t most, int64_t fewest,
                        const std::function<void(size_t begin, size_t end)>& work) {
  if (n == 0) return;
  const auto parts = static_cast<size_t>(devices::parts_for_cores(static_cast<int64_t>(n), most, fewest));
  side_by_side(model, static_cast<int64_t>(parts), [&](int64_t at) {
    const auto part = static_cast<size_t>(at);
    work(n * part / parts, n * (part + 1) / parts);
  });
}

size_t groups_of_rows(const Model& model, size_t rows) {
  if (!std::ranges::all_of(model.placement().devices(), devices::in_host_memory)) return 1;
  return static_cast<size_t>(devices::parts_for_cores(static_cast<int64_t>(rows), 64, 48));
}

}  // namespace emend::models
