#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/null_space.h>

namespace emend::editors {

NullSpace NullSpace::of(const SecondMoment& moment, double threshold, const at::Tensor& like) {
  const at::NoGradGuard no_grad;
  const at::Tensor cov_FF = devices::route_like(moment.cov_FF(), like, devices::Purpose::kStatistics).to(at::kDouble);
  const auto [values_F, vectors_FF] = at::linalg_eigh(cov_FF);
  const at::Tensor kept_F = values_F.abs().lt(threshold);
  const int64_t rank = kept_F.sum().item<int64_t>();
  if (rank == 0)
    throw Error(ErrorClass::kNumeric,
                {"null space", "no eigenvalue of the second moment below " + std::to_string(threshold),
                 "a threshold above the smallest one, " + std::to_string(values_F.abs().min().item<double>()),
                 "raise nullspace_threshold; the largest eigenvalue is " +
                     std::to_string(values_F.abs().max().item<double>())});
  NullSpace space;
  space.of_kept_ = 2 * rank <= values_F.size(0);
  const at::Tensor columns = (space.of_kept_ ? kept_F : kept_F.logical_not()).nonzero().squeeze(1);
  space.basis_FB_ = vectors_FF.index_select(1, columns).contiguous();
  return space;
}

at::Tensor NullSpace::project(const at::Tensor& x_FN) const {
  const at::Tensor basis_FB = routed(basis_FB_, x_FN, x_FN.scalar_type());
  const at::Tensor part_FN = basis_FB.mm(basis_FB.t().mm(x_FN));
  return of_kept_ ? part_FN : x_FN - part_FN;
}

at::Tensor NullSpace::project_both(const at::Tensor& sum_FF) const {
  const at::Tensor projected_FF = project(project(sum_FF).t());
  return (projected_FF + projected_FF.t()) / 2;
}

const hparams::Schema<NullSpaceHparams>& null_space_schema() {
  using H = NullSpaceHparams;
  static const auto schema =
      hparams::Schema<H>("alphaedit")
          .include(shared_hparams_schema())
          .field("nullspace_threshold", &H::nullspace_threshold,
                 "directions of the second moment with a smaller eigenvalue may be written",
                 {.formula = "P = Σ e eᵀ over the eigenvectors e of C with eigenvalue < threshold", .above = 0})
          .field("L2", &H::L2, "weight of the size of the change",
                 {.formula = "(P(K Kᵀ + ΣKpKpᵀ)P + L2 I) X = P K Rᵀ, ΔW = Xᵀ", .above = 0})
          .unused("mom2_update_weight", "the second moment only says which directions may be written")
          .check("mom2_adjustment", "true: the null space is that of the second moment",
                 [](const H& h) { return h.mom2_adjustment; });
  return schema;
}

LocateRecipe null_space_recipe(const NullSpaceHparams& hparams, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(hparams, in);
  recipe.remembers_keys = true;
  // Layers' projectors with the moments they were made from: work saved, not state.
  const auto made = std::make_shared<std::map<int, std::pair<at::Tensor, NullSpace>>>();
  recipe.update = [made, threshold = hparams.nullspace_threshold, ridge = hparams.L2](const LayerProblem& problem) {
    const at::NoGradGuard no_grad;
    auto& [cov_FF, space] = (*made)[problem.layer];
    if (!cov_FF.is_same(problem.moment.cov_FF())) {
      space = NullSpace::of(problem.moment, threshold, problem.keys_FN);
      cov_FF = problem.moment.cov_FF();
    }
    const auto here = [&](const at::Tensor& x) { return routed(x, problem.keys_FN, problem.keys_FN.scalar_type()); };
    LayerProblem inside = problem;
    inside.keys_FN = space.project(problem.keys_FN);
    at::Tensor &keys_FP = inside.earlier.keys_FP, &sum_FF = inside.earlier.sum_FF;
    if (keys_FP.defined()) keys_FP = space.project(here(keys_FP));
    if (sum_FF.defined()) sum_FF = space.project_both(here(sum_FF));
    Preserved size;
    size.ridge = ridge;
    return closed_form(inside, size);
  };
  return recipe;
}

}  // namespace emend::editors
