// The published optimisation, step by step: the oracle. Plain on purpose; see targets_fast.cpp for the one that is
// used.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/products.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

namespace emend::editors::detail {
namespace {

constexpr int64_t kNoLabel = -100;

// All rows of a problem, padded to one width on the right.
struct PaddedRows {
  models::TokenBatch batch;
  at::Tensor labels;            // [J,T], kNoLabel where there is none
  at::Tensor floors;            // [J,T] of the labels; undefined where all are 0
  at::Tensor lengths;           // [J] labels in each row
  std::vector<int64_t> lookup;  // packed index of the looked-up token of every row
  std::vector<int64_t> added;   // of every token that δ is added to
  int64_t rewriting = 0, rows = 0, width = 0;
};

PaddedRows pad(const models::Model& model, const TargetProblem& problem) {
  auto all = mapped(problem.rows, [](const auto& row) { return &row; });
  for (const auto& row : problem.kl_rows) all.push_back(&row);
  PaddedRows padded;
  padded.rewriting = static_cast<int64_t>(problem.rows.size());
  padded.rows = static_cast<int64_t>(all.size());
  const auto ids = mapped(all, [](const auto* row) { return row->ids; });
  padded.batch = models::TokenBatch::padded(ids, pad_token(model));
  padded.width = padded.batch.longest();
  padded.labels = at::full({padded.rewriting, padded.width}, kNoLabel, at::kLong);
  padded.lengths = at::zeros({padded.rewriting}, at::kFloat);
  for (int64_t r = 0; r < padded.rows; ++r) {
    const TargetRow& row = *all[static_cast<size_t>(r)];
    padded.lookup.push_back(r * padded.width + row.lookup);
    padded.added.push_back(padded.lookup.back());
    for (const int64_t token : row.also) padded.added.push_back(r * padded.width + token);
    if (r >= padded.rewriting) continue;
    for (const auto& [token, id] : row.labels) padded.labels[r][token] = id;
    if (!row.floors.empty() && !padded.floors.defined())
      padded.floors = at::zeros({padded.rewriting, padded.width}, at::kDouble);
    for (size_t i = 0; i < row.floors.size(); ++i) padded.floors[r][row.labels[i].first] = row.floors[i];
    padded.lengths[r] = static_cast<double>(row.labels.size());
  }
  return padded;
}

// One variable, with Adam's moments and the value it is added to.
struct Variable {
  at::Tensor delta, first, second, initial;
};

// Adds the variable at every looked-up token, and the held vectors where they belong.
at::Tensor add_delta(const at::Tensor& output, Variable& variable, size_t site, const TargetProblem& problem,
                     const PaddedRows& padded) {
  if (!variable.initial.defined()) {
    const auto work_dtype = output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    variable.initial = output[padded.lookup[0]].detach().to(work_dtype).clone();
    const at::Tensor start =
        site == 0 && problem.start && !problem.kl_before_start ? problem.start(variable.initial) : at::Tensor();
    variable.delta = (start.defined() ? start.detach() : at::zeros_like(variable.initial)).requires_grad_(true);
    variable.first = at::zeros_like(variable.initial);
    variable.second = at::zeros_like(variable.initial);
  }
  const at::Tensor delta = variable.delta.to(output.scalar_type()).expand({std::ssize(padded.added), -1});
  at::Tensor changed = output.index_add(0, devices::index_on(padded.added, output), delta);
  for (const auto& held : problem.held) {
    const int64_t token = static_cast<int64_t>(held.row) * padded.width + held.token;
    const at::Tensor vector =
        devices::route_like(held.vectors_D[site], output, devices::Purpose::kDelta, devices::Dtype::kMatch);
    changed = changed.index_add(0, devices::index_on({token}, output), vector.unsqueeze(0));
  }
  return changed;
}

struct StepLoss {
  at::Tensor total, nll, kl, weight_decay, nll_each, probability;
  bool all_argmax = false, sampled_argmax = false;
};

class ReferenceRun {
 public:
  ReferenceRun(const models::Model& model, const TargetProblem& problem, const TargetSpec& spec)
      : model_(model), problem_(problem), spec_(spec), padded_(pad(model, problem)), variables_(spec.sites.size()) {}

  StepLoss forward(double nll_factor) {
    hooks::HookSession session(model_.hooks());
    for (size_t s = 0; s < variables_.size(); ++s)
      session.edit(spec_.sites[s],
                   [this, s](const at::Tensor& x) { return add_delta(x, variables_[s], s, problem_, padded_); });
    const hooks::SiteRef loss_site{hooks::Site::kLayerOut, spec_.loss_layer.value_or(0)};
    if (spec_.loss_layer) session.capture(loss_site, {.reference = true, .tokens = {}});
    for (const int layer : spec_.watched_layers)
      session.capture({hooks::Site::kLayerOut, layer}, {.reference = true, .tokens = {}});
    session.attach();
    const at::Tensor logits_NV = model_.forward(padded_.batch).needed_logits().to(work_dtype(model_));
    at::Tensor nll_logits_NV = logits_NV;
    if (spec_.loss_layer) nll_logits_NV = model_.project(session.captured(loss_site), true).to(work_dtype(model_));
    const at::Tensor watched = watched_loss(session);
    session.finish();
    StepLoss step = loss(logits_NV, nll_logits_NV, nll_factor);
    if (!watched.defined()) return step;
    const at::Tensor here = devices::route_like(watched, step.total, devices::Purpose::kLoss);
    step.weight_decay = step.weight_decay + here;
    step.total = step.total + here;
    return step;
  }

  std::vector<Variable>& variables() { return variables_; }

 private:
  [[nodiscard]] at::Tensor watched_loss(const hooks::HookSession& session) const {
    if (spec_.watched_layers.empty()) return {};
    const std::vector<int64_t> lookups(padded_.lookup.begin(), padded_.lookup.begin() + padded_.rewriting);
    std::vector<at::Tensor> states;
    for (const int layer : spec_.watched_layers) {
      const at::Tensor all_ND = session.captured({hooks::Site::kLayerOut, layer});
      const at::Tensor rows_JD = all_ND.index_select(0, devices::index_on(lookups, all_ND)).to(work_dtype(model_));
      states.push_back(states.empty() ? rows_JD : devices::route_like(rows_JD, states[0], devices::Purpose::kLoss));
    }
    return spec_.watched_loss(at::stack(states)) / watched_divisor(problem_);
  }

  StepLoss loss(const at::Tensor& logits_NV, const at::Tensor& nll_logits_NV, double nll_factor) {
    StepLoss step;
    const int64_t rewriting_tokens = padded_.rewriting * padded_.width;
    const at::Tensor log_p_JTV =
        at::log_softmax(nll_logits_NV, 1).narrow(0, 0, rewriting_tokens).view({padded_.rewriting, padded_.width, -1});
    const at::Tensor labels_JT = devices::route_like(padded_.labels, log_p_JTV, devices::Purpose::kLabels);
    const at::Tensor mask_JT = labels_JT != kNoLabel;
    const at::Tensor picked_JT = log_p_JTV.gather(2, labels_JT.clamp_min(0).unsqueeze(2)).squeeze(2);
    at::Tensor nll_JT = -picked_JT;
    if (padded_.floors.defined())
      nll_JT =
          (nll_JT - devices::route_like(padded_.floors, nll_JT, devices::Purpose::kLabels).to(nll_JT.scalar_type()))
              .clamp_min(0);
    step.nll_each =
        (nll_JT * mask_JT).sum(1) / devices::route_like(padded_.lengths, picked_JT, devices::Purpose::kLabels);
    const auto weights = mapped(problem_.rows, &TargetRow::weight);
    const at::Tensor weight_J =
        devices::route_like(at::tensor(weights, step.nll_each.scalar_type()), step.nll_each, devices::Purpose::kLabels);
    step.nll = (step.nll_each * weight_J).sum() * nll_factor;
    step.probability = (at::exp(-step.nll_each) * weight_J).sum().detach();
    note_argmax(step, log_p_JTV.detach(), picked_JT.detach(), mask_JT);

    step.kl = at::zeros_like(step.nll);
    if (!problem_.kl_rows.empty()) {
      const std::vector<int64_t> tokens(padded_.lookup.begin() + padded_.rewriting, padded_.lookup.end());
      const at::Tensor log_p_KV = at::log_softmax(logits_NV.index_select(0, devices::index_on(tokens, logits_NV)), 1);
      if (!kl_first_.defined()) kl_first_ = log_p_KV.detach().clone();
      const at::Tensor divergence =
          (log_p_KV.exp() * (log_p_KV - kl_first_)).sum() / static_cast<double>(tokens.size());
      step.kl = devices::route_like(divergence * spec_.kl_factor, step.nll, devices::Purpose::kLoss);
    }
    step.weight_decay = at::zeros_like(step.nll);
    for (const auto& v : variables_) {
      const at::Tensor term = v.delta.norm() / v.initial.norm().square() * spec_.weight_decay;
      step.weight_decay = step.weight_decay + devices::route_like(term, step.nll, devices::Purpose::kLoss);
    }
    if (problem_.own_loss)
      step.weight_decay =
          step.weight_decay + devices::route_like(problem_.own_loss(variables_[0].delta, variables_[0].initial),
                                                  step.nll, devices::Purpose::kLoss);
    step.total = step.nll + step.kl + step.weight_decay;
    return step;
  }

  void note_argmax(StepLoss& step, const at::Tensor& log_p_JTV, const at::Tensor& picked_JT,
                   const at::Tensor& mask_JT) const {
    if (spec_.stop_rule == StopRule::kLoss) return;
    const at::Tensor hit_JT = (picked_JT >= log_p_JTV.amax(2)).logical_or(mask_JT.logical_not());
    const at::Tensor hits = devices::to_host(hit_JT.all(1));
    step.all_argmax = step.sampled_argmax = true;
    bool sampled = false;
    for (int64_t j = 0; j < padded_.rewriting; ++j) {
      const bool hit = hits[j].item<bool>();
      step.all_argmax = step.all_argmax && hit;
      if (!problem_.rows[static_cast<size_t>(j)].sampled_context) continue;
      sampled = true;
      step.sampled_argmax = step.sampled_argmax && hit;
    }
    if (!sampled) step.sampled_argmax = step.all_argmax;
  }

  const models::Model& model_;
  const TargetProblem& problem_;
  const TargetSpec& spec_;
  PaddedRows padded_;
  std::vector<Variable> variables_;
  at::Tensor kl_first_;
};

// One Adam update, then the projection onto the ball around t0.
void update(Variable& v, const at::Tensor& gradient, int64_t step, const TargetSpec& spec) {
  const at::NoGradGuard no_grad;
  v.first = v.first * kBeta1 + gradient * (1 - kBeta1);
  v.second = v.second * kBeta2 + gradient * gradient * (1 - kBeta2);
  const double t = static_cast<double>(step);
  const at::Tensor first_hat = v.first / (1 - std::pow(kBeta1, t));
  const at::Tensor second_hat = v.second / (1 - std::pow(kBeta2, t));
  at::Tensor moved = v.delta.detach() - first_hat / (second_hat.sqrt() + kEpsilon) * spec.lr;
  const double limit = spec.clamp_norm_factor * v.initial.norm().item<double>();
  const double norm = moved.norm().item<double>();
  if (norm > limit) moved = moved * limit / norm;
  v.delta = moved.requires_grad_(true);
}

}  // namespace

Target optimise_reference(const models::Model& model, const TargetProblem& problem, const TargetSpec& spec,
                          const EditContext& context) {
  const at::AutoGradMode with_grad(true);
  const devices::PlainOperators plain;
  ReferenceRun run(model, problem, spec);
  Target target;
  StopState stop;
  const size_t n_sites = spec.sites.size();
  TraceState trace(n_sites);
  bool met = false;
  const int64_t steps = spec.steps + problem.more_steps;
  if (problem.start && problem.kl_before_start) {  // a pass without δ
    (void)run.forward(spec.nll_factor);
    Variable& first = run.variables()[0];
    first.delta = problem.start(first.initial).detach().requires_grad_(true);
  }
  for (int64_t it = 0; it < steps; ++it) {
    context.cancel.check("targets");
    const StepLoss step = run.forward(spec.nll_factor * stop.nll_factor_scale);
    const LossTerms terms{step.total.item<double>(), step.nll.item<double>(), step.kl.item<double>(),
                          step.weight_decay.item<double>(), step.probability.item<double>()};
    target.curve.push_back(terms);
    if (context.trace) {
      for (size_t s = 0; s < n_sites; ++s)
        trace.deltas[s].push_back(devices::to_host(run.variables()[s].delta.detach()).clone());
      trace.nll_each.push_back(devices::to_host(step.nll_each.detach()).clone());
    }
    if (!std::isfinite(terms.loss)) {
      target.status = FactStatus::kFailed;
      target.reason = "the loss is not a number at step " + std::to_string(it);
      break;
    }
    met = stop_now(spec, {terms.loss, terms.kl, step.all_argmax, step.sampled_argmax, terms.probability}, stop);
    if (met || it == steps - 1) break;
    const auto variables = mapped(run.variables(), &Variable::delta);
    const auto grads = torch::autograd::grad({step.total}, variables);
    for (size_t s = 0; s < n_sites; ++s) {
      if (context.trace) trace.gradients[s].push_back(devices::to_host(grads[s]).clone());
      update(run.variables()[s], grads[s], it + 1, spec);
    }
    ++target.steps;
  }
  for (size_t s = 0; s < n_sites; ++s) {
    const Variable& v = run.variables()[s];
    target.initial_D.push_back(devices::to_host(v.initial));
    target.delta_D.push_back(devices::to_host(v.delta.detach()));
    target.target_D.push_back(target.initial_D.back() + target.delta_D.back());
  }
  if (target.status != FactStatus::kFailed) {
    target.status = met ? FactStatus::kConverged
                        : unmet_status(target.delta_D[0].norm().item<double>(),
                                       target.initial_D[0].norm().item<double>(), spec.clamp_norm_factor);
  }
  if (context.trace) trace.store(target);
  return target;
}

}  // namespace emend::editors::detail
