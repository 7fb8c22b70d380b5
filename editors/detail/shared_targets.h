// Target optimisation by several processes: each takes its share of the problems, everyone gets all targets.
#pragma once

#include <emend/devices/work_sharing.h>
#include <emend/editors/steps/targets.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::editors::detail {

using OptimiseFn = std::function<std::vector<Target>(const std::vector<TargetProblem>&)>;

/// What `optimise` makes of all problems, the same bits in every process. Traces do not travel: see optimise_targets.
[[nodiscard]] std::vector<Target> share_targets(const std::vector<TargetProblem>& problems,
                                                const devices::WorkSharing& sharing, const OptimiseFn& optimise);

/// Targets as bytes, every number exact, without traces. Throws Error(kCorruption) for other bytes.
[[nodiscard]] std::string encode_targets(const std::vector<Target>& targets);
[[nodiscard]] std::vector<Target> decode_targets(std::string_view bytes);

}  // namespace emend::editors::detail
