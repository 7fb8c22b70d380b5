#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/steps/rank_one.h>
#include <emend/models/tokenizer/tokenizer.h>

namespace emend::editors {
namespace {

// One fact in one layer.
class RankOneStep {
 public:
  RankOneStep(const RankOneRecipe& recipe, models::Model& model, const RenderedFact& fact, int layer,
              const EditContext& context, EditResult& result)
      : recipe_(recipe),
        model_(model),
        fact_(fact),
        site_(model.edit_site(layer)),
        context_(context),
        result_(result),
        prefix_("case." + std::to_string(fact.case_id) + ".") {}

  FactOutcome run(EditTransaction& transaction) {
    at::Tensor u_F;
    {
      const PhaseTimer timer(result_, "insert");
      u_F = direction();
    }
    const Target target = optimise();
    FactOutcome outcome = make_outcome(model_.tokenizer(), fact_, target);
    if (outcome.status == FactStatus::kFailed) return outcome;
    const PhaseTimer timer(result_, "insert");
    write(u_F, target, transaction);
    return outcome;
  }

 private:
  [[nodiscard]] std::vector<PromptRow> rows_of(KeySource source) const {
    return source == KeySource::kMean ? fact_.rows : std::vector<PromptRow>{fact_.rows[0]};
  }

  // u, of length 1, in the solve dtype.
  at::Tensor direction() {
    const at::Tensor keys_PF =
        collect_at_lookup(model_, rows_of(recipe_.direction), {{hooks::Site::kMlpDownIn, site_.layer}}, context_)[0];
    if (context_.trace) {
      const auto lookup = mapped(rows_of(recipe_.direction), &PromptRow::lookup);
      record(context_, prefix_ + "keys_per_context", keys_PF);
      record(context_, prefix_ + "key_lookup", at::tensor(lookup, at::kLong));
    }
    const at::Tensor home = solve_home(model_, site_);
    at::Tensor u_F1 =
        devices::route_like(keys_PF.mean(0, true), home, devices::Purpose::kKeys).to(context_.solve_dtype).t();
    if (recipe_.common.mom2_adjustment)
      u_F1 =
          solve_preserved(u_F1, {context_.statistics->get(site_.layer), 1, 0, {}, {}}, {context_.solve_dtype}, &solve_);
    return (u_F1 / u_F1.norm()).squeeze(1);
  }

  Target optimise() {
    const PhaseTimer timer(result_, "targets");
    EditContext quiet = context_;
    quiet.progress = nullptr;  // facts are counted by the caller
    const TargetProblem problem = make_target_problem(fact_);
    const TargetSpec spec = rome_targets(recipe_.common, site_.layer);
    Target target = optimise_targets(model_, {problem}, spec, quiet).at(0);
    if (context_.trace) record_target(*context_.trace, prefix_ + "z.", problem, target, spec);
    return target;
  }

  void write(const at::Tensor& u_F, const Target& target, EditTransaction& transaction) {
    const auto current =
        collect_at_lookup(model_, rows_of(recipe_.constraint),
                          {{hooks::Site::kMlpDownIn, site_.layer}, {hooks::Site::kMlpDownOut, site_.layer}}, context_);
    const auto like_u = [&](const at::Tensor& x) { return routed(x, u_F, u_F.scalar_type()); };
    const at::Tensor key_F = like_u(current[0].mean(0)), value_D = like_u(current[1].mean(0));
    const at::Tensor gap_D =
        recipe_.target_is_current_plus_delta ? like_u(target.delta_D[0]) : like_u(target.target_D[0]) - value_D;
    const at::Tensor divisor = key_F.dot(u_F);
    const at::Tensor v_D = gap_D / divisor;
    const WeightDelta delta = WeightDelta::factors(site_, v_D.unsqueeze(1), u_F.unsqueeze(1));
    LayerFigures& figures = add_delta(delta, transaction, result_);
    figures.solver = solve_.method;
    figures.condition = solve_.condition;
    figures.jitter = solve_.jitter;
    figures.residual_norm = gap_D.norm().item<double>();
    figures.key_norm = key_F.norm().item<double>();
    if (context_.trace) {
      record(context_, prefix_ + "u", u_F);
      record(context_, prefix_ + "v", v_D);
      record(context_, prefix_ + "cur_input", current[0]);
      record(context_, prefix_ + "cur_output", current[1]);
      record(context_, prefix_ + "v_target", gap_D + value_D);
      record(context_, prefix_ + "division_factor", divisor);
      record(context_, prefix_ + "weight_change", delta.matrix());
    }
  }

  const RankOneRecipe& recipe_;
  models::Model& model_;
  const RenderedFact& fact_;
  models::EditSite site_;
  const EditContext& context_;
  EditResult& result_;
  std::string prefix_;
  SolveReport solve_;
};

// All layers of one fact, or none.
FactOutcome edit_fact(const RankOneRecipe& recipe, models::Model& model, const RenderedFact& fact,
                      const EditContext& context, EditTransaction& transaction, EditResult& result) {
  EditTransaction all_layers(model, &transaction);
  const size_t deltas_before = result.deltas.size(), layers_before = result.layers.size();
  FactOutcome outcome;
  for (const int64_t layer : recipe.common.layers) {
    outcome = RankOneStep(recipe, model, fact, static_cast<int>(layer), context, result).run(all_layers);
    if (outcome.status == FactStatus::kFailed) {
      result.deltas.resize(deltas_before);
      result.layers.resize(layers_before);
      return outcome;
    }
  }
  all_layers.commit();
  return outcome;
}

}  // namespace

const hparams::Schema<RankOneHparams>& rank_one_schema() {
  using H = RankOneHparams;
  static const auto schema = hparams::Schema<H>("rank one")
                                 .include(hparams::locate_schema())
                                 .unused("mom2_update_weight", "the constraint is satisfied exactly");
  return schema;
}

RankOneEditor::RankOneEditor(RankOneRecipe recipe, const RecipeInputs& in)
    : NamedEditor(in), recipe_(std::move(recipe)) {
  check_locate_hparams(recipe_.common, in.model, in.raw);
  // Published files name a layer, which no implementation of ROME reads. Who wrote one himself is told.
  const auto* given = in.raw.find("v_loss_layer");
  if (const auto layer = recipe_.common.v_loss_layer.value_or(in.model.n_layers() - 1);
      given && !given->bundled && layer != in.model.n_layers() - 1)
    in.log.warning("hparams.ignored", given->where + ": v_loss_layer " + std::to_string(layer) +
                                          " does nothing: " + name() +
                                          " reads the loss where the model's own logits are, behind the last block");
}

std::vector<int> RankOneEditor::statistics_layers() const {
  if (!recipe_.common.mom2_adjustment) return {};
  return {recipe_.common.layers.begin(), recipe_.common.layers.end()};
}

EditResult RankOneEditor::edit(models::Model& model, std::span<const datasets::Fact> facts,
                               const EditContext& context) {
  const devices::Tf32Products products(context.tf32);
  EditResult result{.editor = name(), .hparams = hparams(), .engine = context.engine};
  if (facts.empty()) return result;
  const RenderedBatch batch =
      begin_batch(model, facts, recipe_.common, ContextGrouping::kOneGroup, context, contexts_, result);
  EditTransaction transaction(model, context.transaction);
  const size_t total = batch.rendered.size();
  for (size_t i = 0; i < batch.rendered.size(); ++i) {
    context.cancel.check("edit");
    context.report("edit", i, total, batch.rendered[i].where);
    result.outcomes[batch.places[i]] = edit_fact(recipe_, model, batch.rendered[i], context, transaction, result);
  }
  context.report("edit", total, total);
  transaction.commit();
  return result;
}

}  // namespace emend::editors
