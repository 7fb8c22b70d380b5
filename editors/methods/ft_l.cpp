// FT-L: fine-tuning with every entry kept within ε of its old value (Zhu et al., 2020; the constrained baseline of ROME
// and MEMIT). All target tokens are scored at the last prompt position. Steps in finetune.h.
#include <emend/editors/finetune.h>

namespace emend::editors {
namespace {

struct FtLHparams : FineTuneHparams {
  FtLHparams() { norm_constraint = 5e-4; }
};

const hparams::Schema<FtLHparams>& ft_l_schema() {
  static const auto schema = hparams::Schema<FtLHparams>("ft-l").include(finetune_schema());
  return schema;
}

}  // namespace

EditorInfo make_ft_l() {
  return finetune_entry<FtLHparams>("ft-l", "fine-tuning within a box around the old weights",
                                    "Zhu et al., Modifying Memories in Transformer Models, 2020; Meng et al., Locating "
                                    "and Editing Factual Associations in GPT, NeurIPS 2022 (baseline)",
                                    ft_l_schema());
}

}  // namespace emend::editors
