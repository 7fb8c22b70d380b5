// What a run depends on, and what is refused before anything is loaded.
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/editors/registry.h>
#include <emend/models/config.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>

namespace emend::workflow {

// What decides the result and is known before the model is loaded.
nlohmann::json Run::choices() const {
  auto json = statistics_settings(options_);
  json.update({{"facts", facts_.fingerprint},
               {"editor", record_.editor},
               {"hparams", options_.hparams},
               {"set", options_.set},
               {"engine", options_.engine},
               {"dtype", options_.model.dtype},
               {"batch_size", options_.batch_size},
               {"protocol", options_.protocol},
               {"contexts", options_.templates ? nlohmann::json(options_.templates->groups) : nlohmann::json()},
               {"solve_dtype", options_.solve_dtype},
               {"compute_dtype", options_.compute_dtype},
               {"eval", record_.metrics},
               {"eval_at", options_.eval_at},
               {"generation", options_.metrics.generation},
               {"health_limit", options_.metrics.health_limit},
               {"on_collapse", options_.on_collapse},
               {"max_divergence", options_.guard.divergence},
               {"max_update", options_.guard.relative_update},
               {"max_condition", options_.guard.condition},
               {"fix", options_.fix},
               {"allow_conflicts", options_.allow_conflicts},
               {"show", options_.show},
               {"save", options_.save},
               {"resume", options_.resume},
               {"dry_run", options_.dry_run}});
  return json;
}

// Everything that decides the result; two runs with equal settings give equal packs.
nlohmann::json Run::settings() const {
  return {{"model", model_->fingerprint()},
          {"facts", facts_.fingerprint},
          {"editor", record_.editor},
          {"hparams", record_.hparams},
          {"seed", options_.seed},
          {"engine", options_.engine},
          {"dtype", options_.model.dtype},
          {"batch_size", batch_size()},
          {"protocol", options_.protocol},
          {"corpus", options_.corpus},
          {"stats_tokens", options_.stats_tokens},
          {"stats_import", options_.stats_import},
          {"stats_length", options_.stats_length},
          {"stats_dtype", options_.stats_dtype},
          {"solve_dtype", options_.solve_dtype},
          {"compute_dtype", record_.compute_dtype},
          {"contexts", options_.contexts}};
}

// Outputs that this editor cannot have, and files that are not there, are known before anything is loaded.
void Run::check_outputs() const {
  if (options_.saves("none") && options_.save.size() > 1)
    throw Error(ErrorClass::kInvalidArgument, {setting("save"), "none beside others", "none, or what to write", ""});
  if (const auto& names = record_.metrics;
      options_.metrics.health_data.empty() && std::find(names.begin(), names.end(), "health") != names.end())
    throw Error(ErrorClass::kInvalidArgument,
                {setting("eval", "health"), "no tasks", "a folder of them: " + setting("health_data"), ""});
  if (const auto& pattern = options_.stats_import; !pattern.empty() && pattern.find("{layer}") == std::string::npos)
    throw Error(ErrorClass::kInvalidArgument, {setting("stats_import"), "\"" + pattern + "\"",
                                               "a file a layer, {layer} standing for its number", ""});
  if (!editors::find_editor(record_.editor).changes_weights)
    for (const auto& format : save_formats())
      if (!format.beside && options_.saves(format.name))
        throw Error(ErrorClass::kUnsupported,
                    {setting("save", format.name), "an edit of " + record_.editor + " lies beside the weights",
                     "pack or model", "generate, chat and eval load it as a pack"});
  for (const auto& [name, path] :
       {std::pair("corpus", options_.corpus), std::pair("snippets", options_.metrics.snippets),
        std::pair("idf_corpus", options_.metrics.idf_corpus), std::pair("health_data", options_.metrics.health_data)})
    if (std::error_code failure; !path.empty() && !std::filesystem::exists(path, failure))
      throw Error(ErrorClass::kNotFound, {setting(name), "nothing at " + path, "a file or folder", "check the path"});
  std::error_code failure;
  for (const auto& [name, path] :
       {std::pair("cache", options_.metrics.cache), std::pair("stats_cache", options_.stats_cache)})
    if (std::filesystem::is_regular_file(path, failure))
      throw Error(ErrorClass::kIo, {setting(name), path + " is a file", "a folder", "name another one"});
}

// Hyper-parameters that this model cannot have, before it is loaded.
void Run::check_hparams(const models::Checkpoint& checkpoint) const {
  const auto raw = find_hparams(record_.editor, options_.hparams, options_.set, checkpoint);
  const auto effective = editors::find_editor(record_.editor).effective(raw, Log());
  int64_t known = 0;
  try {
    known = models::parse_config(checkpoint.config(), checkpoint.path().string()).n_layers;
  } catch (const Error&) {
    return;  // said where it is loaded
  }
  for (const char* name : {"layers", "v_loss_layer"}) {
    const auto value = effective.value(name, nlohmann::json());
    for (const auto& layer : value.is_array() ? value : nlohmann::json::array({value}))
      if (layer.is_number_integer() && layer.get<int64_t>() >= known)
        throw Error(ErrorClass::kInvalidArgument,
                    {raw.where(name), "layer " + layer.dump(), "0 to " + std::to_string(known - 1),
                     "the model has " + std::to_string(known) + " layers: use hyper-parameters made for it"});
  }
}

// The single protocol leaves no edits behind, so there is nothing to save and nothing to retain.
void Run::check_protocol() const {
  if (!options_.single()) return;
  evaluation::SeparateEvaluation::check(record_.metrics);
  for (const auto& format : save_formats())
    if (format.name != "pack" && options_.saves(format.name))
      throw Error(ErrorClass::kInvalidArgument,
                  {setting("save", format.name), "not with " + setting("protocol", "single"), "none",
                   "the edits are taken back; use " + setting("protocol", "sequential") + " to keep them"});
  if (schedule_.each || schedule_.every > 0)
    throw Error(ErrorClass::kInvalidArgument,
                {setting("eval_at"), "each or every=N with " + setting("protocol", "single"), "end",
                 "every fact is judged alone, right after its edit"});
  if (editors::find_editor(record_.editor).prompts())
    throw Error(ErrorClass::kUnsupported, {setting("protocol"), "single, with " + record_.editor, "sequential",
                                           record_.editor + " changes no weights: it has nothing to take back"});
}

}  // namespace emend::workflow
