#include <emend/editors/detail/latch_room.h>
#include <emend/editors/steps/neurons.h>

#include <algorithm>

namespace emend::editors::detail {

LatchRoom::LatchRoom(const LatchHparams& hparams, const std::vector<LayerMemory>& memory, const models::Model& model)
    : room_(hparams.room) {
  for (const int64_t layer : hparams.all_layers()) {
    const int at = static_cast<int>(layer);
    used_.push_back(memory[used_.size()].used.size());
    vacant_.push_back(vacant_neurons(model, MlpWeights::of(model, at)).size());
    width_.push_back(model.edit_site(at).in_features);
  }
}

size_t LatchRoom::take(size_t begin, size_t end, size_t neurons) {
  size_t best = end;
  for (size_t place = begin; place < end && best == end; ++place)
    if (vacant_[place] >= neurons) best = place;
  for (size_t place = begin; place < end && best == end; ++place)
    if (static_cast<double>(used_[place]) < room_ * static_cast<double>(width_[place])) best = place;
  if (best == end) {
    const auto first = used_.begin() + static_cast<std::ptrdiff_t>(begin);
    best =
        static_cast<size_t>(std::min_element(first, used_.begin() + static_cast<std::ptrdiff_t>(end)) - used_.begin());
  }
  vacant_[best] -= std::min(vacant_[best], neurons);
  used_[best] += neurons;
  return best;
}

}  // namespace emend::editors::detail
