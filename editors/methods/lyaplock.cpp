// LyapLock: Bounded Knowledge Preservation in Sequential Large Language Model Editing (Wang et al., EMNLP 2025,
// arXiv 2505.15702).
//
// The mean over all batches of what is done to the corpus is to stay below a limit. A virtual queue a layer grows while
// it is above and weighs the corpus in the next batch:
//
//   P_t      = tr((W_t − W0) C (W_t − W0)ᵀ)             what t batches have done to the corpus
//   q_1      = 1,   q_{t+1} = max(q_t + P_t/(α P_1) − 1, 1)
//   W_{t+1}  = argmin ‖W K − V‖² + Σ_{i≤t} ‖W K_i − W_i K_i‖² + q_{t+1} λ tr((W − W0) C (W − W0)ᵀ)
//
// q is the authors' a·Z: they set a = 1/√(α P_1), Z = Zmax = √(α P_1), V = 1 and b = 0, which leaves α alone.
//
//   F key width · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/editors/steps/locate.h>

#include <algorithm>

namespace emend::editors {
namespace {

struct LyapLockHparams : MemitHparams {
  double alpha = 60;
};

// tr((W − W0) C (W − W0)ᵀ); without second moments ‖W − W0‖².
double preservation_loss(const LayerProblem& problem) {
  if (!problem.original_DF.defined()) return 0;
  const at::NoGradGuard no_grad;
  const auto here = [&](const at::Tensor& x) { return routed(x, problem.keys_FN, at::kDouble); };
  const at::Tensor change_DF = here(problem.weight_DF) - here(problem.original_DF);
  const at::Tensor weighed_DF = problem.moment ? change_DF.mm(here(problem.moment.cov_FF())) : change_DF;
  return (weighed_DF * change_DF).sum().item<double>();
}

// What a layer carries from batch to batch. Weights stay in between: a batch's loss is taken when the next one begins.
struct Queue {
  double base = 0;  // P_1; 0 until a batch has changed something
  double length = 1;

  static Queue before(const LayerProblem& problem, double alpha) {
    Queue queue;
    if (problem.carried.defined()) queue = {problem.carried[0].item<double>(), problem.carried[1].item<double>()};
    const double loss = preservation_loss(problem);
    if (queue.base == 0) queue.base = loss;
    if (queue.base > 0) queue.length = std::max(queue.length + loss / (alpha * queue.base) - 1, 1.0);
    return queue;
  }
  [[nodiscard]] at::Tensor tensor() const { return at::tensor({base, length}, at::kDouble); }
};

LocateRecipe lyaplock_recipe(const LyapLockHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(h, in);
  recipe.remembers_keys = recipe.keys_as_written = recipe.compensates = recipe.values_as_given = true;
  recipe.update = [lambda = h.mom2_update_weight, alpha = h.alpha](const LayerProblem& problem) {
    const Queue queue = Queue::before(problem, alpha);
    LayerUpdate update = closed_form(problem, preserved_of(problem, lambda * queue.length));
    update.carries = update.more["queue"] = queue.tensor();
    return update;
  };
  return recipe;
}

}  // namespace

EditorInfo make_lyaplock() {
  using H = LyapLockHparams;
  static const auto schema =
      hparams::Schema<H>("lyaplock")
          .include(memit_hparams_schema())
          .field("alpha", &H::alpha,
                 "how many times the first batch's damage to the corpus the batches may do on average",
                 {.formula = "q <- max(q + P/(alpha P_1) - 1, 1), P = tr((W - W0) C (W - W0)t)", .above = 0})
          .check("rounds", one_round);
  return locate_entry(
      "lyaplock", "many batches, with a queue that weighs the corpus once they have damaged it too much",
      "Wang et al., LyapLock: Bounded Knowledge Preservation in Sequential Large Language Model Editing, EMNLP 2025",
      schema, lyaplock_recipe);
}

}  // namespace emend::editors
