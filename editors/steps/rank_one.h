// Editors that write one fact at a time as a rank-one change: ROME and its variants.
//
//   u   = C⁻¹k / ‖C⁻¹k‖                  k: the key that chooses the direction
//   v*  = t0 + δ                          the MLP output that makes the model say the fact (targets.h)
//   ΔW  = ((v* − m)/(k'·u)) uᵀ            k', m: key and value that the change has to satisfy
#pragma once

#include <emend/editors/steps/locate.h>

namespace emend::editors {

/// Which prompts a key (and value) is taken from.
enum class KeySource {
  kMean,   ///< mean over all contexts
  kPlain,  ///< the plain prompt
};

/// ROME's defaults: a wide norm limit, twenty sampled contexts of two lengths.
struct RankOneHparams : hparams::LocateHparams {
  RankOneHparams() {
    clamp_norm_factor = 4;
    context_template_length_params = {{5, 10}, {10, 10}};
  }
};
[[nodiscard]] const hparams::Schema<RankOneHparams>& rank_one_schema();  ///< the fields above

struct RankOneRecipe {
  hparams::LocateHparams common;
  KeySource direction = KeySource::kMean;     ///< k
  KeySource constraint = KeySource::kPlain;   ///< k' and m
  bool target_is_current_plus_delta = false;  ///< v* = m + δ instead of t0 + δ
};

class RankOneEditor final : public NamedEditor {
 public:
  /// Throws like check_locate_hparams.
  RankOneEditor(RankOneRecipe recipe, const RecipeInputs& in);

  [[nodiscard]] std::vector<int> statistics_layers() const override;
  /// Facts in order, each on the model that the earlier ones left; the layers of a fact in ascending order.
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override;

 private:
  RankOneRecipe recipe_;
  std::optional<ContextTemplates> contexts_;  ///< sampled at the first edit
};

}  // namespace emend::editors
