// Independent passes of one model, by cores side by side.
#pragma once

#include <emend/models/model.h>

#include <functional>

namespace emend::models {

/// work(0) … work(n−1), which read the model: by cores side by side (devices/cores.h) if it is on the CPU and nothing
/// is attached to its hook points, otherwise one after the other.
void side_by_side(const Model& model, int64_t n, const std::function<void(int64_t)>& work);

/// work(begin, end) for each of the parts that devices::parts_for_cores makes of n rows, as side_by_side does.
void parts_side_by_side(const Model& model, size_t n, int64_t most, int64_t fewest,
                        const std::function<void(size_t begin, size_t end)>& work);

/// Into how many groups so many rows go that are continued together, as devices::parts_for_cores counts them: at most
/// 64 a group, and none below 24, whose products would be too small. One on a GPU, which wants all at once.
[[nodiscard]] size_t groups_of_rows(const Model& model, size_t rows);

}  // namespace emend::models
