#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/locate_parts.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/editors/steps/post_norm.h>
#include <emend/models/config.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <cmath>
#include <deque>
#include <numeric>
#include <set>

namespace emend::editors {
namespace {

// One column of the systems: a fact, or one window of its target.
struct Unit {
  const RenderedFact* rendered;
  size_t fact;  // index into the rendered facts
  size_t window;
  std::optional<size_t> target;  // once it is optimised
};

// δ of memit_targets stands before the norm of a family that has one behind the matrix.
bool acts_through_norm(const TargetSpec& spec, const models::Model& model) {
  return model.config().mlp_post_norm() && spec.sites.size() == 1 && spec.sites[0].site == hooks::Site::kMlpDownOut;
}

class BatchEdit {
 public:
  // `contexts` are sampled into where there are none.
  BatchEdit(const Editor& editor, const LocateRecipe& recipe, const LocateMemory& memory,
            std::optional<ContextTemplates>& contexts, models::Model& model, const EditContext& context)
      : recipe_(recipe),
        memory_(memory),
        kept_contexts_(contexts),
        model_(model),
        context_(context),
        transaction_(model, context.transaction),
        through_norm_(acts_through_norm(recipe.targets, model)),
        carries_(memory.carried),
        result_{.editor = editor.name(), .hparams = editor.hparams(), .engine = context.engine} {}

  EditResult run(std::span<const datasets::Fact> facts) {
    const bool written_once = recipe_.windows.size > 0 || recipe_.settle;
    EMEND_CHECK(recipe_.windows.size == 0 || !recipe_.merge_equal_keys, "windows of merged facts");
    EMEND_CHECK(recipe_.windows.size == 0 || !recipe_.optimise, "windows of targets that hang on each other");
    EMEND_CHECK(recipe_.rounds.count <= 1 || !written_once, "rounds of an editor that writes a batch once");
    if (facts.empty()) return std::move(result_);
    prepare(facts);
    std::vector<size_t> wanted(batch_.rendered.size());
    std::iota(wanted.begin(), wanted.end(), size_t{0});
    std::vector<const Unit*> first;
    for (int64_t round = 0; round < recipe_.rounds.count && !wanted.empty(); ++round) {
      optimise(wanted);
      if (round == 0) first = columns_;
      if (!columns_.empty()) insert();
      if (round + 1 < recipe_.rounds.count) wanted = untaken();
    }
    columns_ = std::move(first);  // all that were written
    return std::move(result_);
  }

  /// Keys of every layer with the model as it is now.
  std::vector<at::Tensor> keys_of_all_layers() {
    const auto sites = mapped(layers(), [](int layer) { return hooks::SiteRef{hooks::Site::kMlpDownIn, layer}; });
    std::vector<at::Tensor> keys_FN;
    for (const auto& keys_PF : collect_at_lookup(model_, all_rows(), sites, context_))
      keys_FN.push_back(outside(devices::to_host(average_keys(keys_PF, contexts_).t().to(context_.solve_dtype)),
                                memory_.shared[keys_FN.size()]));
    return keys_FN;
  }

  /// The keys of this batch (and what they were to give) join those of earlier ones.
  void remember() {
    if (!recipe_.keys_as_written) return memory_.keys.add(keys_of_all_layers());
    if (recipe_.values_as_given) take_given_values();
    memory_.keys.add(written_keys_, recipe_.compensates ? wanted_values_ : std::vector<at::Tensor>{});
  }

  /// What was written stays; the memory that the next batch is to find.
  LocateMemory commit() noexcept {
    memory_.carried = std::move(carries_);
    transaction_.commit();
    return std::move(memory_);
  }

 private:
  [[nodiscard]] std::vector<int> layers() const { return {recipe_.common.layers.begin(), recipe_.common.layers.end()}; }

  void prepare(std::span<const datasets::Fact> facts) {
    if (recipe_.keeps_originals() && memory_.originals.empty())
      for (const int layer : layers()) {
        const std::string name = model_.edit_site(layer).weight_name;
        memory_.originals.emplace(name,
                                  devices::to_host(model_.weight(name).detach(), devices::Purpose::kSnapshot).clone());
      }
    if (recipe_.modifiers.suit > 0 && !memory_.shared.at(0).defined())
      memory_.shared = names_share(model_, layers(), recipe_.modifiers.suit, context_);
    batch_ =
        begin_batch(model_, facts, recipe_.common, ContextGrouping::kPlainApart, context_, kept_contexts_, result_);
    contexts_ = *result_.contexts;
  }

  // Facts of the columns that the model does not say yet, and those that share a target with one of them.
  std::vector<size_t> untaken() {
    constexpr size_t kRowsAtOnce = 256;
    const PhaseTimer timer(result_, "targets");
    std::set<size_t> targets;
    for (size_t begin = 0; begin < columns_.size(); begin += kRowsAtOnce) {
      const size_t n = std::min(kRowsAtOnce, columns_.size() - begin);
      std::vector<LearningRow> rows;
      for (size_t i = 0; i < n; ++i)
        rows.push_back(learning_row(*columns_[begin + i]->rendered, Objective::kTargetNew));
      const auto nll = LearningPass(model_, rows, 0, context_.engine).measure().nll;
      for (size_t i = 0; i < n; ++i)
        if (std::exp(-nll[i]) < recipe_.rounds.probability) targets.insert(*columns_[begin + i]->target);
    }
    std::vector<size_t> facts;
    for (const Unit* unit : columns_)
      if (targets.contains(*unit->target)) facts.push_back(unit->fact);
    if (!facts.empty())
      context_.log.info("edit.round", std::to_string(facts.size()) + " of " + std::to_string(columns_.size()) +
                                          " facts have not taken and are edited again");
    return facts;
  }

  // Every fact, or every window of its target, is a unit: a target and a key of its own.
  void make_units(const std::vector<size_t>& facts) {
    units_.emplace_back();
    for (const size_t i : facts) {
      const RenderedFact& fact = batch_.rendered[i];
      const auto windows = cut_target(static_cast<int64_t>(fact.target_ids.size()), recipe_.windows);
      for (size_t w = 0; w < windows.size(); ++w)
        units_.back().push_back(
            {windows.size() == 1 ? &fact : &parts_.emplace_back(window_of(fact, windows[w])), i, w, {}});
    }
  }

  // First windows of all facts, then second ones, …; the windows of a fact whose target failed are left out.
  void optimise(const std::vector<size_t>& facts) {
    const PhaseTimer timer(result_, "targets");
    make_units(facts);
    columns_.clear();
    EditTransaction rewound(model_);  // gives the present weights back
    if (recipe_.rewinds_targets)
      for (const auto& [name, weight] : memory_.originals) write_weight(name, weight, rewound);
    std::vector<std::vector<const Target*>> of_fact(batch_.rendered.size());
    for (size_t round = 0;; ++round) {
      std::vector<Unit*> now;
      for (auto& unit : units_.back())
        if (unit.window == round && (round == 0 || goes_on(*of_fact[unit.fact].back()))) now.push_back(&unit);
      if (now.empty()) break;
      optimise_round(now);
      for (const Unit* unit : now) of_fact[unit->fact].push_back(&targets_[*unit->target]);
    }
    for (const size_t i : facts) note_outcome(i, of_fact[i]);
    for (const Unit& unit : units_.back())
      if (const auto& windows = of_fact[unit.fact];
          unit.target && targets_[*unit.target].status != FactStatus::kFailed &&
          result_.outcomes[batch_.places[unit.fact]].status != FactStatus::kFailed &&
          (windows.size() == 1 || goes_on(*windows.back())))  // of an answer of several windows all or none
        columns_.push_back(&unit);
    for (const size_t i : facts)
      if (const auto& why = of_fact[i].back()->withheld; !why.empty()) {
        result_.outcomes[batch_.places[i]].status = FactStatus::kFailed;
        result_.outcomes[batch_.places[i]].reason = why;
      }
  }

  static bool goes_on(const Target& target) { return target.status != FactStatus::kFailed && target.withheld.empty(); }

  // Of the last round that succeeded; steps and curve of all.
  void note_outcome(size_t fact, const std::vector<const Target*>& windows) {
    Target target = summarise(windows);
    FactOutcome& noted = result_.outcomes[batch_.places[fact]];
    if (units_.size() > 1) {
      if (target.status == FactStatus::kFailed) return;
      target.steps += noted.steps;
      target.curve.insert(target.curve.begin(), noted.curve.begin(), noted.curve.end());
    }
    noted = make_outcome(model_.tokenizer(), batch_.rendered[fact], target);
  }

  void optimise_round(const std::vector<Unit*>& now) {
    const auto facts = mapped(now, [](const Unit* unit) { return unit->rendered; });
    detail::Grouped grouped = detail::group_facts(facts, recipe_.merge_equal_keys, recipe_.targets.steps);
    for (size_t i = 0; i < now.size(); ++i)  // the earlier windows of a fact stand right before
      for (const Unit* earlier = now[i] - now[i]->window; earlier != now[i]; ++earlier)
        hold(grouped.problems[grouped.problem_of_fact[i]], *earlier->rendered, targets_[*earlier->target],
             recipe_.modifiers.nas);
    auto targets = recipe_.optimise
                       ? recipe_.optimise(model_, grouped.problems, keys_of(grouped, facts), recipe_.targets, context_)
                       : optimise_targets(model_, grouped.problems, recipe_.targets, context_);
    if (recipe_.modifiers.nas) anchor(grouped.problems, targets);
    auto goals = mapped(targets, [](const Target& target) {
      return target.target_D.empty() ? at::Tensor() : target.target_D[0];  // a failed one may have none
    });
    if (through_norm_) goals = streams(grouped.problems, goals);
    if (recipe_.replays_forward)
      replay(grouped.problems, goals);
    else
      for (const auto& goal_D : goals) goals_.push_back({goal_D});
    for (size_t i = 0; i < now.size(); ++i) {
      const size_t problem = grouped.problem_of_fact[i];
      now[i]->target = targets_.size() + problem;
      if (!context_.trace) continue;
      std::string prefix = "z." + std::to_string(now[i]->rendered->case_id) + ".";
      if (now[i]->window > 0) prefix += "window." + std::to_string(now[i]->window) + ".";
      record_target(*context_.trace, prefix, grouped.problems[problem], targets[problem], recipe_.targets);
    }
    for (auto& target : targets) targets_.push_back(std::move(target));
  }

  // Of each problem, in the targets' layer; facts that share a problem share their key.
  [[nodiscard]] at::Tensor keys_of(const detail::Grouped& grouped,
                                   const std::vector<const RenderedFact*>& facts) const {
    std::vector<PromptRow> rows;
    for (size_t i = 0, next = 0; i < facts.size(); ++i) {
      if (grouped.problem_of_fact[i] != next) continue;
      rows.insert(rows.end(), facts[i]->rows.begin(), facts[i]->rows.end());
      ++next;
    }
    const auto keys_PF =
        collect_at_lookup(model_, rows, {{hooks::Site::kMlpDownIn, recipe_.targets.sites[0].layer}}, context_)[0];
    return devices::to_host(average_keys(keys_PF, contexts_).t().to(context_.solve_dtype));
  }

  // Norm-Anchor Scaling (modifiers.h): the targets with the MLP's part at the norm of the unedited model's.
  void anchor(const std::vector<TargetProblem>& problems, std::vector<Target>& targets) {
    const hooks::SiteRef site = recipe_.targets.sites[0];
    std::vector<at::Tensor> mlp;
    if (site.site == hooks::Site::kLayerOut) {
      const at::Tensor mlp_ND =
          collect_at_lookup(model_, detail::plain_rows(problems), {{hooks::Site::kMlpOut, site.layer}}, context_)[0];
      mlp = devices::to_host(mlp_ND).to(at::kFloat).unbind(0);
    } else {
      for (const auto& target : targets) mlp.push_back(target.initial_D[0]);
    }
    if (memory_.nas_norm == 0) memory_.nas_norm = recipe_.modifiers.nas_norm;
    detail::anchor_targets(mlp, memory_.nas_norm, targets);
  }

  // Forward replay: what the higher rewritten layers give where the first one gives the target.
  void replay(const std::vector<TargetProblem>& problems, const std::vector<at::Tensor>& goals) {
    const at::Tensor first_ND = through_norm_ ? at::stack(goals).to(at::kFloat) : at::stack(goals);
    std::vector<hooks::SiteRef> sites;
    for (size_t l = 0; l < recipe_.common.layers.size(); ++l) sites.push_back(measured(l));
    auto values = collect_with(model_, detail::plain_rows(problems), sites[0], first_ND, sites, context_);
    values[0] = first_ND;
    for (auto& value_ND : values) value_ND = devices::to_host(value_ND).to(at::kDouble);
    for (int64_t i = 0; i < first_ND.size(0); ++i)
      goals_.push_back(mapped(values, [i](const at::Tensor& value_ND) { return value_ND[i]; }));
  }

  // Where residuals are measured: where δ was, or in the stream behind the norm that it acted through (post_norm.h);
  // with forward replay at the output of the layer itself.
  [[nodiscard]] hooks::SiteRef measured(size_t index = 0) const {
    if (recipe_.replays_forward) return {hooks::Site::kLayerOut, static_cast<int>(recipe_.common.layers[index])};
    const hooks::SiteRef site = recipe_.targets.sites[0];
    return through_norm_ ? hooks::SiteRef{hooks::Site::kLayerOut, site.layer} : site;
  }

  // The layer's outputs that the targets stand for.
  [[nodiscard]] std::vector<at::Tensor> streams(const std::vector<TargetProblem>& problems,
                                                const std::vector<at::Tensor>& targets) const {
    const PostNorm norm(model_, measured().layer);
    auto sites = norm.sites();
    sites.push_back(measured());
    auto values = collect_at_lookup(model_, detail::plain_rows(problems), sites, context_);
    for (auto& value_ND : values) value_ND = devices::to_host(value_ND).to(at::kDouble);
    const at::Tensor output_ND = values.back();
    values.pop_back();
    return norm.layer_output(values, output_ND, at::stack(targets).to(at::kDouble)).unbind(0);
  }

  // What to add to the matrix's output so that the layer's output moves by the residual, as nearly as the norm allows.
  at::Tensor before_norm(LayerWalk& walk, const LayerProblem& problem, const std::vector<size_t>& plain) {
    const PostNorm norm(model_, problem.layer);
    std::vector<at::Tensor> values;
    for (const auto& site : norm.sites())
      values.push_back(devices::route_like(walk.values(site, plain), problem.residual_DN, devices::Purpose::kKeys)
                           .to(problem.dtype));
    return norm.change_for(values, norm.apply(values) + problem.residual_DN.t()).t().contiguous();
  }

  [[nodiscard]] std::vector<PromptRow> all_rows() const {
    std::vector<PromptRow> rows;
    for (const Unit* unit : columns_) rows.insert(rows.end(), unit->rendered->rows.begin(), unit->rendered->rows.end());
    return rows;
  }

  // One column a unit.
  [[nodiscard]] at::Tensor target_matrix(size_t index = 0) const {
    return at::stack(mapped(columns_, [&](const Unit* unit) { return goals_[*unit->target][index]; }), 1);
  }

  void insert() {
    const PhaseTimer timer(result_, "insert");
    const at::NoGradGuard no_grad;
    const std::vector<const Unit*> all = columns_;
    for (int64_t pass = 0; pass < recipe_.passes.count; ++pass) {
      columns_ = all;
      select(pass);
      if (columns_.empty()) break;
      write_layers();
    }
    columns_ = all;
    if (recipe_.settle) settle();
  }

  // Leaves out the facts whose residual is outside the recipe's limits.
  void select(int64_t pass) {
    const Passes& rule = recipe_.passes;
    if (rule.above < 0 && std::isinf(rule.below)) return;
    auto plain = mapped(columns_, [](const Unit* unit) { return unit->rendered->rows[0]; });
    const at::Tensor current_ND = collect_at_lookup(model_, plain, {measured()}, context_)[0];
    const at::Tensor targets_DN = target_matrix();
    const at::Tensor residual_N =
        (targets_DN - devices::route_like(current_ND, targets_DN, devices::Purpose::kKeys).t()).norm(2, 0);
    std::vector<const Unit*> chosen;
    for (size_t n = 0; n < columns_.size(); ++n) {
      const double residual = residual_N[static_cast<int64_t>(n)].item<double>();
      if (residual > rule.above && residual < rule.below) {
        chosen.push_back(columns_[n]);
      } else if (pass == 0 && !(residual < rule.below)) {
        auto& outcome = result_.outcomes[batch_.places[columns_[n]->fact]];
        outcome.status = FactStatus::kFailed;
        outcome.reason = "the target is " + std::to_string(residual) + " away from the current value, the limit is " +
                         std::to_string(rule.below);
      }
    }
    columns_ = std::move(chosen);
  }

  // All weights back, then the settled changes.
  void settle() {
    transaction_.restore();
    for (size_t i = 0; i < result_.deltas.size(); ++i) {
      const models::EditSite site = model_.edit_site(result_.deltas[i].layer);
      const at::Tensor weight_DF = oriented(model_, site);
      WeightDelta settled = recipe_.settle(site, result_.deltas[i], weight_DF);
      if (!unsettled_.empty()) settled = modified(recipe_.modifiers, unsettled_[i], settled);
      const at::Tensor before_DF = context_.trace ? weight_DF.clone() : at::Tensor();
      const ApplyReport report = apply_delta(settled, transaction_);
      note_write(result_.layers[i], report);
      if (context_.trace)
        record(context_, "layer." + std::to_string(site.layer) + ".weight_change", oriented(model_, site) - before_DF);
      result_.deltas[i] = std::move(settled);
    }
  }

  // In the place of what the batch's keys asked for: what the written weights give.
  void take_given_values() {
    for (size_t i = 0; i < written_keys_.size(); ++i) {
      const at::Tensor &keys_FN = written_keys_[i], weight_DF = oriented(model_, model_.edit_site(layers()[i]));
      wanted_values_[i] =
          devices::route_like(weight_DF, keys_FN, devices::Purpose::kSolve).to(keys_FN.scalar_type()).mm(keys_FN);
    }
  }

  void write_layers() {
    const at::Tensor targets_DN = target_matrix();
    LayerWalk walk(model_, all_rows(), context_);
    std::vector<size_t> plain;
    for (size_t n = 0; n < columns_.size(); ++n) plain.push_back(n * contexts_.size());
    const auto& layers = recipe_.common.layers;
    for (size_t i = 0; i < layers.size(); ++i) {
      context_.report("insert", i, layers.size(), "layer " + std::to_string(layers[i]));
      write_layer(walk, i, recipe_.replays_forward ? target_matrix(i) : targets_DN, plain);
    }
    context_.report("insert", layers.size(), layers.size());
    detail::warn_if_little(most_reached_, batch_, result_, context_.log);
  }

  void write_layer(LayerWalk& walk, size_t index, const at::Tensor& targets_DN, const std::vector<size_t>& plain) {
    const auto& layers = recipe_.common.layers;
    LayerProblem problem;
    problem.layer = static_cast<int>(layers[index]);
    problem.index = index;
    problem.site = model_.edit_site(problem.layer);
    problem.dtype = context_.solve_dtype;
    problem.weight_DF = oriented(model_, problem.site);
    if (recipe_.common.mom2_adjustment) problem.moment = context_.statistics->get(problem.layer);

    walk.advance_to(problem.layer);
    const at::Tensor keys_PF = walk.keys();
    const at::Tensor current_ND = walk.values(measured(index), plain);
    const at::Tensor home = solve_home(model_, problem.site);
    const auto at_home = [&](const at::Tensor& x) {
      return devices::route_like(x, home, devices::Purpose::kKeys).to(problem.dtype);
    };
    problem.keys_FN = at_home(average_keys(keys_PF, contexts_)).t().contiguous();
    memory_.join(recipe_, problem);
    const at::Tensor remaining_DN = at_home(targets_DN) - at_home(current_ND).t();
    problem.residual_DN = remaining_DN / detail::divisor(recipe_.spread, index, layers.size());
    if (through_norm_) problem.residual_DN = before_norm(walk, problem, plain);
    if (context_.trace) detail::trace_problem(context_, problem, all_rows(), keys_PF, current_ND, remaining_DN);

    if (recipe_.keys_as_written && written_keys_.size() < layers.size()) {
      written_keys_.push_back(problem.keys_FN);
      wanted_values_.push_back(at_home(problem.weight_DF).mm(problem.keys_FN) + problem.residual_DN);
    }

    LayerUpdate update = recipe_.update(problem);
    carries_[index] = update.carries;
    if (recipe_.modifiers.any_update()) {
      problem.earlier = memory_.keys.layer(index);
      if (recipe_.settle)
        unsettled_.push_back(problem);
      else
        update.delta = modified(recipe_.modifiers, problem, update.delta);
    }
    const at::Tensor before_DF = context_.trace ? problem.weight_DF.clone() : at::Tensor();
    const at::Tensor right_FR = update.delta.right_FR, reached_N = detail::share_reached(problem, update.delta);
    update.delta = detail::smaller_form(std::move(update.delta));
    const ApplyReport report = apply_delta(update.delta, transaction_);
    result_.layers.push_back(detail::figures_of(problem, update, report, remaining_DN, context_.log));
    for (size_t n = 0; n < columns_.size(); ++n) {
      double& most = most_reached_.try_emplace(columns_[n]->fact, 0).first->second;
      most = std::max(most, reached_N[static_cast<int64_t>(n)].item<double>());
    }
    if (context_.trace) {
      const std::string prefix = "layer." + std::to_string(problem.layer) + ".";
      record(context_, prefix + "update", update.delta.matrix());
      if (right_FR.defined()) record(context_, prefix + "adj_k", right_FR);
      record(context_, prefix + "weight_change", problem.weight_DF - before_DF);
      for (const auto& [name, value] : update.more) record(context_, prefix + name, value);
    }
    result_.deltas.push_back(std::move(update.delta));
  }

  const LocateRecipe& recipe_;
  LocateMemory memory_;
  std::optional<ContextTemplates>& kept_contexts_;
  models::Model& model_;
  const EditContext& context_;
  EditTransaction transaction_;
  bool through_norm_;
  std::vector<at::Tensor> carries_;        // for the next batch, a layer each
  std::map<size_t, double> most_reached_;  // by rendered fact, of all layers
  ContextTemplates contexts_;              // in use
  EditResult result_;
  RenderedBatch batch_;
  std::deque<RenderedFact> parts_;                        // windows; units point into it
  std::deque<std::vector<Unit>> units_;                   // a list a round, in the order of the facts
  std::deque<Target> targets_;                            // outcomes are made from pointers to them
  std::deque<std::vector<at::Tensor>> goals_;             // one a target; with forward replay one a target and layer
  std::vector<at::Tensor> written_keys_, wanted_values_;  // one a layer, of the first pass
  std::vector<const Unit*> columns_;                      // what is written
  std::vector<LayerProblem> unsettled_;                   // one a layer, where modifiers follow what settles
};

}  // namespace

EditResult LocateEditor::edit(models::Model& model, std::span<const datasets::Fact> facts, const EditContext& context) {
  const devices::Tf32Products products(context.tf32);
  BatchEdit batch(*this, recipe_, memory_, contexts_, model, context);
  EditResult result = batch.run(facts);
  context.cancel.check("insert");
  if ((recipe_.remembers_keys || recipe_.modifiers.simie > 0) && !result.deltas.empty()) batch.remember();
  memory_ = batch.commit();
  return result;
}

}  // namespace emend::editors
