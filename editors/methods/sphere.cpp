// SPHERE: Energy-Regularized Sequential Model Editing on Hyperspheres (Liu et al., ICLR 2026).
//
//   1. ΔW as AlphaEdit, all layers.
//   2. U: the principal directions of W's rows, each scaled to length 1; as many as hold the share cumulative_ratio of
//      the eigenvalues of ŴᵀŴ/D, and one more.
//   3. ΔW ← ΔW(I − suppression_strength·U·Uᵀ).
//
//   D hidden width · F key width · R principal directions
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/null_space.h>
#include <emend/editors/registry.h>

namespace emend::editors {
namespace {

struct SphereHparams : NullSpaceHparams {
  double cumulative_ratio = 0.5;
  double suppression_strength = 0.5;
};

const hparams::Schema<SphereHparams>& sphere_schema() {
  static const auto schema =
      hparams::Schema<SphereHparams>("sphere")
          .include(null_space_schema())
          .field("cumulative_ratio", &SphereHparams::cumulative_ratio,
                 {.meaning = "share of the rows' spread that the principal directions hold; 0 disables the step",
                  .formula = "η",
                  .min = 0,
                  .max = 1})
          .field("suppression_strength", &SphereHparams::suppression_strength,
                 {.meaning = "how much of the change along them is taken away; 0 disables the step",
                  .formula = "α in ΔW(I − α U Uᵀ)",
                  .min = 0,
                  .max = 1})
          .check("rounds", one_round);
  return schema;
}

class Sphere final : public NullSpaceEditor {
 public:
  Sphere(const SphereHparams& h, const hparams::RawHparams& raw, const models::Model& model)
      : NullSpaceEditor("sphere", sphere_schema().dump(h), h, raw, model),
        ratio_(h.cumulative_ratio),
        strength_(h.suppression_strength) {}

  [[nodiscard]] bool settles() const override { return ratio_ > 0 && strength_ > 0; }
  [[nodiscard]] WeightDelta settle(const models::EditSite& site, const WeightDelta& solved,
                                   const at::Tensor& weight_DF) const override {
    const at::Tensor right_FR = solved.right_FR.to(at::kDouble);
    const at::Tensor weight = devices::route_like(weight_DF, right_FR, devices::Purpose::kSolve).to(at::kDouble);
    const at::Tensor rows_DF = weight / (weight.norm(2, 1, /*keepdim=*/true) + 1e-8);
    const auto [u, sigma_R, directions_RF] = at::linalg_svd(rows_DF, /*full_matrices=*/false);
    const at::Tensor share_R = sigma_R.square().cumsum(0) / sigma_R.square().sum();
    const int64_t count = std::min<int64_t>(share_R.le(ratio_).sum().item<int64_t>() + 1, sigma_R.size(0));
    const at::Tensor principal_RF = directions_RF.narrow(0, 0, count);
    return WeightDelta::factors(site, solved.left_DR,
                                right_FR - principal_RF.t().mm(principal_RF.mm(right_FR)) * strength_);
  }

 private:
  double ratio_, strength_;
};

std::unique_ptr<Editor> make(const SphereHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                             const Log&) {
  return std::make_unique<Sphere>(h, raw, model);
}

}  // namespace

EditorInfo make_sphere() {
  return editor_entry<SphereHparams>(
      "sphere", "AlphaEdit, weakened along the principal directions of the weight's rows",
      "Liu et al., Energy-Regularized Sequential Model Editing on Hyperspheres, ICLR 2026", sphere_schema(), make);
}

}  // namespace emend::editors
