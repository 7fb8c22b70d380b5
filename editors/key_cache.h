// The memory of sequential methods: the keys of the facts that earlier batches wrote.
//
//   Kp = [keys of all earlier facts]       the system of the next batch gains KpKpᵀ
//
// While there are fewer keys than key dimensions they are kept as they are, so that the small push-through systems stay
// small; beyond that only their sum ΣKKᵀ is kept.
//   F key width · N facts · P earlier keys
#pragma once

#include <emend/editors/locate.h>

#include <map>
#include <string>
#include <vector>

namespace emend::editors {

/// Earlier keys of one layer. Exactly one of the two is defined once something was added; both undefined: nothing yet.
struct EarlierKeys {
  at::Tensor keys_FP;  ///< float32, host
  at::Tensor sum_FF;   ///< ΣKKᵀ, float64, host

  /// ΣKKᵀ in float64; undefined without keys.
  [[nodiscard]] at::Tensor gram_FF() const;
  /// `base` and the earlier keys.
  [[nodiscard]] Preserved with(Preserved base) const;
};

/// Earlier keys of every layer of an editor, by the layer's place in `layers`.
class KeyCache {
 public:
  /// One matrix [F,N] a layer, any float dtype. Keys are kept in float32, the precision models compute them in.
  /// Throws Error(kInvalidArgument) if the number of layers or a width differs from what is there.
  void add(const std::vector<at::Tensor>& keys_FN);
  void clear() { layers_.clear(); }
  [[nodiscard]] bool empty() const noexcept { return layers_.empty(); }
  /// Nothing is defined before the first add().
  [[nodiscard]] EarlierKeys layer(size_t index) const;

  /// "keys.0", "sum.1", …: the number is the layer's place. load() replaces everything; throws Error(kCorruption) for
  /// names or shapes that state() does not give.
  [[nodiscard]] std::map<std::string, at::Tensor> state() const;
  void load(const std::map<std::string, at::Tensor>& state);

 private:
  std::vector<EarlierKeys> layers_;
};

/// A LocateEditor that remembers the keys of what it wrote, taken from the model as the batch has left it (as the
/// published code does).
class RememberingEditor : public LocateEditor {
 public:
  using LocateEditor::LocateEditor;

  void reset() override { memory_.clear(); }
  [[nodiscard]] std::map<std::string, at::Tensor> state() const override { return memory_.state(); }
  void load_state(const std::map<std::string, at::Tensor>& state) override { memory_.load(state); }

 protected:
  [[nodiscard]] bool wants_keys_after_edit() const override { return true; }
  void after_edit(const std::vector<at::Tensor>& keys_FN) override { memory_.add(keys_FN); }
  [[nodiscard]] const KeyCache& memory() const noexcept { return memory_; }

 private:
  KeyCache memory_;
};

}  // namespace emend::editors
