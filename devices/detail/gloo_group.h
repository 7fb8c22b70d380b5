// The group of processes over Gloo, with NCCL between GPUs where all have it. Its source is the only one that sees
// c10d.
#pragma once

#include <emend/devices/collectives.h>

namespace emend::devices::detail {

[[nodiscard]] std::unique_ptr<Collectives> join_gloo(const ProcessEnvironment& environment, ProcessTimeouts timeouts,
                                                     Log log);

/// Throws Error(kInvalidArgument) unless 0 <= root < size.
void require_root(int root, int size);

}  // namespace emend::devices::detail
