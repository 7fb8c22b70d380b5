// The memory of sequential methods: the keys of the facts that earlier batches wrote.
//
//   Kp = [keys of all earlier facts]       the system of the next batch gains KpKpᵀ
//
// While there are fewer keys than key dimensions they are kept as they are, so that the small push-through systems stay
// small; beyond that only their sum ΣKKᵀ is kept.
//   F key width · N facts · P earlier keys
#pragma once

#include <emend/editors/steps/solver.h>

namespace emend::editors {

/// Earlier keys of one layer. Exactly one of the two is defined once something was added; both undefined: nothing yet.
struct EarlierKeys {
  at::Tensor keys_FP;  ///< float32, host
  at::Tensor sum_FF;   ///< ΣKKᵀ, float64, host
  /// ΣVKᵀ, float64, host: the values that those keys were to give. Undefined unless the editor compensates.
  at::Tensor values_DF;

  /// ΣKKᵀ in float64; undefined without keys.
  [[nodiscard]] at::Tensor gram_FF() const;
  /// `base` and the earlier keys.
  [[nodiscard]] Preserved with(Preserved base) const;
};

/// Earlier keys of every layer of an editor, by the layer's place in `layers`.
class KeyCache {
 public:
  /// One matrix [F,N] a layer, any float dtype. Keys are kept in float32, the precision models compute them in.
  /// `values_DN`: what the keys were to give, or nothing; always or never.
  /// Throws Error(kInvalidArgument) if the number of layers or a width differs from what is there.
  void add(const std::vector<at::Tensor>& keys_FN, const std::vector<at::Tensor>& values_DN = {});
  /// Nothing is defined before the first add().
  [[nodiscard]] EarlierKeys layer(size_t index) const;

  /// "keys.0", "sum.1", "values.1", …: the number is the layer's place. load() replaces everything; throws
  /// Error(kCorruption) for names or shapes that state() does not give.
  [[nodiscard]] std::map<std::string, at::Tensor> state() const;
  void load(const std::map<std::string, at::Tensor>& state);

 private:
  std::vector<EarlierKeys> layers_;
};

}  // namespace emend::editors
