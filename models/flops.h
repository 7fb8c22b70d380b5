// Counting arithmetic, for benchmarks.
#pragma once

#include <cstdint>

namespace emend::models {

/// Floating-point operations of linear layers, experts and heads since the program began: two a multiply-add, forward
/// and (where gradients are recorded) backward with respect to inputs, weights and adapters. Attention scores, norms
/// and activations are not counted. Differences of two readings are what a phase took.
[[nodiscard]] int64_t linear_flops() noexcept;

}  // namespace emend::models
