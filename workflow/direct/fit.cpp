// Directions from the states of two sets of prompts.
//   A, B rows of the positive and the negative set · P all rows · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/directions.h>
#include <emend/workflow/inputs.h>

#include <algorithm>

namespace emend::workflow {
namespace {

constexpr int kNewtonSteps = 25;
constexpr double kProbeRidge = 0.01;     // relative to the mean squared state
constexpr double kSameDirection = 1e-6;  // relative singular value below which a direction is a mixture of the others

// What a model holds behind each block at the last token of each prompt: [P, D] float32 on the host, a layer each.
std::vector<at::Tensor> last_states(const models::Model& model, const std::vector<std::vector<int64_t>>& rows,
                                    const Handles& lent) {
  const at::NoGradGuard no_grad;
  const int n_layers = model.n_layers();
  std::vector<std::vector<at::Tensor>> parts(static_cast<size_t>(n_layers));
  in_batches(rows, "prompts", lent, [&](const models::TokenBatch& batch) {
    const auto last = batch.last_tokens();
    hooks::HookSession session(model.hooks());
    for (int l = 0; l < n_layers; ++l) session.capture({hooks::Site::kLayerOut, l}, {.tokens = last});
    session.attach();
    (void)model.forward(batch, {.logit_tokens = models::kNoTokens});
    for (int l = 0; l < n_layers; ++l)
      parts[l].push_back(devices::to_host(session.captured({hooks::Site::kLayerOut, l})).to(at::kFloat));
    session.finish();
  });
  return mapped(parts, [](const auto& layer) { return at::cat(layer); });
}

// First principal direction of rows about the origin, through their Gram matrix.
at::Tensor first_component(const at::Tensor& rows_PD) {
  const auto [values, vectors] = at::linalg_eigh(rows_PD.mm(rows_PD.t()));
  return rows_PD.t().mv(vectors.select(1, -1));
}

// Weights of a logistic regression with a ridge, by Newton's method in the span of the rows: f = K α, w = Xᵀ α.
at::Tensor probe(const at::Tensor& rows_PD, const at::Tensor& labels_P) {
  const at::Tensor kernel = rows_PD.mm(rows_PD.t());
  const double ridge =
      kProbeRidge * std::max(kernel.trace().item<double>() / static_cast<double>(rows_PD.size(0)), 1e-30);
  at::Tensor alpha = at::zeros_like(labels_P);
  for (int i = 0; i < kNewtonSteps; ++i) {
    const at::Tensor f = kernel.mv(alpha), p = at::sigmoid(f), s = (p * (1 - p)).clamp_min(1e-6);
    const at::Tensor next =
        at::linalg_solve(kernel + at::diag(ridge / s), (f + (labels_P - p) / s).unsqueeze(1)).squeeze(1);
    const bool settled = (next - alpha).norm().item<double>() <= 1e-8 * next.norm().item<double>();
    alpha = next;
    if (settled) break;
  }
  return rows_PD.t().mv(alpha);
}

// What the method finds, [D] float64 of any length and sign. `pairs`: row i of both sets belongs together.
at::Tensor found_by(const std::string& method, bool pairs, const at::Tensor& positive_AD,
                    const at::Tensor& negative_BD) {
  const at::Tensor high = positive_AD.mean(0), low = negative_BD.mean(0), gap = high - low;
  if (method == "mean") return gap;
  const at::Tensor middle = (high + low) / 2;
  const at::Tensor all = at::cat({positive_AD - middle, negative_BD - middle});
  if (method == "probe")
    return probe(all, at::cat({at::ones({positive_AD.size(0)}, at::kDouble),  //
                               at::zeros({negative_BD.size(0)}, at::kDouble)}));
  return first_component(pairs ? positive_AD - negative_BD : all);
}

// As long as the distance of the means along it, and pointing to the positive one.
at::Tensor spanning(const at::Tensor& along, const at::Tensor& positive_AD, const at::Tensor& negative_BD) {
  const at::Tensor unit = along / along.norm().clamp_min(1e-30);
  return unit * unit.dot(positive_AD.mean(0) - negative_BD.mean(0));
}

// Rows of a fold, or those outside it.
at::Tensor fold_of(const at::Tensor& rows, int64_t which, int64_t folds, bool inside) {
  const at::Tensor own = at::arange(rows.size(0)).remainder(folds) == which;
  return rows.index({inside ? own : ~own});
}

using Estimate = std::function<at::Tensor(const at::Tensor& positive_AD, const at::Tensor& negative_BD)>;

Separation separation_of(const Estimate& estimate, const at::Tensor& positive_AD, const at::Tensor& negative_BD,
                         int64_t folds) {
  std::vector<at::Tensor> high, low;
  for (int64_t k = 0; k < folds; ++k) {
    const at::Tensor a = fold_of(positive_AD, k, folds, false), b = fold_of(negative_BD, k, folds, false);
    const at::Tensor d = estimate(a, b), unit = d / d.norm().clamp_min(1e-30);
    const at::Tensor middle = (a.mean(0) + b.mean(0)) / 2;
    high.push_back((fold_of(positive_AD, k, folds, true) - middle).mv(unit));
    low.push_back((fold_of(negative_BD, k, folds, true) - middle).mv(unit));
  }
  const at::Tensor a = at::cat(high), b = at::cat(low), pairs = a.unsqueeze(1) - b.unsqueeze(0);
  const auto share = [](const at::Tensor& x) {
    return 100 * ((x > 0).to(at::kDouble) + 0.5 * (x == 0).to(at::kDouble)).mean().item<double>();
  };
  const double spread = std::sqrt((a.var() + b.var()).item<double>() / 2);
  return {(share(a) * static_cast<double>(a.numel()) + share(-b) * static_cast<double>(b.numel())) /
              static_cast<double>(a.numel() + b.numel()),
          share(pairs), (a.mean() - b.mean()).item<double>() / std::max(spread, 1e-30)};
}

// The part of `direction` that is orthogonal to those of the other directions at this layer.
at::Tensor apart(const at::Tensor& direction, const std::vector<Directions>& others, size_t layer) {
  std::vector<at::Tensor> columns;
  for (const auto& other : others)
    if (layer < other.layers.size() && other.layers[layer].defined()) {
      if (other.layers[layer].numel() != direction.numel())
        refuse({setting("apart_from"), "a direction of width " + std::to_string(other.layers[layer].numel()),
                "width " + std::to_string(direction.numel()) + ", as the model has", "name directions of this model"});
      columns.push_back(other.layers[layer].to(at::kDouble));
    }
  const at::Tensor basis = orthonormal_basis(columns);
  if (!basis.defined()) return direction;
  at::Tensor rest = direction - basis.mv(basis.t().mv(direction));
  // Of a mixture of the others only rounding is left, which points anywhere.
  if (rest.norm().item<double>() <= kSameDirection * direction.norm().item<double>()) rest.zero_();
  return rest;
}

void require_contrast(std::span<const ContrastPrompt> positive, std::span<const ContrastPrompt> negative,
                      const FitOptions& options) {
  const auto refuse = [](const std::string& got, const std::string& expected) {
    emend::refuse({"directions", got, expected, ""});
  };
  if (positive.size() < 2 || negative.size() < 2)
    refuse(std::to_string(positive.size()) + " and " + std::to_string(negative.size()) + " prompts",
           "at least two of each kind");
  if (options.folds < 2) refuse(std::to_string(options.folds) + " folds", "at least 2");
  if (options.method != "mean" && options.method != "pca" && options.method != "probe")
    refuse("method \"" + options.method + "\"", "mean, pca or probe");
}

}  // namespace

at::Tensor orthonormal_basis(const std::vector<at::Tensor>& columns) {
  std::vector<at::Tensor> units;
  for (const auto& column : columns)
    if (const double length = column.norm().item<double>(); length > 0)
      units.push_back(column.to(at::kDouble) / length);
  if (units.empty()) return {};
  const auto [u, s, v] = at::linalg_svd(at::stack(units, 1), /*full_matrices=*/false);
  return u.narrow(1, 0, (s > kSameDirection * s[0]).sum().item<int64_t>());
}

Directions fit_directions(const models::Model& model, std::span<const ContrastPrompt> positive,
                          std::span<const ContrastPrompt> negative, const FitOptions& options, const Handles& lent) {
  require_contrast(positive, negative, options);
  auto rows = prompt_rows(model, positive, options.chat);
  for (auto& row : prompt_rows(model, negative, options.chat)) rows.push_back(std::move(row));
  const auto states = last_states(model, rows, lent);
  const auto folds = std::min<int64_t>(options.folds, static_cast<int64_t>(std::min(positive.size(), negative.size())));
  const bool pairs = positive.size() == negative.size();  // parts of unequal sets may be equal, and are no pairs
  Directions directions;
  directions.method = options.method;
  directions.model = short_model_name(model.checkpoint());
  directions.fingerprint = model.fingerprint();
  directions.about = {{"model_hint", model.config().model_type},
                      {"positive", positive.size()},
                      {"negative", negative.size()},
                      {"folds", folds},
                      {"chat", options.chat && !model.tokenizer().chat_template().empty()}};
  if (options.method == "pca" && !pairs)
    lent.log.warning("direct.pca", std::to_string(positive.size()) + " and " + std::to_string(negative.size()) +
                                       " prompts make no pairs: the component is that of all states about the middle "
                                       "of both means, not of the pairs' differences");
  const auto border = std::ssize(positive);
  for (size_t l = 0; l < states.size(); ++l) {
    const at::Tensor all = states[l].to(at::kDouble), a = all.slice(0, 0, border), b = all.slice(0, border);
    const Estimate estimate = [&](const at::Tensor& high_AD, const at::Tensor& low_BD) {
      return spanning(apart(found_by(options.method, pairs, high_AD, low_BD), options.apart_from, l), high_AD, low_BD);
    };
    const at::Tensor direction = estimate(a, b);
    Separation figures = separation_of(estimate, a, b, folds);
    figures.size = direction.norm().item<double>() / std::max(all.norm(2, 1).mean().item<double>(), 1e-30);
    figures.origin = (b.mean(0).dot(direction) / direction.square().sum().clamp_min(1e-60)).item<double>();
    directions.layers.push_back(direction.to(at::kFloat));
    directions.separation.push_back(figures);
    if (figures.effect > directions.separation[directions.best].effect) directions.best = static_cast<int>(l);
  }
  if (std::ranges::all_of(directions.separation, [](const Separation& s) { return s.size < 1e-6; }))
    refuse({"directions", "two sets of prompts that end in the same states",
            options.apart_from.empty() ? "prompts that differ in one respect"
                                       : "prompts that differ in more than the directions to stay apart from",
            "check that the files differ"});
  return directions;
}

}  // namespace emend::workflow
