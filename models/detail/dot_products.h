// Products of few rows with a large matrix, read where it lies. Libraries put the matrix into an order of their own
// first, which takes longer than a product of a few dozen rows.
#pragma once

#include <cstdint>

namespace emend::models::detail {

/// result[i·S + s] = x_i · m_s in float32 for `n` rows of x, one behind the other, and `count` rows of `matrix` that
/// lie `step` numbers apart; all have `d` numbers. Each sum is taken in the same order, whatever `n` and `count` are.
void dot_products(const float* matrix, int64_t step, int64_t count, const float* x_nd, int64_t n, int64_t d, int64_t S,
                  float* result);

}  // namespace emend::models::detail
