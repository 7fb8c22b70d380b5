// Second moments computed by several processes together (mpirun, srun, torchrun).
//
// Goal: the numbers of one process, up to the rounding of sums in float64. Every process reads the corpus and takes its
// share of the batches; the sums are added over all; the first process writes the cache. Non-goal: sharing the sampling
// of text where there is no corpus: every process samples the same text.
#pragma once

#include <emend/devices/collectives.h>
#include <emend/editors/steps/statistics.h>

#include <memory>
#include <optional>

namespace emend::editors {

/// As CorpusStatistics. All processes must make the same calls; `group` must outlive the provider. A group of one
/// gives the bits of CorpusStatistics. If a process is lost, prepare() throws Error(kDevice) in the others.
[[nodiscard]] std::unique_ptr<StatisticsProvider> make_shared_statistics(std::optional<StatisticsText> text,
                                                                         StatisticsOptions options,
                                                                         devices::Collectives& group);

}  // namespace emend::editors
