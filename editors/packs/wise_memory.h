// WISE's side memories: changes of one matrix that only some tokens see.
//   M memories · N tokens · F key width · D hidden width
#pragma once

#include <emend/editors/packs/runtime.h>

#include <vector>

namespace emend::editors {

struct WiseMemory {
  at::Tensor delta_DF;   ///< W' − W, float32, host, paper orientation
  double threshold = 0;  ///< a token takes this memory if ‖delta·k‖ is larger
  std::vector<int64_t> case_ids;
};

/// As data for a pack, and back; reading throws Error(kCorruption, kInvalidArgument) naming `where`.
[[nodiscard]] RuntimePart wise_part(const std::vector<WiseMemory>& memories, const models::EditSite& site);
[[nodiscard]] std::vector<WiseMemory> wise_memories(const RuntimePart& part, const models::EditSite& site,
                                                    const std::string& where);

}  // namespace emend::editors
