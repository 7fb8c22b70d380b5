// FT-W: fine-tuning with a weight decay that depends on the number of facts, n^−0.87 e^0.156 (the FT-W baseline of
// MEMIT, whose code drops the decay without a word because it tests for a tuple where JSON gives a list). A norm
// constraint may be given as well. Steps in finetune.h.
#include <emend/editors/finetune.h>

namespace emend::editors {
namespace {

struct FtWHparams : FineTuneHparams {
  FtWHparams() { wd_power_law = {-0.87028798, 0.15589562}; }
};

const hparams::Schema<FtWHparams>& ft_w_schema() {
  static const auto schema = hparams::Schema<FtWHparams>("ft-w").include(finetune_schema());
  return schema;
}

}  // namespace

EditorInfo make_ft_w() {
  return finetune_entry<FtWHparams>("ft-w", "fine-tuning with weight decay by the number of facts",
                                    "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023 (baseline)",
                                    ft_w_schema());
}

}  // namespace emend::editors
