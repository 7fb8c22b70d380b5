// What a run depends on, and what is refused before anything is loaded.
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/editors/registry.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>

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
}

// Hyper-parameters that no model could have, before one is loaded. A preset may only be found with the model.
void Run::check_hparams(const models::Checkpoint& checkpoint) const {
  std::optional<hparams::RawHparams> raw;
  try {
    raw = find_hparams(record_.editor, options_.hparams, options_.set, checkpoint, nullptr);
  } catch (const Error& error) {
    if (error.error_class() != ErrorClass::kNotFound || !options_.hparams.empty()) throw;
    return;
  }
  (void)editors::find_editor(record_.editor).effective(*raw, Log());
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
