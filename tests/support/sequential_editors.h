// Methods that solve for a change, with small hyper-parameters for the tiny models, and what they solve.
#pragma once

#include <emend/editors/steps/locate.h>

#include <string>

#include "support/editor_models.h"

namespace emend::testing {

inline std::string sequential_yaml(const std::string& more = "") {
  return "layers: [1, 2]\nv_num_grad_steps: 6\nv_lr: 0.1\n" + more;
}
inline const std::string kAlphaEdit = sequential_yaml("nullspace_threshold: 1\nL2: 2\n");
inline const std::string kMemit = sequential_yaml("mom2_update_weight: 3\n");

/// Widths of tiny_model.
inline constexpr int64_t kHidden = 32, kWidth = 48;

/// A problem of layer 1 with made-up keys (in the precision that memory keeps), residuals and statistics.
inline editors::LayerProblem made_up(const models::Model& model, uint64_t seed = 1, int64_t facts = 5) {
  editors::LayerProblem problem;
  problem.layer = 1;
  problem.site = model.edit_site(1);
  problem.weight_DF = model.weight(problem.site.weight_name);
  problem.keys_FN = random_matrix(kWidth, facts, seed).to(at::kFloat).to(at::kDouble);
  problem.residual_DN = random_matrix(kHidden, facts, seed + 1);
  problem.moment = editors::SecondMoment(random_spd(kWidth, 7));
  return problem;
}

/// ΔW of an editor that solves for it.
inline at::Tensor solved(const editors::Editor& editor, const editors::LayerProblem& problem) {
  return dynamic_cast<const editors::LocateEditor&>(editor).update(problem).delta.matrix();
}

}  // namespace emend::testing
