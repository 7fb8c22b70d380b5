// FT-M: fine-tuning with the loss that generation will be judged by: each target token after the ones before it, the
// prompt masked out (EasyEdit's target_new objective; Zhang et al., 2024). Steps in finetune.h.
#include <emend/editors/finetune.h>

namespace emend::editors {
namespace {

struct FtMHparams : FineTuneHparams {
  FtMHparams() { objective_optimization = "target_new"; }
};

const hparams::Schema<FtMHparams>& ft_m_schema() {
  static const auto schema = hparams::Schema<FtMHparams>("ft-m").include(finetune_schema());
  return schema;
}

}  // namespace

EditorInfo make_ft_m() {
  return finetune_entry<FtMHparams>(
      "ft-m", "fine-tuning on the target's tokens after the prompt",
      "Zhang et al., A Comprehensive Study of Knowledge Editing for Large Language Models, 2024", ft_m_schema());
}

}  // namespace emend::editors
