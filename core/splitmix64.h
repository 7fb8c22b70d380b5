// A number from a number, for streams of random numbers that are told apart by a seed and a count.
#pragma once

#include <cstdint>

namespace emend {

/// splitmix64 (Steele, Lea, Flood 2014): spreads neighbouring numbers over the whole range, in both halves of the bits.
[[nodiscard]] constexpr uint64_t splitmix64(uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}
static_assert(splitmix64(0) == 0xe220a8397b1dcdafU, "the first number of the published generator with seed 0");

}  // namespace emend
