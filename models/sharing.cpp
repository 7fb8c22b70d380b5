#include <emend/models/sharing.h>

#include <algorithm>
#include <numeric>

namespace emend::models {
namespace {

int64_t common_prefix(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return x - a.begin();
}

struct Best {
  int64_t saved = 0;
  std::vector<SharedGroup> groups;
};

/// rows[begin, end) are sorted and have the first `depth` tokens in common.
Best best_partition(const std::vector<std::vector<int64_t>>& sequences, const std::vector<size_t>& rows, size_t begin,
                    size_t end, int64_t least) {
  Best alone;
  if (end - begin == 1) {
    alone.groups.push_back({0, {rows[begin]}});
    return alone;
  }
  const int64_t depth = common_prefix(sequences[rows[begin]], sequences[rows[end - 1]]);
  for (size_t i = begin; i < end;) {
    size_t j = i + 1;
    const auto& first = sequences[rows[i]];
    if (static_cast<int64_t>(first.size()) > depth)
      while (j < end && sequences[rows[j]][static_cast<size_t>(depth)] == first[static_cast<size_t>(depth)]) ++j;
    Best part = best_partition(sequences, rows, i, j, least);
    alone.saved += part.saved;
    std::move(part.groups.begin(), part.groups.end(), std::back_inserter(alone.groups));
    i = j;
  }
  const int64_t together = static_cast<int64_t>(end - begin - 1) * depth;
  if (depth == 0 || together < least || together <= alone.saved) return alone;
  Best shared;
  shared.saved = together;
  shared.groups.push_back(
      {depth, {rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.begin() + static_cast<std::ptrdiff_t>(end)}});
  return shared;
}

}  // namespace

std::vector<SharedGroup> share_beginnings(const std::vector<std::vector<int64_t>>& sequences, int64_t least) {
  if (sequences.empty()) return {};
  std::vector<size_t> rows(sequences.size());
  std::iota(rows.begin(), rows.end(), size_t{0});
  std::stable_sort(rows.begin(), rows.end(), [&](size_t a, size_t b) { return sequences[a] < sequences[b]; });
  return best_partition(sequences, rows, 0, rows.size(), least).groups;
}

}  // namespace emend::models
