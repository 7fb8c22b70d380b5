// What any user runs on a new machine, without a model: `emend doctor --full`.
#pragma once

#include "model_options.h"

namespace emend::tools {

/// Looks for GPUs, driver and LibTorch's CUDA half; copies between all devices of the device map; edits a tiny built-in
/// model with ROME, MEMIT and LoRA on each device, every pair, the CPU with each and all together, in three dtypes, and
/// compares with the CPU; times products, attention and the solve. Prints the verdicts, or
/// {"devices", "checks", "timings", "ok"}. Returns 0, or kDevice's status if a check failed. Never throws for a finding.
int run_full_check(const ModelOptions& options, const Common& common);

}  // namespace emend::tools
