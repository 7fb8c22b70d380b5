// Which rows begin alike: a partition of token sequences into groups whose common beginning is worth computing once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emend::models {

struct SharedGroup {
  int64_t shared = 0;        ///< tokens that all rows of the group begin with; 0: computed on their own
  std::vector<size_t> rows;  ///< indices into the sequences
};

/// The partition that saves most tokens with one level of sharing. `least` is the smallest saving that is worth a pass
/// of its own; `sequences` are what may be shared of each row (not its last token). Order: by content.
[[nodiscard]] std::vector<SharedGroup> share_beginnings(const std::vector<std::vector<int64_t>>& sequences,
                                                        int64_t least);

}  // namespace emend::models
