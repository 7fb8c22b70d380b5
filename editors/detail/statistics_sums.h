// Sums of k·kᵀ over rows of tokens, on the way to second moments.
#pragma once

#include <emend/devices/collectives.h>
#include <emend/editors/steps/statistics.h>

#include <functional>

namespace emend::editors::detail {

/// What has been added up.
struct Sums {
  std::map<int, at::Tensor> sums_FF;  ///< a layer; float64, on the layers' devices; the lower triangle
  int64_t count = 0, documents = 0;
  int64_t number = 0;  ///< of batches seen, by all processes
};

/// "count" or "skip".
[[nodiscard]] std::string name_of(FirstToken first);

[[nodiscard]] int64_t tokens_of(const std::vector<std::vector<int64_t>>& rows);

/// Adds the keys of these rows, row r to half r mod halves.size(). With a group, batch b is computed by process b mod
/// size, so that every batch is the one of a single process. `seen` hears the tokens of each batch, whoever had it.
void add_rows(const models::Model& model, const std::vector<std::vector<int64_t>>& rows, const std::vector<int>& layers,
              const StatisticsOptions& options, devices::Collectives* group, std::vector<Sums>& halves,
              const std::function<void(int64_t)>& seen);

/// Of all processes, on the host.
[[nodiscard]] Sums total_of(const models::Model& model, const Sums& mine, const std::vector<int>& layers,
                            devices::Collectives* group);

/// The halves' reports, a layer each; nothing unless there are two with tokens in them.
[[nodiscard]] std::map<int, HalvesReport> compare(const std::vector<Sums>& totals);

[[nodiscard]] std::map<int, SecondMoment> moments_of(const std::vector<Sums>& totals, const StatisticsOptions& options);

}  // namespace emend::editors::detail
