// Loops over vectors of the compiler, for what the processor has: SSE or NEON, AVX2, AVX-512. What is compiled here
// needs -O3, and loops over registers need to be unrolled: a vector that is no register lives in memory, at a tenth of
// the speed, and so does one that is wider than a register.
#pragma once

#include <cstdint>
#include <cstring>

namespace emend::models::detail {

using Floats4 = float __attribute__((vector_size(16)));
using Floats8 = float __attribute__((vector_size(32)));
using Floats16 = float __attribute__((vector_size(64)));

template <class Vector>
constexpr int kWidth = sizeof(Vector) / sizeof(float);

template <class Vector>
[[gnu::always_inline]] inline void load(Vector& to, const float* from) {
  std::memcpy(&to, from, sizeof to);
}

template <class Vector>
[[gnu::always_inline]] inline void store(const Vector& from, float* to) {
  std::memcpy(to, &from, sizeof from);
}

/// Of its numbers, by halves: one after the other each waits for the sum before it.
[[gnu::always_inline]] inline float sum_of(const Floats4& vector) {
  const Floats4 pairs = vector + __builtin_shufflevector(vector, vector, 2, 3, 0, 1);
  return pairs[0] + pairs[1];
}
[[gnu::always_inline]] inline float sum_of(const Floats8& vector) {
  return sum_of(__builtin_shufflevector(vector, vector, 0, 1, 2, 3) +
                __builtin_shufflevector(vector, vector, 4, 5, 6, 7));
}
[[gnu::always_inline]] inline float sum_of(const Floats16& vector) {
  return sum_of(__builtin_shufflevector(vector, vector, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(vector, vector, 8, 9, 10, 11, 12, 13, 14, 15));
}

template <class Work, class... Arguments>
void run_plain(Arguments... arguments) {
  Work::template run<Floats4>(arguments...);
}
#if defined(__x86_64__)
template <class Work, class... Arguments>
__attribute__((target("avx2,fma"))) void run_avx2(Arguments... arguments) {
  Work::template run<Floats8>(arguments...);
}
template <class Work, class... Arguments>
__attribute__((target("avx512f"))) void run_avx512(Arguments... arguments) {
  Work::template run<Floats16>(arguments...);
}
#endif

/// Work::run<Vector>(arguments), a static function that is always inlined, with the widest vector of the processor.
template <class Work, class... Arguments>
void run(Arguments... arguments) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f");
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512) return run_avx512<Work>(arguments...);
  if (avx2) return run_avx2<Work>(arguments...);
#endif
  run_plain<Work>(arguments...);
}

}  // namespace emend::models::detail
