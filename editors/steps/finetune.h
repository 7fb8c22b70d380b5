// Fine-tuning chosen weights on the facts: FT, FT-L, FT-M, FT-W (the baseline of Meng et al. 2022 and 2023, and
// EasyEdit's). The four editors differ in their defaults alone (methods/ft*.cpp).
//
//   for at most num_steps epochs, over chunks of batch_size facts:
//     loss = mean over the facts of −mean_t log p(target token t)     scored where `objective_optimization` says
//     one Adam step, unless the loss is below stop_loss already
//     W ← clamp(W, W0 − ε, W0 + ε) entry by entry                     norm_constraint ε
//   stop when the mean loss of an epoch is below stop_loss
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/hparams/locate.h>

namespace emend::editors {

struct RenderedBatch;

struct FineTuneHparams {
  std::vector<int64_t> layers;
  int64_t num_steps = 25;
  int64_t batch_size = 64;
  double lr = 5e-4;
  std::optional<double> weight_decay = 0.0;
  std::vector<double> wd_power_law;
  std::optional<double> norm_constraint;
  std::string objective_optimization = "prompt_last";
  double stop_loss = 1e-2;
  bool score_padding = false;
  double kl_factor = 0;
  hparams::ModuleNames modules;

  /// Weight decay of an edit of `facts` facts.
  [[nodiscard]] double decay(int64_t facts) const;
};
[[nodiscard]] const hparams::Schema<FineTuneHparams>& finetune_schema();  ///< the fields above

/// What Adam sees of a matrix's gradient; both as the matrix is stored.
using GradientRule = std::function<at::Tensor(const std::string& weight, const at::Tensor& gradient)>;

/// Trains on a batch, writes the weights and adds what changed to `result`. With a rule matrices alone are trained.
/// Nothing stays of it if it throws: Error(kNumeric) for a loss that is not finite, Error(kCancelled).
void finetune(const FineTuneHparams& hparams, const std::string& editor, models::Model& model,
              const RenderedBatch& batch, const EditContext& context, EditResult& result,
              const GradientRule& rule = {});

/// Throws Error(kInvalidArgument) naming the place in the file if the values do not fit the model.
void check_finetune(const FineTuneHparams& hparams, const hparams::RawHparams& raw, const models::Model& model);

/// Weights of one layer whose module path begins with `module_template` ("{}" is the layer; empty: the family's
/// rewritten matrix), weights before biases. Throws Error(kInvalidArgument) naming `where` if there is none.
[[nodiscard]] std::vector<std::string> weights_of_module(const models::Model& model, int layer,
                                                         const std::string& module_template, const std::string& where);

}  // namespace emend::editors
