// The steps that locate-then-edit methods share beside the batch itself: recipes, targets' settings, prompts,
// statistics.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/locate.h>
#include <emend/editors/post_norm.h>
#include <emend/editors/statistics.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

namespace emend::editors {
namespace {

TargetSpec targets_at(hooks::Site site, int layer, const hparams::LocateHparams& hparams) {
  TargetSpec spec;
  spec.sites = {{site, layer}};
  spec.steps = hparams.v_num_grad_steps;
  spec.lr = hparams.v_lr;
  spec.weight_decay = hparams.v_weight_decay;
  spec.clamp_norm_factor = hparams.clamp_norm_factor;
  spec.kl_factor = hparams.kl_factor;
  spec.stop_loss = hparams.v_stop_loss;
  return spec;
}

}  // namespace

Preserved preserved_of(const LayerProblem& problem, double lambda, double ridge) {
  Preserved preserved;
  preserved.moment = problem.moment;
  preserved.lambda = lambda;
  preserved.ridge = problem.moment ? ridge : lambda + ridge;
  return preserved;
}

LayerUpdate closed_form(const LayerProblem& problem, const Preserved& preserved) {
  LayerUpdate update;
  const at::Tensor adj_FN = solve_keys(problem.keys_FN, preserved, {problem.dtype}, &update.solve);
  update.delta = WeightDelta::factors(problem.site, problem.residual_DN, adj_FN);
  return update;
}

LocateRecipe memit_recipe(std::string editor, nlohmann::json values, const hparams::LocateHparams& hparams,
                          const models::Model& model, const hparams::RawHparams& raw) {
  check_locate_hparams(hparams, model, raw);
  LocateRecipe recipe;
  recipe.editor = std::move(editor);
  recipe.hparams = std::move(values);
  recipe.common = hparams;
  recipe.targets = memit_targets(hparams, model);
  recipe.needs_statistics = hparams.mom2_adjustment;
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
      throw Error(ErrorClass::kInvalidArgument,
                  {raw.where("layers"), "layer " + std::to_string(layer), layer_range,
                   "the model has " + std::to_string(model.n_layers()) + " layers: use hyper-parameters made for it"});
    (void)model.edit_site(static_cast<int>(layer));
  }
  if (hparams.v_loss_layer && *hparams.v_loss_layer >= model.n_layers())
    throw Error(ErrorClass::kInvalidArgument,
                {raw.where("v_loss_layer"), "layer " + std::to_string(*hparams.v_loss_layer), layer_range,
                 "leave v_loss_layer out to use the last layer"});
  const auto& names = hparams.modules;
  models::check_module_names(model.family(), model.config(),
                             {names.layer_module_tmp, names.attn_module_tmp, names.mlp_module_tmp,
                              names.rewrite_module_tmp, names.ln_f_module, names.lm_head_module},
                             raw.source());
}

const ContextTemplates& ensure_contexts(const models::Model& model, const hparams::LocateHparams& hparams,
                                        ContextGrouping grouping, EditContext& context) {
  if (context.contexts) return *context.contexts;
  const auto sample = [&] {
    return sample_contexts(model, hparams.context_template_length_params, grouping, context.seed, context.log);
  };
  if (context.sharing.alone()) return context.contexts.emplace(sample());
  // Another processor may round a logit to another token: everyone uses the first process's.
  const std::string bytes = context.sharing.by_first([&] {
    const auto packed = nlohmann::json::to_msgpack(sample().groups);
    return std::string(packed.begin(), packed.end());
  });
  context.contexts = parse_contexts(nlohmann::json::from_msgpack(bytes), "contexts of the first process");
  context.contexts->sampled = true;
  context.contexts->seed = context.seed;
  return *context.contexts;
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

void prepare_statistics(const models::Model& model, const std::vector<int>& layers, const std::string& editor,
                        EditContext& context) {
  if (!context.statistics)
    throw Error(ErrorClass::kInvalidArgument, {editor, "no statistics", "second moments of the keys",
                                               "give a StatisticsProvider, or a corpus on the command line"});
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
