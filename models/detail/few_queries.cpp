#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/devices/placement.h>
#include <emend/models/detail/attention.h>
#include <emend/models/detail/few_queries.h>

#include <algorithm>
#include <cstring>
#include <vector>

// One function for each set of instructions; the loader takes what the processor has.
#if defined(__x86_64__) && defined(__linux__)
#define EMEND_FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EMEND_FOR_EACH_PROCESSOR
#endif

namespace emend::models::detail {
namespace {

constexpr int64_t kMostQueries = 8;  // a head; beyond, the library's products are faster
constexpr int64_t kAtOnce = 64;      // keys or values that are widened together

// Vectors of the compiler, of which each set of instructions makes one register or several.
constexpr int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using HalfFloats = float __attribute__((vector_size(2 * kLanes)));
using QuarterFloats = float __attribute__((vector_size(kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using HalfWords = uint16_t __attribute__((vector_size(2 * kLanes)));

template <class Vector, class Number>
[[gnu::always_inline]] inline void load(Vector& to, const Number* from) {
  std::memcpy(&to, from, sizeof to);
}

EMEND_FOR_EACH_PROCESSOR void widen(const uint16_t* bfloat16, int64_t step, int64_t count, int64_t d, float* to) {
  for (int64_t s = 0; s < count; ++s, bfloat16 += step, to += d) {
    int64_t c = 0;
    for (; c + kLanes <= d; c += kLanes) {
      HalfWords narrow;
      load(narrow, bfloat16 + c);
      const Words bits = __builtin_convertvector(narrow, Words) << 16;
      std::memcpy(to + c, &bits, sizeof bits);
    }
    for (; c < d; ++c) {
      const uint32_t bits = static_cast<uint32_t>(bfloat16[c]) << 16;
      std::memcpy(to + c, &bits, sizeof bits);
    }
  }
}

// scores[i·S + s] = q_i · k_s for `count` keys from `keys` on, `step` apart.
EMEND_FOR_EACH_PROCESSOR void multiply(const float* keys, int64_t step, int64_t count, const float* q_nd, int64_t n,
                                       int64_t d, int64_t S, float* scores) {
  for (int64_t s = 0; s < count; ++s)
    for (int64_t i = 0; i < n; ++i) {
      const float *key = keys + s * step, *q = q_nd + i * d;
      Floats sums = {}, a, b;
      int64_t c = 0;
      for (; c + kLanes <= d; c += kLanes) {
        load(a, q + c);
        load(b, key + c);
        sums += a * b;
      }
      HalfFloats eight[2];
      std::memcpy(eight, &sums, sizeof sums);
      eight[0] += eight[1];
      QuarterFloats four[2];
      std::memcpy(four, eight, sizeof four);
      four[0] += four[1];
      float sum = (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
      for (; c < d; ++c) sum += q[c] * key[c];
      scores[i * S + s] = sum;
    }
}

// sums_i += pattern[i·S + s] · v_s.
EMEND_FOR_EACH_PROCESSOR void add_up(const float* values, int64_t step, int64_t count, const float* pattern, int64_t n,
                                     int64_t d, int64_t S, float* sums_nd) {
  for (int64_t i = 0; i < n; ++i) {
    const float* weights = pattern + i * S;
    float* sums = sums_nd + i * d;
    int64_t c = 0;
    for (; c + 2 * kLanes <= d; c += 2 * kLanes) {
      Floats one, other, a, b;
      load(one, sums + c);
      load(other, sums + c + kLanes);
      for (int64_t s = 0; s < count; ++s) {
        load(a, values + s * step + c);
        load(b, values + s * step + c + kLanes);
        one += weights[s] * a;
        other += weights[s] * b;
      }
      std::memcpy(sums + c, &one, sizeof one);
      std::memcpy(sums + c + kLanes, &other, sizeof other);
    }
    for (; c < d; ++c)
      for (int64_t s = 0; s < count; ++s) sums[c] += weights[s] * values[s * step + c];
  }
}

// Calls `use(head, rows, step, first, count)` for every key-value head of `x_BgSd` with its rows in float32, a part at
// a time; heads side by side.
template <class Use>
void each_head(const at::Tensor& x_BgSd, const Use& use) {
  const int64_t groups = x_BgSd.size(1), S = x_BgSd.size(2), d = x_BgSd.size(3), step = x_BgSd.stride(2);
  const bool wide = x_BgSd.scalar_type() == at::kFloat;
  at::parallel_for(0, x_BgSd.size(0) * groups, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> part(wide ? 0 : static_cast<size_t>(kAtOnce * d));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t at = head / groups * x_BgSd.stride(0) + head % groups * x_BgSd.stride(1);
      if (wide) {
        use(head, x_BgSd.const_data_ptr<float>() + at, step, int64_t{0}, S);
        continue;
      }
      const auto* bits = static_cast<const uint16_t*>(x_BgSd.const_data_ptr()) + at;
      for (int64_t s = 0; s < S; s += kAtOnce) {
        const int64_t count = std::min(kAtOnce, S - s);
        widen(bits + s * step, step, count, d, part.data());
        use(head, part.data(), d, s, count);
      }
    }
  });
}

bool is_readable(const at::Tensor& x) {
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  return devices::in_host_memory(x.device()) && known && x.stride(-1) == 1;
}

}  // namespace

bool takes_few_queries(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd) {
  for (const at::Tensor& x : {q_BhTd, k_BgSd, v_BgSd})
    if (!is_readable(x) || wants_gradient(x)) return false;
  return q_BhTd.size(2) <= kMostQueries;
}

at::Tensor attend_few(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                      const at::Tensor& mask, double scale) {
  const int64_t B = q_BhTd.size(0), h = q_BhTd.size(1), T = q_BhTd.size(2), d = q_BhTd.size(3);
  const int64_t groups = k_BgSd.size(1), S = k_BgSd.size(2), n = h / groups * T, width = v_BgSd.size(3);
  const at::Tensor q = (q_BhTd.to(at::kFloat) * scale).contiguous();
  at::Tensor scores = at::empty({B, h, T, S}, q.options()), out = at::zeros({B, h, T, width}, q.options());
  const auto* from = q.const_data_ptr<float>();
  auto* to = scores.mutable_data_ptr<float>();
  each_head(k_BgSd, [&](int64_t head, const float* keys, int64_t step, int64_t first, int64_t count) {
    multiply(keys, step, count, from + head * n * d, n, d, S, to + head * n * S + first);
  });
  if (mask.defined()) scores.add_(mask);
  const at::Tensor pattern = at::softmax(scores, -1);
  const auto* weights = pattern.const_data_ptr<float>();
  auto* sums = out.mutable_data_ptr<float>();
  each_head(v_BgSd, [&](int64_t head, const float* values, int64_t step, int64_t first, int64_t count) {
    add_up(values, step, count, weights + head * n * S + first, n, width, S, sums + head * n * width);
  });
  return out.to(q_BhTd.scalar_type());
}

}  // namespace emend::models::detail
