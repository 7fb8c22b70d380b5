// FT: unconstrained fine-tuning of one MLP matrix, the baseline of the MEMIT repository (Meng et al., 2023, appendix).
// Steps in finetune.h.
#include <emend/editors/finetune.h>

namespace emend::editors {
namespace {

struct FtHparams : FineTuneHparams {};

const hparams::Schema<FtHparams>& ft_schema() {
  static const auto schema = hparams::Schema<FtHparams>("ft").include(finetune_schema());
  return schema;
}

}  // namespace

EditorInfo make_ft() {
  return finetune_entry<FtHparams>("ft", "fine-tuning of one MLP matrix without a limit",
                                   "Meng et al., Mass-Editing Memory in a Transformer, ICLR 2023 (baseline)",
                                   ft_schema());
}

}  // namespace emend::editors
