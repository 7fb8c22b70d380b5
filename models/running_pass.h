// How far the rows of a pass are in their answers, for hooks that act by that: generation knows, tensors do not show
// it.
#pragma once

#include <emend/models/batch.h>

#include <cstdint>
#include <vector>

namespace emend::models {

struct RunningPass {
  const TokenBatch& batch;
  std::vector<int64_t> answered;  ///< by token: tokens of the answer up to it, itself included; 0: of the prompt

  /// Of the thread; null while no text is being continued (generation.h).
  [[nodiscard]] static const RunningPass* now() noexcept;
};

}  // namespace emend::models
