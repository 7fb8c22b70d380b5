#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/curvature.h>
#include <emend/editors/steps/solver.h>

namespace emend::editors {

Curvature Curvature::with(const Curvature& other) const {
  return {inputs_FF + other.inputs_FF, gradients_DD + other.gradients_DD, tokens + other.tokens};
}

std::vector<LearningRow> text_learning_rows(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<LearningRow> learning;
  for (const auto& ids : rows) {
    if (ids.size() < 2) continue;
    learning.push_back({ids, {}});
    for (size_t t = 0; t + 1 < ids.size(); ++t)
      learning.back().labels.emplace_back(static_cast<int64_t>(t), ids[t + 1]);
  }
  return learning;
}

// Adds what one pass over some rows says of every layer.
static void add_pass(const models::Model& model, const std::vector<LearningRow>& rows, const std::vector<int>& layers,
                     std::vector<Curvature>& sums) {
  const LearningPass pass(model, rows, layers.front());
  std::vector<double> weight_R;  // each token's own loss
  std::vector<int64_t> tokens;
  for (size_t r = 0; r < rows.size(); ++r) {
    weight_R.push_back(static_cast<double>(rows[r].labels.size()));
    for (const auto& [token, id] : rows[r].labels) tokens.push_back(pass.batch().token(static_cast<int64_t>(r), token));
  }
  const auto signals = layer_signals(model, pass, layers, weight_R);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto gram = [&](const at::Tensor& x_NW) {
      const at::Tensor some = x_NW.index_select(0, devices::index_on(tokens, x_NW)).to(at::kDouble);
      return devices::to_host(some.t().mm(some), devices::Purpose::kStatistics);
    };
    const Curvature one = {gram(signals[i].keys_NF), gram(signals[i].grad_ND), static_cast<double>(tokens.size())};
    sums[i] = sums[i].inputs_FF.defined() ? sums[i].with(one) : one;
  }
}

std::vector<Curvature> curvature_of(const models::Model& model, const std::vector<LearningRow>& rows,
                                    const std::vector<int>& layers, const EditContext& context) {
  constexpr size_t kTokensAtOnce = 1024;  // each has logits over the vocabulary
  if (rows.empty()) refuse({"curvature", "no rows", "text of two tokens or more", "give a corpus"});
  std::vector<Curvature> sums(layers.size());
  std::vector<LearningRow> some;
  size_t tokens = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    some.push_back(rows[r]);
    tokens += rows[r].ids.size();
    if (tokens < kTokensAtOnce && r + 1 < rows.size()) continue;
    context.cancel.check("curvature");
    context.report("statistics", r, rows.size(), "curvature");
    add_pass(model, some, layers, sums);
    some.clear();
    tokens = 0;
  }
  return sums;
}

FlatDirections FlatDirections::of(const Curvature& curvature, double energy) {
  const at::NoGradGuard no_grad;
  const auto [in_F, in_FF] = at::linalg_eigh(curvature.inputs_FF / curvature.tokens);
  const auto [out_D, out_DD] = at::linalg_eigh(curvature.gradients_DD / curvature.tokens);
  const at::Tensor products_DF = at::outer(out_D, in_F);
  const at::Tensor sorted = std::get<0>(products_DF.flatten().sort(0, /*descending=*/true));
  const at::Tensor held = sorted.cumsum(0) / sorted.sum();
  const int64_t last = std::min<int64_t>(held.lt(energy).sum().item<int64_t>(), sorted.size(0) - 1);
  FlatDirections flat;
  flat.out_DD_ = out_DD;
  flat.in_FF_ = in_FF;
  flat.mask_DF_ = products_DF < sorted[last];
  return flat;
}

at::Tensor FlatDirections::project(const at::Tensor& x_DF) const {
  const at::NoGradGuard no_grad;
  const auto here = [&](const at::Tensor& x) { return routed(x, x_DF, x_DF.scalar_type()); };
  const at::Tensor out_DD = here(out_DD_), in_FF = here(in_FF_);
  return out_DD.mm(out_DD.t().mm(x_DF).mm(in_FF) * here(mask_DF_)).mm(in_FF.t());
}

}  // namespace emend::editors
