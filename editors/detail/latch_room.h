// Which layer the neurons of a subject or a release go to.
#pragma once

#include <emend/editors/detail/latch_batch.h>

#include <vector>

namespace emend::editors::detail {

/// The neurons of the layers of all_layers(), as a batch takes them.
class LatchRoom {
 public:
  LatchRoom(const LatchHparams& hparams, const std::vector<LayerMemory>& memory, const models::Model& model);

  /// Takes `neurons` in one of the places [begin, end) of all_layers() and returns it: the first layer with so many
  /// vacant ones, then the first with room; if there is none, the one of which least is taken.
  [[nodiscard]] size_t take(size_t begin, size_t end, size_t neurons);

 private:
  double room_;
  std::vector<size_t> used_, vacant_;
  std::vector<int64_t> width_;
};

}  // namespace emend::editors::detail
