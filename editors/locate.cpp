#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/locate.h>
#include <emend/editors/statistics.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <chrono>
#include <cmath>

namespace emend::editors {
namespace {

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

double mean_column_norm(const at::Tensor& x_DN) { return x_DN.norm(2, 0).mean().item<double>(); }

double divisor(ResidualSpread spread, size_t index, size_t count) {
  const auto left = static_cast<double>(count - index);
  switch (spread) {
    case ResidualSpread::kEqual: return left;
    case ResidualSpread::kSqrt: return std::sqrt(left);
    case ResidualSpread::kNone: return 1;
  }
  return 1;
}

// Problems of a batch: one a fact, or one a group of facts that share their key.
struct Grouped {
  std::vector<TargetProblem> problems;
  std::vector<size_t> problem_of_fact;
};

Grouped group_facts(const std::vector<RenderedFact>& facts, bool merge_equal_keys) {
  Grouped grouped;
  std::map<std::vector<int64_t>, std::vector<size_t>> members;  // plain prompt up to the looked-up token -> facts
  std::map<std::vector<int64_t>, size_t> problem_of_key;
  const auto key_of = [](const RenderedFact& fact) {
    return std::vector<int64_t>(fact.rows[0].ids.begin(), fact.rows[0].ids.begin() + fact.rows[0].lookup + 1);
  };
  for (size_t i = 0; i < facts.size(); ++i) members[key_of(facts[i])].push_back(i);
  for (size_t i = 0; i < facts.size(); ++i) {
    const auto& same = members[key_of(facts[i])];
    if (!merge_equal_keys || same.size() == 1) {
      grouped.problem_of_fact.push_back(grouped.problems.size());
      grouped.problems.push_back(make_target_problem(facts[i]));
      continue;
    }
    const auto [found, is_new] = problem_of_key.emplace(key_of(facts[i]), grouped.problems.size());
    grouped.problem_of_fact.push_back(found->second);
    if (!is_new) continue;
    TargetProblem joint;
    joint.case_id = facts[i].case_id;
    for (const size_t member : same) {
      TargetProblem one = make_target_problem(facts[member]);
      for (auto& row : one.rows) {
        row.weight /= static_cast<double>(same.size());
        joint.rows.push_back(std::move(row));
      }
      if (member == same[0]) joint.kl_rows = std::move(one.kl_rows);  // the same subject
    }
    grouped.problems.push_back(std::move(joint));
  }
  return grouped;
}

// One column a fact.
at::Tensor target_matrix(const std::vector<Target>& targets, const std::vector<size_t>& order) {
  std::vector<at::Tensor> columns;
  for (const size_t i : order) columns.push_back(targets[i].target_D[0]);
  return at::stack(columns, 1);
}

class BatchEdit {
 public:
  BatchEdit(const LocateEditor& editor, const LocateRecipe& recipe, models::Model& model, EditContext& context)
      : editor_(editor), recipe_(recipe), model_(model), context_(context), transaction_(model, context.transaction) {}

  EditResult run(std::span<const datasets::Fact> facts) {
    if (facts.empty()) throw Error(ErrorClass::kInvalidArgument, {recipe_.editor, "no facts", "at least one fact", ""});
    result_.editor = recipe_.editor;
    result_.hparams = recipe_.hparams;
    result_.engine = context_.engine;
    prepare(facts);
    optimise();
    if (!columns_.empty()) insert();
    return std::move(result_);
  }

  /// Keys of every layer with the model as it is now.
  std::vector<at::Tensor> keys_of_all_layers() {
    std::vector<hooks::SiteRef> sites;
    for (const int64_t layer : recipe_.common.layers) sites.push_back({hooks::Site::kMlpDownIn, static_cast<int>(layer)});
    std::vector<at::Tensor> keys_FN;
    for (const auto& keys_PF : collect_at_lookup(model_, all_rows(), sites, context_))
      keys_FN.push_back(devices::to_host(average_keys(keys_PF, *result_.contexts, recipe_.weighting).t().to(context_.solve_dtype)));
    return keys_FN;
  }

  [[nodiscard]] bool wrote_anything() const { return !result_.deltas.empty() || !columns_.empty(); }
  void commit() noexcept { transaction_.commit(); }

 private:
  void prepare(std::span<const datasets::Fact> facts) {
    Stopwatch contexts_watch;
    result_.contexts = ensure_contexts(model_, recipe_.common, recipe_.grouping, context_);
    result_.seed = context_.seed;
    result_.seconds["contexts"] = contexts_watch.seconds();
    Stopwatch statistics_watch;
    if (recipe_.needs_statistics) prepare_statistics(model_, editor_.statistics_layers(), recipe_.editor, context_);
    result_.seconds["statistics"] = statistics_watch.seconds();
    batch_ = render_batch(model_, facts, *result_.contexts, {parse_fact_token(recipe_.common.fact_token), recipe_.kl_prompts});
    result_.outcomes = batch_.outcomes;
  }

  void optimise() {
    Stopwatch watch;
    const Grouped grouped = group_facts(batch_.rendered, recipe_.merge_equal_keys);
    targets_ = optimise_targets(model_, grouped.problems, recipe_.targets, context_);
    for (size_t i = 0; i < batch_.rendered.size(); ++i) {
      const size_t problem = grouped.problem_of_fact[i];
      const Target& target = targets_[problem];
      if (context_.trace)
        record_target(*context_.trace, "z." + std::to_string(batch_.rendered[i].case_id) + ".", grouped.problems[problem], target, recipe_.targets);
      result_.outcomes[batch_.places[i]] = make_outcome(model_.tokenizer(), batch_.rendered[i], target);
      if (target.status == FactStatus::kFailed) continue;
      columns_.push_back(i);
      column_target_.push_back(problem);
    }
    result_.seconds["targets"] = watch.seconds();
  }

  [[nodiscard]] std::vector<PromptRow> all_rows() const {
    std::vector<PromptRow> rows;
    for (const size_t i : columns_) rows.insert(rows.end(), batch_.rendered[i].rows.begin(), batch_.rendered[i].rows.end());
    return rows;
  }

  void insert() {
    Stopwatch watch;
    const at::NoGradGuard no_grad;
    const at::Tensor targets_DN = target_matrix(targets_, column_target_);
    LayerWalk walk(model_, all_rows(), context_);
    std::vector<size_t> plain;
    for (size_t n = 0; n < columns_.size(); ++n) plain.push_back(n * result_.contexts->size());
    const auto& layers = recipe_.common.layers;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (context_.progress) context_.progress({"insert", static_cast<double>(i), static_cast<double>(layers.size()), "layer " + std::to_string(layers[i])});
      write_layer(walk, i, targets_DN, plain);
    }
    if (context_.progress) context_.progress({"insert", static_cast<double>(layers.size()), static_cast<double>(layers.size()), ""});
    result_.seconds["insert"] = watch.seconds();
  }

  void write_layer(LayerWalk& walk, size_t index, const at::Tensor& targets_DN, const std::vector<size_t>& plain) {
    const auto& layers = recipe_.common.layers;
    LayerProblem problem;
    problem.layer = static_cast<int>(layers[index]);
    problem.index = index;
    problem.count = layers.size();
    problem.site = model_.edit_site(problem.layer);
    problem.dtype = context_.solve_dtype;
    const at::Tensor weight = model_.weight(problem.site.weight_name);
    problem.weight_DF = problem.site.orientation == models::Orientation::kInOut ? weight.t() : weight;
    if (recipe_.needs_statistics) problem.moment = context_.statistics->get(problem.layer);

    walk.advance_to(problem.layer);
    const at::Tensor keys_PF = walk.keys();
    const at::Tensor current_ND = walk.values(recipe_.targets.sites[0], plain);
    const at::Tensor home = solve_home(model_, problem.site);
    const auto at_home = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kKeys).to(problem.dtype); };
    problem.keys_FN = at_home(average_keys(keys_PF, *result_.contexts, recipe_.weighting)).t().contiguous();
    const at::Tensor remaining_DN = at_home(targets_DN) - at_home(current_ND).t();
    problem.residual_DN = remaining_DN / divisor(recipe_.spread, index, layers.size());
    trace_problem(problem, keys_PF, current_ND, remaining_DN);

    LayerUpdate update = editor_.update(problem);
    const at::Tensor before_DF = context_.trace ? problem.weight_DF.clone() : at::Tensor();
    const ApplyReport report = apply_delta(update.delta, transaction_);
    note(problem, update, report, mean_column_norm(remaining_DN));
    if (context_.trace) {
      const std::string prefix = "layer." + std::to_string(problem.layer) + ".";
      record(context_, prefix + "update", update.delta.matrix());
      if (update.delta.low_rank()) record(context_, prefix + "adj_k", update.delta.right_FR);
      record(context_, prefix + "weight_change", problem.weight_DF - before_DF);
    }
    result_.deltas.push_back(std::move(update.delta));
  }

  void trace_problem(const LayerProblem& problem, const at::Tensor& keys_PF, const at::Tensor& current_ND, const at::Tensor& remaining_DN) {
    if (!context_.trace) return;
    const std::string prefix = "layer." + std::to_string(problem.layer) + ".";
    std::vector<int64_t> lookup;
    for (const auto& row : all_rows()) lookup.push_back(row.lookup);
    record(context_, prefix + "keys_per_context", keys_PF);
    record(context_, prefix + "key_lookup", at::tensor(lookup, at::kLong));
    record(context_, prefix + "keys", problem.keys_FN);
    record(context_, prefix + "cur_z", current_ND.t());
    record(context_, prefix + "targets", remaining_DN);
    record(context_, prefix + "resid", problem.residual_DN);
  }

  void note(const LayerProblem& problem, const LayerUpdate& update, const ApplyReport& report, double residual_norm) {
    LayerFigures figures;
    figures.layer = problem.layer;
    figures.weight = problem.site.weight_name;
    figures.update_norm = report.delta_norm;
    figures.relative_update_norm = report.weight_norm > 0 ? report.delta_norm / report.weight_norm : 0;
    figures.survived = report.survived;
    figures.residual_norm = residual_norm;
    figures.key_norm = mean_column_norm(problem.keys_FN);
    figures.solver = update.solve.method;
    figures.condition = update.solve.condition;
    figures.jitter = update.solve.jitter;
    char text[160];
    std::snprintf(text, sizeof text, "layer %d: |residual| %.4g, |update| %.4g (%.3g of the weight), %s", figures.layer, figures.residual_norm,
                  figures.update_norm, figures.relative_update_norm, figures.solver.empty() ? "no solve" : figures.solver.c_str());
    context_.log.event(LogLevel::kInfo, "insert.layer", text, to_json(figures));
    if (figures.jitter > 0)
      context_.log.warning("insert.jitter", figures.weight + ": the second moment is nearly singular; " + std::to_string(figures.jitter) +
                                                " was added to its diagonal (more statistics tokens help)");
    result_.layers.push_back(std::move(figures));
  }

  const LocateEditor& editor_;
  const LocateRecipe& recipe_;
  models::Model& model_;
  EditContext& context_;
  EditTransaction transaction_;
  EditResult result_;
  RenderedBatch batch_;
  std::vector<Target> targets_;
  std::vector<size_t> columns_;        // facts that are written, as indices into batch_.rendered
  std::vector<size_t> column_target_;  // their targets
};

}  // namespace

std::vector<int> LocateEditor::statistics_layers() const {
  if (!recipe_.needs_statistics) return {};
  return {recipe_.common.layers.begin(), recipe_.common.layers.end()};
}

EditResult LocateEditor::edit(models::Model& model, std::span<const datasets::Fact> facts, EditContext& context) {
  BatchEdit batch(*this, recipe_, model, context);
  EditResult result = batch.run(facts);
  context.cancel.check("insert");
  if (wants_keys_after_edit() && !result.deltas.empty()) after_edit(batch.keys_of_all_layers());
  batch.commit();
  return result;
}

TargetSpec memit_targets(const hparams::LocateHparams& hparams, const models::Model& model) {
  TargetSpec spec;
  const auto last = static_cast<int>(hparams.layers.back());
  spec.sites = {{hooks::Site::kLayerOut, last}};
  spec.loss_layer = std::max(last, static_cast<int>(hparams.v_loss_layer.value_or(model.n_layers() - 1)));
  spec.steps = hparams.v_num_grad_steps;
  spec.lr = hparams.v_lr;
  spec.weight_decay = hparams.v_weight_decay;
  spec.clamp_norm_factor = hparams.clamp_norm_factor;
  spec.kl_factor = hparams.kl_factor;
  spec.stop_loss = hparams.v_stop_loss;
  return spec;
}

TargetSpec rome_targets(const hparams::LocateHparams& hparams, int layer) {
  TargetSpec spec;
  spec.sites = {{hooks::Site::kMlpOut, layer}};
  spec.steps = hparams.v_num_grad_steps;
  spec.lr = hparams.v_lr;
  spec.weight_decay = hparams.v_weight_decay;
  spec.clamp_norm_factor = hparams.clamp_norm_factor;
  spec.kl_factor = hparams.kl_factor;
  spec.stop_loss = hparams.v_stop_loss;
  return spec;
}

void check_locate_hparams(const hparams::LocateHparams& hparams, const models::Model& model, const hparams::RawHparams& raw) {
  const auto layer_range = "0 to " + std::to_string(model.n_layers() - 1);
  for (const int64_t layer : hparams.layers) {
    if (layer >= model.n_layers())
      throw Error(ErrorClass::kInvalidArgument, {raw.where("layers"), "layer " + std::to_string(layer), layer_range,
                                                 "the model has " + std::to_string(model.n_layers()) + " layers: use hyper-parameters made for it"});
    (void)model.edit_site(static_cast<int>(layer));
  }
  if (hparams.v_loss_layer && *hparams.v_loss_layer >= model.n_layers())
    throw Error(ErrorClass::kInvalidArgument, {raw.where("v_loss_layer"), "layer " + std::to_string(*hparams.v_loss_layer), layer_range,
                                               "leave v_loss_layer out to use the last layer"});
  const auto& names = hparams.modules;
  models::check_module_names(model.family(), model.config(),
                             {names.layer_module_tmp, names.attn_module_tmp, names.mlp_module_tmp, names.rewrite_module_tmp,
                              names.ln_f_module, names.lm_head_module},
                             raw.source());
}

const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams, ContextGrouping grouping,
                                        EditContext& context) {
  if (!context.contexts)
    context.contexts = sample_contexts(model, hparams.context_template_length_params, grouping, context.seed, context.log);
  return *context.contexts;
}

RenderedBatch render_batch(const models::Model& model, std::span<const datasets::Fact> facts, const ContextTemplates& contexts,
                           const RenderOptions& options) {
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

void prepare_statistics(const models::Model& model, const std::vector<int>& layers, const std::string& editor, EditContext& context) {
  if (!context.statistics)
    throw Error(ErrorClass::kInvalidArgument, {editor, "no statistics", "second moments of the keys", "give a StatisticsProvider, or a corpus on the command line"});
  context.statistics->prepare(model, layers);
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

void record(EditContext& context, const std::string& name, const at::Tensor& value) {
  if (context.trace) (*context.trace)[name] = devices::to_host(value.detach()).clone();
}

}  // namespace emend::editors
