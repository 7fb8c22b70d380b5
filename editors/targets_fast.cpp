// The same optimisation for many facts at once. Their deltas do not interact, so the gradient of the sum of the losses
// holds each fact's own gradient; Adam's moments, the norm limit and the stop rule are kept for each fact.
//   B facts (slots) · R rows · M labelled tokens · K KL rows · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/fused_loss.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/models/config.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace emend::editors::detail {
namespace {

// δ of one site with Adam's moments, [B,D].
struct SiteState {
  at::Tensor delta_BD, first_BD, second_BD, limit_B1, initial_norm_B;
};

// What the host knows of a slot.
struct SlotState {
  int64_t iteration = 0;
  StopState stop;
};

// Traces of one problem while it runs.
struct TraceState {
  std::vector<std::vector<at::Tensor>> deltas, gradients;  // [site][step]
  std::vector<at::Tensor> nll_each;
};

// What the one read from the device brings, a row a slot.
struct StepFigures {
  std::vector<double> nll, kl, weight_decay, probability;
  std::vector<double> row_nll;
  std::vector<bool> row_hit;
};

class FastRun {
 public:
  FastRun(const models::Model& model, const std::vector<TargetProblem>& problems, const TargetSpec& spec,
          const EditContext& context, const FinishedFn& finished, std::vector<Target>& targets)
      : model_(model),
        problems_(problems),
        spec_(spec),
        context_(context),
        finished_(finished),
        targets_(targets),
        traces_(problems.size()) {}

  void enter(const std::vector<size_t>& members) {
    ActiveSet entering(model_, spec_, problems_, members);
    const size_t n_sites = spec_.sites.size();
    std::vector<SiteState> states(n_sites);
    for (size_t s = 0; s < n_sites; ++s) {
      const at::Tensor& initial_BD = entering.initial(s);
      states[s].delta_BD = at::zeros_like(initial_BD);
      states[s].first_BD = at::zeros_like(initial_BD);
      states[s].second_BD = at::zeros_like(initial_BD);
      states[s].initial_norm_B = initial_BD.norm(2, 1);
      states[s].limit_B1 = (states[s].initial_norm_B * spec_.clamp_norm_factor).unsqueeze(1);
    }
    for (const size_t member : members) {
      traces_[member].deltas.resize(n_sites);
      traces_[member].gradients.resize(n_sites);
    }
    const at::Tensor ones =
        at::ones({static_cast<int64_t>(members.size()), 1}, states[0].delta_BD.options().dtype(at::kDouble));
    set_.emplace(std::move(entering));
    sites_ = std::move(states);
    slots_.assign(members.size(), {});
    power1_B1_ = ones.clone();
    power2_B1_ = ones.clone();
  }

  [[nodiscard]] size_t active() const { return set_ ? set_->size() : 0; }

  // One iteration for every slot: loss, stop rule, update.
  void step() {
    context_.cancel.check("targets");
    const bool gradient =
        std::any_of(slots_.begin(), slots_.end(), [&](const SlotState& s) { return s.iteration < spec_.steps - 1; });
    std::vector<at::Tensor> leaves;
    for (const auto& site : sites_) leaves.push_back(site.delta_BD.detach().requires_grad_(gradient));
    ActiveSet::Hidden hidden;
    {
      const at::AutoGradMode mode(gradient);
      hidden = set_->forward(leaves);
    }
    LabelLoss labels;
    DivergenceLoss divergence;
    losses(hidden, gradient, labels, divergence);
    const StepFigures figures = read_figures(labels, divergence);

    std::vector<at::Tensor> grads_BD;
    const std::vector<int64_t> going_on = settle(figures);
    if (gradient && !going_on.empty()) grads_BD = gradients(leaves, hidden, labels, divergence);
    if (context_.trace) trace(figures, grads_BD, going_on);
    if (going_on.size() < slots_.size()) keep(going_on, grads_BD);
    if (!going_on.empty()) update(grads_BD);
  }

 private:
  void losses(const ActiveSet::Hidden& hidden, bool gradient, LabelLoss& labels, DivergenceLoss& divergence) {
    const ActiveIndex& index = set_->index();
    at::Tensor coefficient_M = index.label_weight_M * spec_.nll_factor;
    if (spec_.stop_rule == StopRule::kArgmax) {
      std::vector<double> scales;
      for (const auto& slot : slots_) scales.push_back(slot.stop.nll_factor_scale);
      const at::Tensor scale_B = devices::route_like(at::tensor(scales, coefficient_M.scalar_type()), coefficient_M,
                                                     devices::Purpose::kLabels);
      coefficient_M = coefficient_M * scale_B.index_select(0, index.label_slot_M);
    }
    coefficient_M_ = coefficient_M;
    labels = label_loss(model_, hidden.label_MD, index.label_id_M, coefficient_M, spec_.loss_layer.has_value(),
                        {gradient, spec_.stop_rule != StopRule::kLoss});
    if (hidden.kl_KD.defined())
      divergence = divergence_loss(model_, hidden.kl_KD, index.kl_weight_K, set_->kl_first_KV, gradient);
  }

  // Sums over rows and slots on the device, then one read.
  StepFigures read_figures(const LabelLoss& labels, const DivergenceLoss& divergence) const {
    const at::NoGradGuard no_grad;
    const ActiveIndex& index = set_->index();
    const auto slots = static_cast<int64_t>(slots_.size()), rows = static_cast<int64_t>(set_->rows().size());
    const at::Tensor& home = sites_[0].delta_BD;
    const auto zeros = [&](int64_t n) { return at::zeros({n}, home.options()); };
    const auto here = [&](const at::Tensor& x) {
      return devices::route_like(x, home, devices::Purpose::kLoss).to(home.scalar_type());
    };
    const auto index_here = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kInput); };
    const at::Tensor nll_M = here(labels.nll_M);
    const at::Tensor nll_B = zeros(slots).index_add(0, index_here(index.label_slot_M), nll_M * here(coefficient_M_));
    const at::Tensor row_of_label = index_here(index.label_row_M);
    const at::Tensor row_nll = zeros(rows).index_add(0, row_of_label, nll_M) / here(index.row_labels);
    const at::Tensor probability_B =
        zeros(slots).index_add(0, index_here(index.slot_of_row), (-row_nll).exp() * here(index.row_weight));
    at::Tensor kl_B = zeros(slots);
    if (divergence.kl_K.defined())
      kl_B = kl_B.index_add(0, index_here(index.kl_slot_K), here(divergence.kl_K) * here(index.kl_weight_K));
    at::Tensor decay_B = zeros(slots);
    for (const auto& site : sites_)
      decay_B = decay_B + here(site.delta_BD.norm(2, 1) / site.initial_norm_B.square() * spec_.weight_decay);
    std::vector<at::Tensor> parts = {nll_B, kl_B, decay_B, probability_B, row_nll};
    if (labels.hit_M.defined()) {
      const at::Tensor hits = zeros(rows).index_add(0, row_of_label, here(labels.hit_M));
      parts.push_back((hits >= here(index.row_labels)).to(home.scalar_type()));
    }
    const at::Tensor all = devices::to_host(at::cat(parts).to(at::kDouble)).contiguous();
    const double* values = all.const_data_ptr<double>();
    StepFigures figures;
    const auto take = [&](int64_t n) {
      std::vector<double> part(values, values + n);
      values += n;
      return part;
    };
    figures.nll = take(slots);
    figures.kl = take(slots);
    figures.weight_decay = take(slots);
    figures.probability = take(slots);
    figures.row_nll = take(rows);
    if (labels.hit_M.defined())
      for (const double hit : take(rows)) figures.row_hit.push_back(hit > 0.5);
    return figures;
  }

  // Applies the stop rule; finished facts get their target. Returns the slots that go on.
  std::vector<int64_t> settle(const StepFigures& figures) {
    std::vector<bool> all_argmax(slots_.size(), true), sampled_argmax(slots_.size(), true);
    for (size_t r = 0; r < figures.row_hit.size(); ++r) {
      const ActiveRow& row = set_->rows()[r];
      if (row.kl || figures.row_hit[r]) continue;
      all_argmax[row.slot] = false;
      if (row.sampled_context) sampled_argmax[row.slot] = false;
    }
    const bool hits_known = !figures.row_hit.empty();
    std::vector<int64_t> going_on;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      const size_t member = set_->members()[slot];
      Target& target = targets_[member];
      const LossTerms terms{figures.nll[slot] + figures.kl[slot] + figures.weight_decay[slot], figures.nll[slot],
                            figures.kl[slot], figures.weight_decay[slot], figures.probability[slot]};
      target.curve.push_back(terms);
      if (!std::isfinite(terms.loss)) {
        target.reason = "the loss is not a number at step " + std::to_string(slots_[slot].iteration);
        finish(slot, FactStatus::kFailed);
        continue;
      }
      const StopInputs inputs{terms.loss, terms.kl, hits_known && all_argmax[slot], hits_known && sampled_argmax[slot],
                              terms.probability};
      if (stop_now(spec_, inputs, slots_[slot].stop)) {
        finish(slot, FactStatus::kConverged);
      } else if (slots_[slot].iteration == spec_.steps - 1) {
        finish(slot, FactStatus::kMaxSteps);
      } else {
        going_on.push_back(static_cast<int64_t>(slot));
        ++slots_[slot].iteration;
        ++target.steps;
      }
    }
    return going_on;
  }

  void finish(size_t slot, FactStatus status) {
    Target& target = targets_[set_->members()[slot]];
    for (size_t s = 0; s < sites_.size(); ++s) {
      const auto row = static_cast<int64_t>(slot);
      target.initial_D.push_back(devices::to_host(set_->initial(s)[row]).clone());
      target.delta_D.push_back(devices::to_host(sites_[s].delta_BD[row]).clone());
      target.target_D.push_back(target.initial_D.back() + target.delta_D.back());
    }
    target.status = status;
    if (status == FactStatus::kMaxSteps) {
      target.status = unmet_status(target.delta_D[0].norm().item<double>(), target.initial_D[0].norm().item<double>(),
                                   spec_.clamp_norm_factor);
    }
    finished_(++done_, target.curve.back().loss);
  }

  // d(sum of all losses)/dδ: through the layers above, plus the weight decay's own.
  std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& leaves, const ActiveSet::Hidden& hidden,
                                    const LabelLoss& labels, const DivergenceLoss& divergence) const {
    std::vector<at::Tensor> outputs = {hidden.label_MD},
                            seeds = {devices::route_like(labels.grad_MD, hidden.label_MD, devices::Purpose::kHidden)};
    if (hidden.kl_KD.defined()) {
      outputs.push_back(hidden.kl_KD);
      seeds.push_back(devices::route_like(divergence.grad_KD, hidden.kl_KD, devices::Purpose::kHidden));
    }
    auto grads_BD = torch::autograd::grad(outputs, leaves, seeds);
    const at::NoGradGuard no_grad;
    for (size_t s = 0; s < sites_.size(); ++s) {
      const at::Tensor norm_B1 = sites_[s].delta_BD.norm(2, 1, true);
      const at::Tensor scale_B1 = spec_.weight_decay / (norm_B1 * sites_[s].initial_norm_B.square().unsqueeze(1));
      grads_BD[s] =
          grads_BD[s] + at::where(norm_B1 > 0, sites_[s].delta_BD * scale_B1, at::zeros_like(sites_[s].delta_BD));
    }
    return grads_BD;
  }

  void keep(const std::vector<int64_t>& going_on, std::vector<at::Tensor>& grads_BD) {
    if (going_on.empty()) {
      set_.reset();
      slots_.clear();
      return;
    }
    set_->keep(going_on);
    const at::Tensor index =
        devices::route_like(at::tensor(going_on, at::kLong), sites_[0].delta_BD, devices::Purpose::kInput);
    const auto select = [&](at::Tensor& x) {
      x = x.index_select(0, devices::route_like(index, x, devices::Purpose::kInput));
    };
    for (auto& site : sites_)
      for (at::Tensor* x : {&site.delta_BD, &site.first_BD, &site.second_BD, &site.limit_B1, &site.initial_norm_B})
        select(*x);
    for (auto& grad : grads_BD) select(grad);
    select(power1_B1_);
    select(power2_B1_);
    std::vector<SlotState> slots;
    for (const int64_t slot : going_on) slots.push_back(slots_[static_cast<size_t>(slot)]);
    slots_ = std::move(slots);
  }

  // Adam, then the projection onto the ball around t0. The powers are kept in float64: 1 − 0.999 loses five digits in
  // float32.
  void update(const std::vector<at::Tensor>& grads_BD) {
    const at::NoGradGuard no_grad;
    power1_B1_ = power1_B1_ * kBeta1;
    power2_B1_ = power2_B1_ * kBeta2;
    for (size_t s = 0; s < sites_.size(); ++s) {
      SiteState& site = sites_[s];
      const auto dtype = site.delta_BD.scalar_type();
      const at::Tensor rate_B1 =
          devices::route_like(spec_.lr / (1 - power1_B1_), site.delta_BD, devices::Purpose::kOptimiser).to(dtype);
      const at::Tensor root_B1 =
          devices::route_like((1 - power2_B1_).sqrt(), site.delta_BD, devices::Purpose::kOptimiser).to(dtype);
      site.first_BD = site.first_BD * kBeta1 + grads_BD[s] * (1 - kBeta1);
      site.second_BD = site.second_BD * kBeta2 + grads_BD[s].square() * (1 - kBeta2);
      const at::Tensor moved_BD =
          site.delta_BD - rate_B1 * site.first_BD / (site.second_BD.sqrt() / root_B1 + kEpsilon);
      const at::Tensor norm_B1 = moved_BD.norm(2, 1, true);
      site.delta_BD = at::where(norm_B1 > site.limit_B1, moved_BD * site.limit_B1 / norm_B1, moved_BD);
    }
  }

  void trace(const StepFigures& figures, const std::vector<at::Tensor>& grads_BD,
             const std::vector<int64_t>& going_on) {
    std::vector<std::vector<double>> nll(slots_.size());
    for (size_t r = 0; r < set_->rows().size(); ++r)
      if (!set_->rows()[r].kl) nll[set_->rows()[r].slot].push_back(figures.row_nll[r]);
    const std::set<int64_t> on(going_on.begin(), going_on.end());
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      const size_t member = set_->members()[slot];
      TraceState& trace = traces_[member];
      trace.nll_each.push_back(at::tensor(nll[slot], at::kDouble));
      const auto row = static_cast<int64_t>(slot);
      for (size_t s = 0; s < sites_.size(); ++s) {
        trace.deltas[s].push_back(devices::to_host(sites_[s].delta_BD[row]).clone());
        if (on.contains(row)) trace.gradients[s].push_back(devices::to_host(grads_BD[s][row]).clone());
      }
      if (!on.contains(row)) store_trace(targets_[member], trace);
    }
  }

  static void store_trace(Target& target, const TraceState& state) {
    TargetTrace trace;
    for (size_t s = 0; s < state.deltas.size(); ++s) {
      trace.delta_steps.push_back(at::stack(state.deltas[s]));
      trace.grad_steps.push_back(state.gradients[s].empty() ? at::zeros({0, target.delta_D[s].size(0)})
                                                            : at::stack(state.gradients[s]));
    }
    trace.nll_each = at::stack(state.nll_each);
    target.trace = std::move(trace);
  }

  const models::Model& model_;
  const std::vector<TargetProblem>& problems_;
  const TargetSpec& spec_;
  const EditContext& context_;
  const FinishedFn& finished_;
  std::vector<Target>& targets_;
  std::vector<TraceState> traces_;
  std::optional<ActiveSet> set_;
  std::vector<SiteState> sites_;
  std::vector<SlotState> slots_;
  at::Tensor power1_B1_, power2_B1_;  // β^t of each slot
  at::Tensor coefficient_M_;
  size_t done_ = 0;
};

// Tokens that a problem adds to every step.
int64_t suffix_tokens(const TargetProblem& problem) {
  int64_t tokens = static_cast<int64_t>(problem.kl_rows.size());
  for (const auto& row : problem.rows) tokens += static_cast<int64_t>(row.ids.size()) - row.lookup;
  return tokens;
}
int64_t longest_suffix(const TargetProblem& problem) {
  int64_t longest = 1;
  for (const auto& row : problem.rows) longest = std::max(longest, static_cast<int64_t>(row.ids.size()) - row.lookup);
  return longest;
}

// Tokens a step whose activations, kept for the gradient, fit in memory. On a CPU more than a few hundred tokens buy no
// speed.
int64_t token_budget(const models::Model& model, int first_layer) {
  const auto& config = model.config();
  const int64_t width = 8 * model.hidden_size() + 4 * config.mlp_width;
  const int64_t bytes =
      width * std::max(1, model.n_layers() - first_layer) * static_cast<int64_t>(c10::elementSize(model.dtype()));
  const c10::Device device =
      model.placement().layers.at(static_cast<size_t>(std::min(first_layer, model.n_layers() - 1)));
  int64_t memory = int64_t{512} << 20;
  if (!device.is_cpu()) {
    for (const auto& info : devices::visible_devices())
      if (info.device == device) memory = std::max(memory, info.free_bytes / 3);
  }
  return std::max<int64_t>(1, memory / std::max<int64_t>(1, bytes));
}

}  // namespace

std::vector<Target> optimise_fast(const models::Model& model, const std::vector<TargetProblem>& problems,
                                  const TargetSpec& spec, const EditContext& context, const FinishedFn& finished) {
  std::vector<Target> targets(problems.size());
  // Facts of similar length together: attention pads to the longest row.
  std::vector<size_t> order(problems.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return longest_suffix(problems[a]) > longest_suffix(problems[b]); });
  const int64_t budget = token_budget(model, spec.sites[0].layer);
  FastRun run(model, problems, spec, context, finished, targets);
  size_t next = 0;
  while (next < order.size()) {
    std::vector<size_t> members;
    int64_t tokens = 0;
    while (next < order.size()) {
      const int64_t more = suffix_tokens(problems[order[next]]);
      const bool full = context.max_facts_per_batch > 0
                            ? static_cast<int64_t>(members.size()) >= context.max_facts_per_batch
                            : !members.empty() && tokens + more > budget;
      if (full) break;
      members.push_back(order[next++]);
      tokens += more;
    }
    run.enter(members);
    while (run.active() > 0) run.step();
  }
  return targets;
}

}  // namespace emend::editors::detail
