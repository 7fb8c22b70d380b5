// What the C++20 library lacks for making one list from another.
#pragma once

#include <functional>
#include <iterator>
#include <type_traits>
#include <vector>

namespace emend {

/// What `projection` (a member, a function) makes of each element of `range`, in order.
template <class Range, class Projection>
[[nodiscard]] auto mapped(Range&& range, Projection projection) {
  using Made = decltype(std::invoke(projection, *std::begin(range)));
  std::vector<std::remove_cvref_t<Made>> all;
  for (auto&& element : range) all.push_back(std::invoke(projection, element));
  return all;
}

}  // namespace emend
