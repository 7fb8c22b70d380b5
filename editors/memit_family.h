// The hyper-parameters that MEMIT shares with the methods that add to it a memory, a mask or a restraint.
#pragma once

#include <emend/editors/locate.h>

#include <string>

namespace emend::editors {

struct SharedHparams : hparams::LocateHparams {  ///< how a batch is put together, whatever solves it
  bool merge_equal_keys = false;
  int64_t rounds = 1;
  double round_probability = 0.1;
};
[[nodiscard]] const hparams::Schema<SharedHparams>& shared_hparams_schema();  ///< the fields above
/// A check of the schema for editors that write a batch only once: empty, or what is expected of `rounds`.
[[nodiscard]] std::string one_round(const SharedHparams& hparams);

struct MemitHparams : SharedHparams {  ///< what MEMIT and its descendants share
  double mom2_update_weight = 15000;
};
[[nodiscard]] const hparams::Schema<MemitHparams>& memit_hparams_schema();  ///< the fields above

/// The recipe of `editor`; `effective` is the dump of the editor's own schema. Throws like check_locate_hparams.
[[nodiscard]] LocateRecipe memit_family_recipe(std::string editor, nlohmann::json effective,
                                               const SharedHparams& hparams, const models::Model& model,
                                               const hparams::RawHparams& raw);

/// MEMIT's update: closed_form with λC preserved. For methods that differ from MEMIT in their recipe alone.
class MemitEditor : public LocateEditor {
 public:
  MemitEditor(LocateRecipe recipe, double lambda) : LocateEditor(std::move(recipe)), lambda_(lambda) {}

  [[nodiscard]] LayerUpdate update(const LayerProblem& problem) const override;

 private:
  double lambda_;
};

}  // namespace emend::editors
