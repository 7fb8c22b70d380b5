// What locate-then-edit methods share beside the batch itself: recipes, targets' settings, prompts, statistics, and the
// editor's memory.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/core/packed.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/locate_parts.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/locate.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

#include <cmath>

namespace emend::editors {
namespace {

const std::string kOriginal = "original.";  // in a saved state

TargetSpec targets_at(hooks::Site site, int layer, const hparams::LocateHparams& hparams) {
  return {.sites = {{site, layer}},
          .loss_layer = {},
          .steps = hparams.v_num_grad_steps,
          .lr = hparams.v_lr,
          .weight_decay = hparams.v_weight_decay,
          .clamp_norm_factor = hparams.clamp_norm_factor,
          .kl_factor = hparams.kl_factor,
          .stop_loss = hparams.v_stop_loss};
}

std::vector<int> rewritten_layers(const hparams::LocateHparams& hparams) {
  return {hparams.layers.begin(), hparams.layers.end()};
}

// Another processor may round a logit to another token: everyone uses what the first process makes.
nlohmann::json of_first_process(const EditContext& context, const std::function<nlohmann::json()>& make) {
  return unpacked<nlohmann::json>(context.sharing.by_first([&] { return packed(make()); }));
}

}  // namespace

namespace detail {

static double mean_column_norm(const at::Tensor& x_DN) {
  return x_DN.norm(2, 0).mean().item<double>();
}

// A target shared by n facts lies about √n times as far away as one of them asks, in n directions that have little to
// do with each other: it gets √n times the steps.
Grouped group_facts(const std::vector<const RenderedFact*>& facts, bool merge_equal_keys, int64_t steps) {
  Grouped grouped;
  std::map<std::vector<int64_t>, std::vector<size_t>> members;  // plain prompt up to the looked-up token -> facts
  std::map<std::vector<int64_t>, size_t> problem_of_key;
  const auto key_of = [](const RenderedFact& fact) {
    return std::vector<int64_t>(fact.rows[0].ids.begin(), fact.rows[0].ids.begin() + fact.rows[0].lookup + 1);
  };
  for (size_t i = 0; i < facts.size(); ++i) members[key_of(*facts[i])].push_back(i);
  for (size_t i = 0; i < facts.size(); ++i) {
    const auto& same = members[key_of(*facts[i])];
    if (!merge_equal_keys || same.size() == 1) {
      grouped.problem_of_fact.push_back(grouped.problems.size());
      grouped.problems.push_back(make_target_problem(*facts[i]));
      continue;
    }
    const auto [found, is_new] = problem_of_key.emplace(key_of(*facts[i]), grouped.problems.size());
    grouped.problem_of_fact.push_back(found->second);
    if (!is_new) continue;
    TargetProblem joint;
    joint.case_id = facts[i]->case_id;
    for (const size_t member : same) {
      TargetProblem one = make_target_problem(*facts[member]);
      for (auto& row : one.rows) {
        row.weight /= static_cast<double>(same.size());
        joint.rows.push_back(std::move(row));
      }
      if (member == same[0]) joint.kl_rows = std::move(one.kl_rows);  // the same subject
    }
    joint.shared_by = std::ssize(same);
    joint.more_steps = std::llround(static_cast<double>(steps) * (std::sqrt(static_cast<double>(same.size())) - 1));
    grouped.problems.push_back(std::move(joint));
  }
  return grouped;
}

double divisor(ResidualSpread spread, size_t index, size_t count) {
  const auto left = static_cast<double>(count - index);
  return spread == ResidualSpread::kEqual ? left : spread == ResidualSpread::kSqrt ? std::sqrt(left) : 1;
}

void trace_problem(const EditContext& context, const LayerProblem& problem, const std::vector<PromptRow>& rows,
                   const at::Tensor& keys_PF, const at::Tensor& current_ND, const at::Tensor& remaining_DN) {
  const std::string prefix = "layer." + std::to_string(problem.layer) + ".";
  const auto lookup = mapped(rows, &PromptRow::lookup);
  record(context, prefix + "keys_per_context", keys_PF);
  record(context, prefix + "key_lookup", at::tensor(lookup, at::kLong));
  record(context, prefix + "keys", problem.keys_FN);
  record(context, prefix + "cur_z", current_ND.t());
  record(context, prefix + "targets", remaining_DN);
  record(context, prefix + "resid", problem.residual_DN);
}

WeightDelta smaller_form(WeightDelta delta) {
  if (!delta.low_rank() ||
      delta.left_DR.numel() + delta.right_FR.numel() <= delta.left_DR.size(0) * delta.right_FR.size(0))
    return delta;
  delta.dense_DF = delta.matrix();
  delta.left_DR = delta.right_FR = at::Tensor();
  return delta;
}

std::vector<PromptRow> plain_rows(const std::vector<TargetProblem>& problems) {
  return mapped(problems, [](const TargetProblem& problem) {
    return PromptRow{{}, problem.rows[0].ids, problem.rows[0].lookup, {}};
  });
}

at::Tensor share_reached(const LayerProblem& problem, const WeightDelta& delta) {
  const at::Tensor asked_N = problem.residual_DN.norm(2, 0);
  const auto moved_by = [&](const at::Tensor& factor) { return factor.to(problem.dtype).matmul(problem.keys_FN); };
  const at::Tensor moved_DN = delta.low_rank() ? delta.left_DR.to(problem.dtype).matmul(moved_by(delta.right_FR.t()))
                                               : moved_by(delta.dense_DF);
  const at::Tensor share_N = moved_DN.norm(2, 0) / asked_N;
  return devices::to_host(at::where(asked_N > 0, share_N, at::ones_like(share_N)), devices::Purpose::kHost)
      .to(at::kDouble);
}

LayerFigures figures_of(const LayerProblem& problem, const LayerUpdate& update, const ApplyReport& report,
                        const at::Tensor& remaining_DN, const Log& log) {
  LayerFigures figures = figures_of_write(problem.layer, problem.site.weight_name, report);
  figures.residual_norm = mean_column_norm(remaining_DN);
  figures.key_norm = mean_column_norm(problem.keys_FN);
  figures.solver = update.solve.method;
  figures.condition = update.solve.condition;
  figures.jitter = update.solve.jitter;
  log.event(LogLevel::kInfo, "insert.layer",
            formatted("layer %d: |residual| %.4g, |update| %.4g (%.3g of the weight), %s", figures.layer,
                      figures.residual_norm, figures.update_norm, figures.relative_update_norm,
                      figures.solver.empty() ? "no solve" : figures.solver.c_str()),
            to_json(figures));
  if (figures.jitter > 0)
    log.warning("insert.jitter",
                formatted("%s: the second moment is nearly singular; %.2g was added to its diagonal (more statistics "
                          "tokens help, but where neurons are always zero, as spare ones)",
                          figures.weight.c_str(), figures.jitter));
  return figures;
}

void warn_if_little(const std::map<size_t, double>& most_reached, const RenderedBatch& batch, EditResult& result,
                    const Log& log) {
  constexpr double kLittle = 0.2;
  const auto weight = result.hparams.find("mom2_update_weight");
  if (weight == result.hparams.end()) return;
  const std::string advice =
      "; lower mom2_update_weight (now " + weight->dump() + "), as the presets of small models do";
  size_t few = 0;
  double most = 0;
  for (const auto& [fact, reached] : most_reached) {
    most = std::max(most, reached);
    if (reached >= kLittle) continue;
    ++few;
    auto& outcome = result.outcomes[batch.places[fact]];
    if (outcome.status != FactStatus::kFailed)
      outcome.reason = formatted("no layer gets more than %.2g %% of the change it asks for", 100 * reached) + advice;
  }
  if (few == 0) return;
  const bool all = few == most_reached.size();
  log.event(LogLevel::kWarning, "insert.little",
            "the edit barely moves " +
                (all ? "anything" : std::to_string(few) + " of " + counted(most_reached.size(), "fact")) +
                ": no layer gets a fifth of the change that the targets ask for" + advice,
            {{"reached", most}, {"facts", few}});
}

}  // namespace detail

Preserved preserved_of(const LayerProblem& problem, double lambda, double ridge) {
  return {.moment = problem.moment, .lambda = lambda, .ridge = problem.moment ? ridge : lambda + ridge};
}

// The least-squares answer to this batch and all earlier ones, from whatever the weight is now.
static LayerUpdate joint_form(const LayerProblem& problem, const Preserved& preserved) {
  const auto here = [&](const at::Tensor& x) { return routed(x, problem.keys_FN, problem.dtype); };
  const at::Tensor weight_DF = here(problem.weight_DF);
  const at::Tensor owed_DF =
      problem.residual_DN.mm(problem.keys_FN.t()) + here(problem.earlier.values_DF) -
      weight_DF.mm(here(problem.earlier.gram_FF())) +
      (here(problem.original_DF) - weight_DF).mm(preserved.matrix(problem.dtype, problem.keys_FN));
  Preserved system = problem.earlier.with(preserved);
  system.previous_FP =
      system.previous_FP.defined() ? at::cat({here(system.previous_FP), problem.keys_FN}, 1) : problem.keys_FN;
  LayerUpdate update;
  update.delta = WeightDelta::dense(
      problem.site, solve_preserved(owed_DF.t(), system, {problem.dtype}, &update.solve).t().contiguous());
  return update;
}

LayerUpdate closed_form(const LayerProblem& problem, const Preserved& preserved) {
  if (problem.earlier.values_DF.defined()) return joint_form(problem, preserved);
  LayerUpdate update;
  const at::Tensor adj_FN =
      solve_keys(problem.keys_FN, problem.earlier.with(preserved), {problem.dtype}, &update.solve);
  update.delta = WeightDelta::factors(problem.site, problem.residual_DN, adj_FN);
  return update;
}

std::function<LayerUpdate(const LayerProblem&)> memit_update(double lambda, double ridge) {
  return [=](const LayerProblem& problem) { return closed_form(problem, preserved_of(problem, lambda, ridge)); };
}

const hparams::Schema<SharedHparams>& shared_hparams_schema() {
  using H = SharedHparams;
  static const auto schema =
      hparams::Schema<H>("batch")
          .include(hparams::locate_schema())
          .field("merge_equal_keys", &H::merge_equal_keys,
                 "facts about the same subject with equal keys share one target",
                 {.formula = "MEMIT-Merge, arXiv 2502.07322"})
          .field("rounds", &H::rounds,
                 "number of times a batch is edited; from the second on only the facts that have not taken", {.min = 1})
          .field("round_probability", &H::round_probability,
                 "probability of the target below which a fact has not taken",
                 {.formula = "exp(mean log p of the target's tokens after the plain prompt)", .min = 0, .max = 1})
          .field("nas", &H::nas, "on top: values come back to the norm they have in the unedited model",
                 {.formula = "z = (t0 - m) + v a/|v|, v = m + delta, m the MLP's output (NAS, arXiv 2602.02543)"})
          .field("nas_norm", &H::nas_norm, "that norm; 0: the mean of the first batch's, without the largest twentieth",
                 {.min = 0})
          .field("revive", &H::revive,
                 "on top: parts of the change in the unedited weight's leading singular directions go; 0 disables it",
                 {.formula = "share of the sum of squared singular values that they hold (REVIVE, arXiv 2601.11042)",
                  .min = 0,
                  .max = 1})
          .field("simie", &H::simie, "on top: each batch's change acts on its own keys only; 0 disables it",
                 {.formula = "lambda in dW K Kt (lambda I + earlier + K Kt)^-1 (SimIE)", .min = 0})
          .field("suit", &H::suit, "on top: keys lose the directions that names share; 0 disables it",
                 {.formula = "share of the sum of squared singular values of names' keys (SUIT, arXiv 2509.24502)",
                  .min = 0,
                  .max = 1})
          .check("nas_norm", "0 without nas, which alone reads it", [](const H& h) { return h.nas || h.nas_norm == 0; })
          .check("revive", "less than 1: all of the change would go", [](const H& h) { return h.revive < 1; })
          .check("suit", "less than 1: all of a key would go", [](const H& h) { return h.suit < 1; });
  return schema;
}

const hparams::Schema<MemitHparams>& memit_hparams_schema() {
  using H = MemitHparams;
  static const auto schema =
      hparams::Schema<H>("memit")
          .include(shared_hparams_schema())
          .field("mom2_update_weight", &H::mom2_update_weight, "weight of what the layer already does",
                 {.formula = "λ in ΔW = R Kᵀ (λC + K Kᵀ)⁻¹", .above = 0});
  return schema;
}

hparams::FieldOptions history_field() {
  return {
      .meaning = "earlier batches are preserved, and what they asked for and did not get is asked for again",
      .formula = "dW = (R Kt + Vp Kpt - W Kp Kpt + (W0 - W) lambda C)(lambda C + Kp Kpt + K Kt)^-1 (arXiv 2605.26670)"};
}

std::string one_round(const SharedHparams& hparams) {
  return hparams.rounds > 1 ? "1, because this editor writes a batch only once" : "";
}

LocateRecipe locate_recipe(const hparams::LocateHparams& hparams, const RecipeInputs& in) {
  check_locate_hparams(hparams, in.model, in.raw);
  return {.common = hparams, .targets = memit_targets(hparams, in.model)};
}

LocateRecipe shared_recipe(const SharedHparams& hparams, const RecipeInputs& in) {
  LocateRecipe recipe = locate_recipe(hparams, in);
  recipe.merge_equal_keys = hparams.merge_equal_keys;
  recipe.rounds = {hparams.rounds, hparams.round_probability};
  recipe.modifiers = {hparams.nas,    hparams.nas_norm,
                      hparams.revive, hparams.simie,
                      hparams.suit,   std::make_shared<std::map<int, std::pair<at::Tensor, at::Tensor>>>()};
  return recipe;
}

LocateRecipe memit_recipe(const MemitHparams& hparams, const RecipeInputs& in) {
  LocateRecipe recipe = shared_recipe(hparams, in);
  recipe.update = memit_update(hparams.mom2_update_weight);
  return recipe;
}

TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model) {
  const auto last = static_cast<int>(hparams.layers.back());
  const auto site = model.config().mlp_post_norm() ? hooks::Site::kMlpDownOut : hooks::Site::kLayerOut;
  TargetSpec spec = targets_at(site, last, hparams);
  spec.loss_layer = std::max(last, static_cast<int>(hparams.v_loss_layer.value_or(model.n_layers() - 1)));
  return spec;
}

TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer) {
  return targets_at(hooks::Site::kMlpOut, layer, hparams);
}

void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model,
                          const hparams::RawHparams& raw) {
  const auto layer_range = "0 to " + std::to_string(model.n_layers() - 1);
  for (const int64_t layer : hparams.layers) {
    if (layer >= model.n_layers())
      refuse({raw.where("layers"), "layer " + std::to_string(layer), layer_range,
              "the model has " + std::to_string(model.n_layers()) + " layers: use hyper-parameters made for it"});
    (void)model.edit_site(static_cast<int>(layer));
  }
  if (hparams.v_loss_layer && *hparams.v_loss_layer >= model.n_layers())
    refuse({raw.where("v_loss_layer"), "layer " + std::to_string(*hparams.v_loss_layer), layer_range,
            "leave v_loss_layer out to use the last layer"});
  const auto& names = hparams.modules;
  models::check_module_names(model.family(), model.config(),
                             {names.layer_module_tmp, names.attn_module_tmp, names.mlp_module_tmp,
                              names.rewrite_module_tmp, names.ln_f_module, names.lm_head_module},
                             [&](const char* key) { return raw.where(key); });
}

const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams,
                                        ContextGrouping grouping, const EditContext& context,
                                        std::optional<ContextTemplates>& kept) {
  if (context.contexts) {
    const ContextTemplates& given = *context.contexts;
    if (grouping != ContextGrouping::kPlainApart || given.groups.size() > 1 || given.size() == 1) return given;
    const auto& all = given.groups[0];  // a flat list
    kept = given;
    kept->groups = {{all[0]}, {all.begin() + 1, all.end()}};
    return *kept;
  }
  if (kept) return *kept;
  const auto sample = [&] {
    return sample_contexts(model, hparams.context_template_length_params, grouping, context.seed, context.log);
  };
  if (context.sharing.alone()) return kept.emplace(sample());
  kept = parse_contexts(of_first_process(context, [&] { return sample().groups; }), "contexts of the first process");
  kept->sampled = true;
  kept->seed = context.seed;
  return *kept;
}

RenderedBatch render_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                           const ContextTemplates& contexts, const RenderOptions& options) {
  RenderedBatch batch;
  batch.outcomes.resize(facts.size());
  for (size_t i = 0; i < facts.size(); ++i) {
    batch.outcomes[i].case_id = facts[i].case_id;
    try {
      batch.rendered.push_back(render_prompts(model.tokenizer(), facts[i], contexts, options));
      batch.places.push_back(i);
    } catch (const Error& error) {
      if (error.error_class() != ErrorClass::kInvalidArgument) throw;
      batch.outcomes[i].status = FactStatus::kFailed;
      batch.outcomes[i].reason = error.what();
    }
  }
  return batch;
}

RenderedBatch begin_batch(const models::Model& model, std::span<const datasets::Fact> facts,
                          const hparams::LocateHparams& hparams, ContextGrouping grouping, const EditContext& context,
                          std::optional<ContextTemplates>& kept, EditResult& result) {
  {
    const PhaseTimer timer(result, "contexts");
    result.contexts = ensure_contexts(model, hparams, grouping, context, kept);
    result.seed = context.seed;
  }
  if (hparams.mom2_adjustment) {
    const PhaseTimer timer(result, "statistics");
    if (!context.statistics)
      refuse({result.editor, "no statistics", "second moments of the keys",
              "give a StatisticsProvider, or a corpus on the command line"});
    context.statistics->prepare(model, rewritten_layers(hparams));
  }
  RenderedBatch batch = render_batch(model, facts, *result.contexts, {parse_fact_token(hparams.fact_token)});
  result.outcomes = batch.outcomes;
  return batch;
}

std::vector<std::vector<int64_t>> text_rows(const models::Model& model, int64_t tokens, const EditContext& context,
                                            Rows kind) {
  const auto read = [&] {
    detail::TokenRows rows;
    if (context.statistics) rows = context.statistics->rows(model, tokens, kind);
    if (!rows.empty()) return rows;
    const StatisticsOptions options{.seed = context.seed, .cancel = context.cancel, .progress = context.progress};
    return detail::make_row_source(model, std::nullopt, options, kind)->take(tokens);
  };
  if (context.sharing.alone()) return read();
  return of_first_process(context, read).get<detail::TokenRows>();
}

at::Tensor solve_home(const models::Model& model, const models::EditSite& site) {
  const at::Tensor weight = model.weight(site.weight_name);
  const at::Tensor host = at::empty({0}, at::kFloat);
  if (weight.device().is_cpu()) return host;
  // C, the system, its factor and a copy, in float64.
  const int64_t needed = 4 * 8 * site.in_features * site.in_features;
  for (const auto& info : devices::visible_devices())
    if (info.device == weight.device()) return info.free_bytes >= needed ? weight : host;
  return host;
}

void record(const EditContext& context, const std::string& name, const at::Tensor& value) {
  if (context.trace) (*context.trace)[name] = devices::to_host(value.detach()).clone();
}

std::vector<int> LocateEditor::statistics_layers() const {
  return recipe_.common.mom2_adjustment ? rewritten_layers(recipe_.common) : std::vector<int>{};
}

at::Tensor oriented(const models::Model& model, const models::EditSite& site) {
  const at::Tensor weight = model.weight(site.weight_name);
  return site.orientation == models::Orientation::kInOut ? weight.t() : weight;
}

at::Tensor oriented_original(const models::EditSite& site, const at::Tensor& stored) {
  const at::Tensor host = devices::to_host(stored, devices::Purpose::kSolve).to(at::kDouble);
  return site.orientation == models::Orientation::kInOut ? host.t() : host;
}

std::optional<EditResult> LocateEditor::finish(models::Model& model, const EditContext& context) {
  if (!recipe_.correct) return std::nullopt;
  const at::NoGradGuard no_grad;
  EditTransaction transaction(model, context.transaction);
  EditResult result{.editor = name(),
                    .hparams = hparams(),
                    .contexts = context.contexts ? context.contexts : contexts_,
                    .engine = context.engine,
                    .seed = context.seed};
  const PhaseTimer timer(result, "insert");
  for (const int layer : rewritten_layers(recipe_.common)) {
    context.cancel.check("finish");
    const models::EditSite site = model.edit_site(layer);
    const auto original = memory_.originals.find(site.weight_name);
    if (original == memory_.originals.end()) continue;  // nothing was written
    const at::Tensor original_DF = oriented_original(site, original->second);
    const auto correction =
        recipe_.correct(site, original_DF, oriented_original(site, model.weight(site.weight_name)) - original_DF);
    if (!correction) continue;
    add_delta(correction->delta, transaction, result).solver = correction->solve.method;
  }
  transaction.commit();
  return result.deltas.empty() ? std::nullopt : std::optional(std::move(result));
}

std::map<std::string, at::Tensor> LocateEditor::state() const {
  auto state = memory_.keys.state();
  for (const auto& [name, weight] : memory_.originals) state.emplace(kOriginal + name, weight);
  for (size_t i = 0; i < memory_.carried.size(); ++i) {
    if (memory_.carried[i].defined()) state.emplace("carried." + std::to_string(i), memory_.carried[i]);
    if (memory_.shared[i].defined()) state.emplace("suit." + std::to_string(i), memory_.shared[i]);
  }
  if (memory_.nas_norm > 0) state.emplace("nas", at::tensor({memory_.nas_norm}, at::kDouble));
  return state;
}

void LocateEditor::load_state(const std::map<std::string, at::Tensor>& saved) {
  auto state = saved;
  if (recipe_.modifiers.leading) recipe_.modifiers.leading->clear();
  LocateMemory memory = fresh_memory();
  std::erase_if(state, [&](const auto& entry) {
    const bool original = entry.first.starts_with(kOriginal);
    if (original) memory.originals.emplace(entry.first.substr(kOriginal.size()), entry.second.clone());
    return original;
  });
  if (const auto norm = state.extract("nas")) memory.nas_norm = norm.mapped().item<double>();
  for (size_t i = 0; i < memory.carried.size(); ++i) {
    if (auto kept = state.extract("carried." + std::to_string(i))) memory.carried[i] = kept.mapped();
    if (auto kept = state.extract("suit." + std::to_string(i))) memory.shared[i] = kept.mapped();
  }
  if (recipe_.remembers_keys || recipe_.modifiers.simie > 0) memory.keys.load(state);
  memory_ = std::move(memory);
}

void LocateMemory::join(const LocateRecipe& recipe, LayerProblem& problem) const {
  if (recipe.remembers_keys) problem.earlier = keys.layer(problem.index);
  problem.carried = carried.at(problem.index);
  problem.keys_FN = outside(problem.keys_FN, shared.at(problem.index));
  if (const auto at = originals.find(problem.site.weight_name);
      at != originals.end() && (recipe.compensates || recipe.modifiers.revive > 0))
    problem.original_DF = oriented_original(problem.site, at->second);
}

LayerUpdate LocateEditor::update(LayerProblem problem) const {
  memory_.join(recipe_, problem);
  LayerUpdate update = recipe_.update(problem);
  problem.earlier = memory_.keys.layer(problem.index);
  update.delta = modified(recipe_.modifiers, problem, update.delta);
  return update;
}

}  // namespace emend::editors
