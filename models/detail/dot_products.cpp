#include <emend/models/detail/dot_products.h>
#include <emend/models/detail/vectors.h>

namespace emend::models::detail {
namespace {

struct DotProducts {
  template <class Vector, int kRows, int kOthers>
  [[gnu::always_inline]] static void tile(const float* matrix, int64_t step, const float* x_nd, int64_t d, int64_t S,
                                          float* result) {
    Vector sums[kRows][kOthers] = {}, x, other[kOthers];
    int64_t whole = 0;
    for (; whole + kWidth<Vector> <= d; whole += kWidth<Vector>) {
#pragma GCC unroll 6
      for (int s = 0; s < kOthers; ++s) load(other[s], matrix + s * step + whole);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        load(x, x_nd + r * d + whole);
#pragma GCC unroll 6
        for (int s = 0; s < kOthers; ++s) sums[r][s] += x * other[s];
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 6
      for (int s = 0; s < kOthers; ++s) {
        float sum = sum_of(sums[r][s]);
        for (int64_t c = whole; c < d; ++c) sum += x_nd[r * d + c] * matrix[s * step + c];
        result[r * S + s] = sum;
      }
  }

  template <class Vector, int kOthers>
  [[gnu::always_inline]] static void all_rows(const float* matrix, int64_t step, const float* x_nd, int64_t n,
                                              int64_t d, int64_t S, float* result) {
    for (; n >= 4; n -= 4, x_nd += 4 * d, result += 4 * S) tile<Vector, 4, kOthers>(matrix, step, x_nd, d, S, result);
    if (n == 3) tile<Vector, 3, kOthers>(matrix, step, x_nd, d, S, result);
    if (n == 2) tile<Vector, 2, kOthers>(matrix, step, x_nd, d, S, result);
    if (n == 1) tile<Vector, 1, kOthers>(matrix, step, x_nd, d, S, result);
  }

  template <class Vector>
  [[gnu::always_inline]] static void run(const float* matrix, int64_t step, int64_t count, const float* x_nd, int64_t n,
                                         int64_t d, int64_t S, float* result) {
    // Four rows with three: what the registers of AVX2 hold. Those of AVX-512 are twice as many.
    int64_t s = 0;
    if constexpr (kWidth<Vector> == 16)
      for (; s + 6 <= count; s += 6) all_rows<Vector, 6>(matrix + s * step, step, x_nd, n, d, S, result + s);
    for (; s + 3 <= count; s += 3) all_rows<Vector, 3>(matrix + s * step, step, x_nd, n, d, S, result + s);
    for (; s < count; ++s) all_rows<Vector, 1>(matrix + s * step, step, x_nd, n, d, S, result + s);
  }
};

}  // namespace

void dot_products(const float* matrix, int64_t step, int64_t count, const float* x_nd, int64_t n, int64_t d, int64_t S,
                  float* result) {
  run<DotProducts>(matrix, step, count, x_nd, n, d, S, result);
}

}  // namespace emend::models::detail
