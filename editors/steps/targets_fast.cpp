// The same optimisation for many facts at once. Their deltas do not interact, so the gradient of the sum of the losses
// holds each fact's own gradient; Adam's moments, the norm limit and the stop rule are kept for each fact. Facts that
// have finished make room for waiting ones, whose first step is a pass of their own.
// On GPUs there may be several lanes (lanes_for), each with facts and streams of its own. A step is queued on one lane
// before the last step of the next one is read, so all GPUs have work. On the host cores take parts of the facts.
//   B facts (slots) · M labelled tokens · K KL rows · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/target_budget.h>
#include <emend/editors/detail/target_engines.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>

namespace emend::editors::detail {
namespace {

// δ of one site with Adam's moments, [B,D].
struct SiteState {
  at::Tensor delta_BD, first_BD, second_BD, limit_B1, initial_norm_B;
};
constexpr at::Tensor SiteState::*kSiteFields[] = {&SiteState::delta_BD, &SiteState::first_BD, &SiteState::second_BD,
                                                  &SiteState::limit_B1, &SiteState::initial_norm_B};

// What the host knows of a slot.
struct SlotState {
  int64_t iteration = 0, last = 0;  // the last one only measures
  StopState stop;
};

// What the one read from the device brings, a row a slot.
struct StepFigures {
  std::vector<double> nll, kl, weight_decay, probability;
  std::vector<double> reading_nll;
  std::vector<bool> hit;
};

// What a step left on the devices.
struct QueuedStep {
  at::Tensor figures;  // StepFigures, one after the other
  bool hits = false;   // they end with hit
  std::vector<at::Tensor> grads_BD;
};

// TargetProblem::own_loss and TargetSpec::watched_loss of every slot with their gradients, each undefined or empty
// where there is none.
struct OwnLoss {
  at::Tensor loss_B, grad_BD;
  std::vector<at::Tensor> watched_grads_RD;
};

// Facts that are stepped together.
struct Group {
  ActiveSet set;
  std::vector<SiteState> sites;
  std::vector<SlotState> slots;
  at::Tensor power1_B1, power2_B1;  // β^t of each slot
  QueuedStep queued;
};

struct Lane {
  devices::StreamSet streams;
  std::optional<Group> group;
};

class FastRun {
 public:
  FastRun(const models::Model& model, const models::Model& upper, std::span<const TargetProblem> problems,
          const TargetSpec& spec, const EditContext& context, TargetProgress& told, std::span<Target> targets)
      : model_(model),
        upper_(upper),
        problems_(problems),
        spec_(spec),
        context_(context),
        told_(told),
        targets_(targets),
        traces_(problems.size(), TraceState(spec.sites.size())) {}

  void run() {
    const int n_lanes = lanes();
    TargetQueue queue(upper_, problems_, first_layer_of(spec_), context_.max_facts_per_batch, n_lanes);
    std::deque<Lane> lanes;
    const auto devices = n_lanes > 1 ? upper_.placement().layers : std::vector<c10::Device>{};
    for (int i = 0; i < n_lanes; ++i) lanes.push_back({devices::StreamSet(devices, i), std::nullopt});
    for (bool busy = true; busy;) {
      busy = false;
      for (auto& [streams, group] : lanes) {
        const c10::MultiStreamGuard guard(streams.streams());
        if (group) finish_step(group);
        admit(queue, group);
        if (group) begin_step(*group);
        busy = busy || group || !queue.empty();
      }
    }
  }

 private:
  [[nodiscard]] int lanes() const {
    if (context_.target_lanes > 0) return context_.target_lanes;
    const auto& layers = upper_.placement().layers;
    std::set<c10::DeviceIndex> gpus;
    for (size_t l = static_cast<size_t>(first_layer_of(spec_)); l < layers.size(); ++l)
      if (layers[l].is_cuda()) gpus.insert(layers[l].index());
    return lanes_for(gpus.size(), problems_.size());
  }

  // Waiting facts that there is room for. Their first step sets what the KL rows are compared with.
  void admit(TargetQueue& queue, std::optional<Group>& active) {
    const auto newcomers = queue.take(active ? active->set.members() : std::vector<size_t>{});
    if (newcomers.empty()) return;
    std::optional<Group> entering(make_group(newcomers));
    begin_step(*entering);
    finish_step(entering);
    if (!active) {
      active = std::move(entering);
    } else if (entering) {
      join(*active, std::move(*entering));
    }
  }

  [[nodiscard]] Group make_group(const std::vector<size_t>& members) {
    ActiveSet set(model_, upper_, spec_, problems_, members);
    const size_t n_sites = spec_.sites.size();
    std::vector<SiteState> states(n_sites);
    for (size_t s = 0; s < n_sites; ++s) {
      const at::Tensor& initial_BD = set.initial(s);
      states[s].delta_BD = at::zeros_like(initial_BD);
      states[s].first_BD = at::zeros_like(initial_BD);
      states[s].second_BD = at::zeros_like(initial_BD);
      states[s].initial_norm_B = initial_BD.norm(2, 1);
      states[s].limit_B1 = (states[s].initial_norm_B * spec_.clamp_norm_factor).unsqueeze(1);
    }
    for (size_t b = 0; b < members.size(); ++b)
      if (const auto row = static_cast<int64_t>(b); problems_[members[b]].start)
        states[0].delta_BD[row].copy_(problems_[members[b]].start(set.initial(0)[row]).detach());
    if (std::any_of(members.begin(), members.end(), [&](size_t m) { return problems_[m].kl_before_start; }))
      set.compare_with_unchanged();
    std::vector<SlotState> slots;
    for (const size_t member : members) slots.push_back({0, spec_.steps + problems_[member].more_steps - 1, {}});
    const at::Tensor ones =
        at::ones({static_cast<int64_t>(members.size()), 1}, states[0].delta_BD.options().dtype(at::kDouble));
    return {std::move(set), std::move(states), std::move(slots), ones.clone(), ones.clone(), {}};
  }

  // Facts are at different steps afterwards: all that counts steps is kept for each of them.
  static void join(Group& group, Group&& added) {
    const at::NoGradGuard no_grad;
    const auto join = [](at::Tensor& mine, const at::Tensor& other) { mine = at::cat({mine, other}); };
    group.set.append(std::move(added.set));
    for (size_t s = 0; s < group.sites.size(); ++s)
      for (const auto field : kSiteFields) join(group.sites[s].*field, added.sites[s].*field);
    group.slots.insert(group.slots.end(), added.slots.begin(), added.slots.end());
    join(group.power1_B1, added.power1_B1);
    join(group.power2_B1, added.power2_B1);
  }

  // Half of an iteration for every slot: loss and gradient. Nothing is read from the devices.
  void begin_step(Group& g) {
    context_.cancel.check("targets");
    const bool gradient =
        std::any_of(g.slots.begin(), g.slots.end(), [](const SlotState& s) { return s.iteration < s.last; });
    std::vector<at::Tensor> leaves;
    for (const auto& site : g.sites) leaves.push_back(site.delta_BD.detach().requires_grad_(gradient));
    ActiveSet::Hidden hidden;
    {
      const at::AutoGradMode mode(gradient);
      hidden = g.set.forward(leaves);
    }
    const ActiveIndex& index = g.set.index();
    at::Tensor coefficient_M = index.label_weight_M * spec_.nll_factor;  // what each label's nll counts
    if (spec_.stop_rule == StopRule::kArgmax) {
      const auto scales = mapped(g.slots, [](const auto& slot) { return slot.stop.nll_factor_scale; });
      const at::Tensor scale_B = devices::route_like(at::tensor(scales, coefficient_M.scalar_type()), coefficient_M,
                                                     devices::Purpose::kLabels);
      coefficient_M = coefficient_M * scale_B.index_select(0, index.label_slot_M);
    }
    const LabelLoss labels = label_loss(upper_, hidden.label_MD, index.label_id_M, coefficient_M, index.label_floor_M,
                                        spec_.loss_layer.has_value(), {gradient, spec_.stop_rule != StopRule::kLoss});
    DivergenceLoss divergence;
    if (hidden.kl_KD.defined())
      divergence = divergence_loss(upper_, hidden.kl_KD, index.kl_weight_K, g.set.kl_first_KV, gradient);
    OwnLoss own = own_loss(g);
    if (!hidden.watched_RD.empty()) add_watched(g, hidden.watched_RD, own);
    g.queued = {figures(g, coefficient_M, labels, divergence, own, spec_.weight_decay), labels.hit_M.defined(), {}};
    if (!gradient) return;
    g.queued.grads_BD = gradients(g, leaves, hidden, labels, divergence, own);
    if (own.grad_BD.defined()) g.queued.grads_BD[0] = g.queued.grads_BD[0] + own.grad_BD;
  }

  // The other half: stop rule, update. Nothing is left of a group whose facts have all finished.
  void finish_step(std::optional<Group>& group) {
    Group& g = *group;
    const StepFigures figures = read(g);
    std::vector<at::Tensor> grads_BD = std::move(g.queued.grads_BD);
    const std::vector<int64_t> going_on = settle(g, figures);
    if (context_.trace) trace(g, figures, grads_BD, going_on);
    if (going_on.empty()) {
      group.reset();
      return;
    }
    if (going_on.size() < g.slots.size()) keep(g, going_on, grads_BD);
    update(g, grads_BD);
  }

  // What problems add of δ alone; undefined where none does.
  [[nodiscard]] OwnLoss own_loss(const Group& g) const {
    OwnLoss own;
    const at::AutoGradMode with_grad(true);
    for (size_t slot = 0; slot < g.slots.size(); ++slot) {
      const auto& term = problems_[g.set.members()[slot]].own_loss;
      if (!term) continue;
      if (!own.loss_B.defined()) {
        own.grad_BD = at::zeros_like(g.sites[0].delta_BD);
        own.loss_B = at::zeros_like(g.sites[0].initial_norm_B);
      }
      const auto row = static_cast<int64_t>(slot);
      const at::Tensor delta_D = g.sites[0].delta_BD[row].detach().requires_grad_(true);
      const at::Tensor loss = term(delta_D, g.set.initial(0)[row]);
      own.grad_BD[row].copy_(torch::autograd::grad({loss}, {delta_D})[0]);
      own.loss_B[row].copy_(loss.detach());
    }
    return own;
  }

  // What the slots' states in the layers above add, with the slope at each of them.
  void add_watched(const Group& g, const std::vector<at::Tensor>& watched_RD, OwnLoss& own) const {
    const at::AutoGradMode with_grad(true);
    if (!own.loss_B.defined()) own.loss_B = at::zeros_like(g.sites[0].initial_norm_B);
    std::vector<at::Tensor> states;
    for (const auto& x_RD : watched_RD) {
      const at::Tensor x = x_RD.detach().to(work_dtype(model_));
      states.push_back(states.empty() ? x : devices::route_like(x, states[0], devices::Purpose::kLoss));
    }
    const at::Tensor all_LRD = at::stack(states).requires_grad_(true);
    std::vector<std::vector<int64_t>> rows;  // that are run for the rows of each slot's problem
    for (const size_t member : g.set.members()) rows.emplace_back(problems_[member].rows.size());
    for (const auto& reading : g.set.index().readings) rows[reading.slot][reading.number] = reading.row;
    at::Tensor sum;
    for (size_t slot = 0; slot < g.slots.size(); ++slot) {
      const at::Tensor states_LJD = all_LRD.index_select(1, devices::index_on(rows[slot], all_LRD));
      const at::Tensor loss = spec_.watched_loss(states_LJD) / watched_divisor(problems_[g.set.members()[slot]]);
      own.loss_B[static_cast<int64_t>(slot)].add_(
          devices::route_like(loss.detach(), own.loss_B, devices::Purpose::kLoss));
      sum = sum.defined() ? sum + loss : loss;
    }
    const auto grads = torch::autograd::grad({sum}, {all_LRD})[0].unbind();
    for (size_t l = 0; l < grads.size(); ++l)
      own.watched_grads_RD.push_back(
          devices::route_like(grads[l], watched_RD[l], devices::Purpose::kHidden).to(watched_RD[l].scalar_type()));
  }

  // Sums over rows and slots, on the device: what read() takes apart.
  static at::Tensor figures(const Group& g, const at::Tensor& coefficient_M, const LabelLoss& labels,
                            const DivergenceLoss& divergence, const OwnLoss& own, double weight_decay) {
    const at::NoGradGuard no_grad;
    const ActiveIndex& index = g.set.index();
    const auto slots = static_cast<int64_t>(g.slots.size()), readings = std::ssize(g.set.index().readings);
    const at::Tensor& home = g.sites[0].delta_BD;
    const auto zeros = [&](int64_t n) { return at::zeros({n}, home.options()); };
    // CUDA's index_add adds in any order; its index_put sorts first, so that a run can be repeated to the bit.
    const auto sum_at = [&](int64_t n, const at::Tensor& index, const at::Tensor& values) {
      return values.is_cuda() ? zeros(n).index_put({index}, values, /*accumulate=*/true)
                              : zeros(n).index_add(0, index, values);
    };
    const auto here = [&](const at::Tensor& x) {
      return devices::route_like(x, home, devices::Purpose::kLoss).to(home.scalar_type());
    };
    const auto index_here = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kInput); };
    const at::Tensor nll_M = here(labels.nll_M);
    const at::Tensor nll_B = sum_at(slots, index_here(index.label_slot_M), nll_M * here(coefficient_M));
    const at::Tensor reading_of_label = index_here(index.label_reading_M);
    const at::Tensor reading_nll = sum_at(readings, reading_of_label, nll_M) / here(index.reading_labels);
    const at::Tensor probability_B =
        sum_at(slots, index_here(index.slot_of_reading), (-reading_nll).exp() * here(index.reading_weight));
    at::Tensor kl_B = zeros(slots);
    if (divergence.kl_K.defined())
      kl_B = sum_at(slots, index_here(index.kl_slot_K), here(divergence.kl_K) * here(index.kl_weight_K));
    at::Tensor decay_B = zeros(slots);
    for (const auto& site : g.sites)
      decay_B = decay_B + here(site.delta_BD.norm(2, 1) / site.initial_norm_B.square() * weight_decay);
    if (own.loss_B.defined()) decay_B = decay_B + own.loss_B;
    std::vector<at::Tensor> parts = {nll_B, kl_B, decay_B, probability_B, reading_nll};
    if (labels.hit_M.defined()) {
      const at::Tensor hits = sum_at(readings, reading_of_label, here(labels.hit_M));
      parts.push_back((hits >= here(index.reading_labels)).to(home.scalar_type()));
    }
    return at::cat(parts).to(at::kDouble);
  }

  // The one read of a step.
  static StepFigures read(const Group& g) {
    const auto slots = static_cast<int64_t>(g.slots.size()), readings = std::ssize(g.set.index().readings);
    const at::Tensor all = devices::to_host(g.queued.figures).contiguous();
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
    figures.reading_nll = take(readings);
    if (g.queued.hits)
      for (const double hit : take(readings)) figures.hit.push_back(hit > 0.5);
    return figures;
  }

  // Applies the stop rule; finished facts get their target. Returns the slots that go on.
  std::vector<int64_t> settle(Group& g, const StepFigures& figures) {
    std::vector<bool> all_argmax(g.slots.size(), true), sampled_argmax(g.slots.size(), true),
        sampled(g.slots.size(), false);
    for (size_t r = 0; r < figures.hit.size(); ++r) {
      const ActiveIndex::Reading& reading = g.set.index().readings[r];
      if (reading.sampled_context) sampled[reading.slot] = true;
      if (figures.hit[r]) continue;
      all_argmax[reading.slot] = false;
      if (reading.sampled_context) sampled_argmax[reading.slot] = false;
    }
    const bool hits_known = !figures.hit.empty();
    std::vector<int64_t> going_on;
    for (size_t slot = 0; slot < g.slots.size(); ++slot) {
      const size_t member = g.set.members()[slot];
      Target& target = targets_[member];
      const LossTerms terms{figures.nll[slot] + figures.kl[slot] + figures.weight_decay[slot], figures.nll[slot],
                            figures.kl[slot], figures.weight_decay[slot], figures.probability[slot]};
      target.curve.push_back(terms);
      if (!std::isfinite(terms.loss)) {
        target.reason = "the loss is not a number at step " + std::to_string(g.slots[slot].iteration);
        finish(g, slot, FactStatus::kFailed);
        continue;
      }
      const StopInputs inputs{terms.loss, terms.kl, hits_known && all_argmax[slot],
                              hits_known && (sampled[slot] ? sampled_argmax : all_argmax)[slot], terms.probability};
      if (stop_now(spec_, inputs, g.slots[slot].stop)) {
        finish(g, slot, FactStatus::kConverged);
      } else if (g.slots[slot].iteration == g.slots[slot].last) {
        finish(g, slot, FactStatus::kMaxSteps);
      } else {
        going_on.push_back(static_cast<int64_t>(slot));
        ++g.slots[slot].iteration;
        ++target.steps;
      }
    }
    if (!going_on.empty()) told_.step(targets_[g.set.members()[static_cast<size_t>(going_on[0])]].curve.back());
    return going_on;
  }

  void finish(const Group& g, size_t slot, FactStatus status) {
    Target& target = targets_[g.set.members()[slot]];
    for (size_t s = 0; s < g.sites.size(); ++s) {
      const auto row = static_cast<int64_t>(slot);
      target.initial_D.push_back(devices::to_host(g.set.initial(s)[row]).clone());
      target.delta_D.push_back(devices::to_host(g.sites[s].delta_BD[row]).clone());
      target.target_D.push_back(target.initial_D.back() + target.delta_D.back());
    }
    target.status = status;
    if (status == FactStatus::kMaxSteps) {
      target.status = unmet_status(target.delta_D[0].norm().item<double>(), target.initial_D[0].norm().item<double>(),
                                   spec_.clamp_norm_factor);
    }
    told_.finished(target.curve.back().loss);
  }

  // d(sum of all losses)/dδ: through the layers above, plus the weight decay's own.
  std::vector<at::Tensor> gradients(const Group& g, const std::vector<at::Tensor>& leaves,
                                    const ActiveSet::Hidden& hidden, const LabelLoss& labels,
                                    const DivergenceLoss& divergence, const OwnLoss& own) const {
    std::vector<at::Tensor> outputs = {hidden.label_MD},
                            seeds = {devices::route_like(labels.grad_MD, hidden.label_MD, devices::Purpose::kHidden)};
    if (hidden.kl_KD.defined()) {
      outputs.push_back(hidden.kl_KD);
      seeds.push_back(devices::route_like(divergence.grad_KD, hidden.kl_KD, devices::Purpose::kHidden));
    }
    outputs.insert(outputs.end(), hidden.watched_RD.begin(), hidden.watched_RD.end());
    seeds.insert(seeds.end(), own.watched_grads_RD.begin(), own.watched_grads_RD.end());
    auto grads_BD = torch::autograd::grad(outputs, leaves, seeds);
    const at::NoGradGuard no_grad;
    for (size_t s = 0; s < g.sites.size(); ++s) {
      const at::Tensor norm_B1 = g.sites[s].delta_BD.norm(2, 1, true);
      const at::Tensor scale_B1 = spec_.weight_decay / (norm_B1 * g.sites[s].initial_norm_B.square().unsqueeze(1));
      grads_BD[s] =
          grads_BD[s] + at::where(norm_B1 > 0, g.sites[s].delta_BD * scale_B1, at::zeros_like(g.sites[s].delta_BD));
    }
    return grads_BD;
  }

  static void keep(Group& g, const std::vector<int64_t>& going_on, std::vector<at::Tensor>& grads_BD) {
    g.set.keep(going_on);
    const at::Tensor index = devices::index_on(going_on, g.sites[0].delta_BD);
    const auto select = [&](at::Tensor& x) {
      x = x.index_select(0, devices::route_like(index, x, devices::Purpose::kInput));
    };
    for (auto& site : g.sites)
      for (const auto field : kSiteFields) select(site.*field);
    for (auto& grad : grads_BD) select(grad);
    select(g.power1_B1);
    select(g.power2_B1);
    auto slots = mapped(going_on, [&](const int64_t slot) { return g.slots[static_cast<size_t>(slot)]; });
    g.slots = std::move(slots);
  }

  // Adam, then the projection onto the ball around t0. The powers are kept in float64: 1 − 0.999 loses five digits in
  // float32.
  void update(Group& g, const std::vector<at::Tensor>& grads_BD) {
    const at::NoGradGuard no_grad;
    g.power1_B1 = g.power1_B1 * kBeta1;
    g.power2_B1 = g.power2_B1 * kBeta2;
    for (size_t s = 0; s < g.sites.size(); ++s) {
      SiteState& site = g.sites[s];
      const auto dtype = site.delta_BD.scalar_type();
      const auto power1_B1 = devices::route_like(g.power1_B1, site.delta_BD, devices::Purpose::kOptimiser);
      const auto power2_B1 = devices::route_like(g.power2_B1, site.delta_BD, devices::Purpose::kOptimiser);
      if (devices::own_kernels(site.delta_BD)) {
        site.delta_BD = devices::ball_adam(site.delta_BD, grads_BD[s], site.first_BD, site.second_BD, power1_B1,
                                           power2_B1, site.limit_B1, {spec_.lr, kBeta1, kBeta2, kEpsilon});
        continue;
      }
      const at::Tensor rate_B1 = (spec_.lr / (1 - power1_B1)).to(dtype);
      const at::Tensor root_B1 = (1 - power2_B1).sqrt().to(dtype);
      site.first_BD = site.first_BD * kBeta1 + grads_BD[s] * (1 - kBeta1);
      site.second_BD = site.second_BD * kBeta2 + grads_BD[s].square() * (1 - kBeta2);
      const at::Tensor moved_BD =
          site.delta_BD - rate_B1 * site.first_BD / (site.second_BD.sqrt() / root_B1 + kEpsilon);
      const at::Tensor norm_B1 = moved_BD.norm(2, 1, true);
      site.delta_BD = at::where(norm_B1 > site.limit_B1, moved_BD * site.limit_B1 / norm_B1, moved_BD);
    }
  }

  void trace(const Group& g, const StepFigures& figures, const std::vector<at::Tensor>& grads_BD,
             const std::vector<int64_t>& going_on) {
    std::vector<std::vector<double>> nll(g.slots.size());
    for (size_t slot = 0; slot < nll.size(); ++slot) nll[slot].resize(problems_[g.set.members()[slot]].rows.size());
    for (size_t r = 0; r < figures.reading_nll.size(); ++r) {
      const ActiveIndex::Reading& reading = g.set.index().readings[r];
      nll[reading.slot][reading.number] = figures.reading_nll[r];
    }
    const std::set<int64_t> on(going_on.begin(), going_on.end());
    for (size_t slot = 0; slot < g.slots.size(); ++slot) {
      const size_t member = g.set.members()[slot];
      TraceState& trace = traces_[member];
      trace.nll_each.push_back(at::tensor(nll[slot], at::kDouble));
      const auto row = static_cast<int64_t>(slot);
      for (size_t s = 0; s < g.sites.size(); ++s) {
        trace.deltas[s].push_back(devices::to_host(g.sites[s].delta_BD[row]).clone());
        if (on.contains(row)) trace.gradients[s].push_back(devices::to_host(grads_BD[s][row]).clone());
      }
      if (!on.contains(row)) trace.store(targets_[member]);
    }
  }

  const models::Model& model_;
  const models::Model& upper_;  // runs the layers above; model_ or a copy of it
  std::span<const TargetProblem> problems_;
  const TargetSpec& spec_;
  const EditContext& context_;
  TargetProgress& told_;
  std::span<Target> targets_;
  std::vector<TraceState> traces_;
};

}  // namespace

void optimise_part(const models::Model& model, const models::Model& upper, std::span<const TargetProblem> problems,
                   const TargetSpec& spec, const EditContext& context, TargetProgress& told,
                   std::span<Target> targets) {
  FastRun(model, upper, problems, spec, context, told, targets).run();
}

}  // namespace emend::editors::detail
