// What a run depends on, and what is refused before anything is loaded.
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/registry.h>
#include <emend/models/config.h>
#include <emend/models/spare_neurons.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>

namespace emend::workflow {

static nlohmann::json guard_settings(const RunOptions& options) {
  return {{"on_collapse", options.on_collapse},
          {"max_divergence", options.guard.divergence},
          {"max_update", options.guard.relative_update},
          {"max_condition", options.guard.condition}};
}

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
               {"eval_engine", options_.metrics.engine},
               {"strict", options_.strict},
               {"min_said", options_.min_said},
               {"health_limit", options_.metrics.health_limit},
               {"free_limit", options_.metrics.free_limit},
               {"free_style", options_.metrics.free_style},
               {"fix", options_.fix},
               {"allow_conflicts", options_.allow_conflicts},
               {"show", options_.show},
               {"save", options_.save},
               {"spare_neurons", options_.spare_neurons},
               {"resume", options_.resume},
               {"dry_run", options_.dry_run}});
  json.update(guard_settings(options_));
  return json;
}

// Everything that decides the result; two runs with equal settings give equal packs.
nlohmann::json Run::settings() const {
  auto json = statistics_settings(options_);
  json.erase("corpus_size");
  json["corpus_sha256"] = session_->context().statistics->describe().value("text_sha256", "");
  json.update({{"model_fingerprint", model_->fingerprint()},
               {"facts_fingerprint", facts_.fingerprint},
               {"editor", record_.editor},
               {"hparams", record_.hparams},
               {"engine", options_.engine},
               {"dtype", options_.model.dtype},
               {"batch_size", batch_size()},
               {"protocol", options_.protocol},
               {"solve_dtype", options_.solve_dtype},
               {"compute_dtype", record_.compute_dtype},
               {"contexts",
                options_.templates ? nlohmann::json(options_.templates->groups) : nlohmann::json(options_.contexts)}});
  if (options_.lifelong())  // all measurements of a sequence by the same rules
    json.update({{"eval_at", options_.eval_at},
                 {"health_data", options_.metrics.health_data},
                 {"health_limit", options_.metrics.health_limit},
                 {"free_limit", options_.metrics.free_limit},
                 {"free_style", options_.metrics.free_style}});
  json.update(guard_settings(options_));
  return json;
}

// The single protocol leaves no edits behind, so there is nothing to save and nothing to retain.
static void check_protocol(const RunOptions& options, const std::vector<std::string>& metrics) {
  if (!options.single()) return;
  evaluation::Judging::require_separate(metrics);
  for (const auto& format : save_formats())
    if (format.name != "pack" && options.saves(format.name))
      refuse({setting("save", format.name), "not with " + setting("protocol", "single"), "none",
              "the edits are taken back; use " + setting("protocol", "sequential") + " to keep them"});
  const auto schedule = parse_eval_at(options.eval_at);
  if (schedule.each || schedule.every > 0)
    refuse({setting("eval_at"), "each or every=N with " + setting("protocol", "single"), "end",
            "every fact is judged alone, right after its edit"});
  if (editors::find_editor(options.editor).prompts())
    throw Error(ErrorClass::kUnsupported, {setting("protocol"), "single, with " + options.editor, "sequential",
                                           options.editor + " changes no weights: it has nothing to take back"});
}

// An adapter of what has no place in one.
void check_adapter(const SaveFormat& format, const models::Model& model, const std::string& editor,
                   const nlohmann::json& hparams) {
  const auto& info = editors::find_editor(editor);
  if (format.adapter && info.changes_vectors && info.changes_vectors(model, hparams))
    throw Error(ErrorClass::kUnsupported,
                {setting("save", format.name), editor + " changes biases or norms of this model",
                 "a change of matrices alone", "save pack, model or gguf"});
}

// Outputs that this editor cannot have, and files that are not there, are known before anything is loaded.
void check_outputs(const RunOptions& options, const std::vector<std::string>& metrics) {
  check_protocol(options, metrics);
  if (options.saves("none") && options.save.size() > 1)
    refuse({setting("save"), "none beside others", "none, or what to write", ""});
  check_metrics(options.metrics, metrics, options.protocol == "lifelong");
  if (!editors::find_editor(options.editor).changes_weights)
    for (const auto& format : save_formats())
      if (!format.beside && options.saves(format.name))
        throw Error(ErrorClass::kUnsupported,
                    {setting("save", format.name), "an edit of " + options.editor + " lies beside the weights",
                     "pack or model", "generate, chat and eval load it as a pack"});
  for (const auto& [name, path] :
       {std::pair("corpus", options.corpus), std::pair("snippets", options.metrics.snippets),
        std::pair("idf_corpus", options.metrics.idf_corpus), std::pair("health_data", options.metrics.health_data)})
    if (std::error_code failure; !path.empty() && !std::filesystem::exists(path, failure))
      throw Error(ErrorClass::kNotFound, {setting(name), "nothing at " + path, "a file or folder", "check the path"});
  std::error_code failure;
  for (const auto& [name, path] :
       {std::pair("cache", options.metrics.cache), std::pair("stats_cache", options.stats_cache)})
    if (std::filesystem::is_regular_file(path, failure))
      throw Error(ErrorClass::kIo, {setting(name), path + " is a file", "a folder", "name another one"});
}

void check_metrics(const MetricOptions& options, const std::vector<std::string>& metrics, bool lifelong) {
  const auto measured = [&](const char* name) { return std::ranges::find(metrics, name) != metrics.end(); };
  if (options.health_data.empty() && measured("health"))
    refuse({setting("eval", "health"), "no tasks", "a folder of them: " + setting("health_data"), ""});
  if (!options.health_data.empty() && !measured("health") && !lifelong)
    refuse(
        {setting("health_data"), "nothing that reads it", setting("eval", "health") + " with it", "or leave it out"});
  if (!options.snippets.empty() && !measured("generation"))
    refuse({setting("snippets"), "nothing that reads them", setting("generation") + " with them", "or leave them out"});
  if (options.generation && !measured("generation") && !measured("easyedit"))
    refuse(
        {setting("generation"), "nothing that reads it", setting("eval", "easyedit") + " with it", "or leave it out"});
  const MetricOptions usual;
  const bool others = options.free_limit != usual.free_limit || options.free_style != usual.free_style;
  if (others && !measured("free") && !lifelong)
    refuse({setting(options.free_limit != usual.free_limit ? "free_limit" : "free_style"), "nothing that reads it",
            setting("eval", "free") + " with it", "or leave it out"});
}

void require_statistics(const RunOptions& options, const models::Checkpoint& checkpoint, nlohmann::json layers) {
  const std::string place = "{layer}", &pattern = options.stats_import;
  if (pattern.empty()) return;
  if (layers.size() != 1 && pattern.find(place) == std::string::npos)
    refuse(
        {setting("stats_import"), "\"" + pattern + "\"", "a file a layer, " + place + " standing for its number", ""});
  const bool any = layers.is_null();  // one is enough
  const auto known = models::parse_config(checkpoint.config(), checkpoint.path().string()).n_layers;
  for (int64_t layer = 0; any && layer < known; ++layer) layers.push_back(layer);
  std::string missing;
  for (const auto& layer : layers) {
    const std::string path = replace_all(pattern, place, layer.dump());
    std::error_code failure;
    const bool there = std::filesystem::is_regular_file(path, failure);
    if (there && any) return;
    if (!there && missing.empty()) missing = path;
  }
  if (!missing.empty())
    throw Error(ErrorClass::kNotFound, {setting("stats_import"), "no file " + missing,
                                        "statistics of this model's layers", "check the pattern"});
}

void require_layers(const nlohmann::json& layers, const models::Checkpoint& checkpoint, const std::string& where,
                    const std::string& advice) {
  int64_t known = 0;
  try {
    known = models::parse_config(checkpoint.config(), checkpoint.path().string()).n_layers;
  } catch (const Error&) {
    return;  // said where it is loaded
  }
  for (const auto& layer : layers.is_array() ? layers : nlohmann::json::array({layers}))
    if (layer.is_number_integer() && layer.get<int64_t>() >= known)
      refuse({where, "layer " + layer.dump(), "0 to " + std::to_string(known - 1),
              "the model has " + std::to_string(known) + " layers" + advice});
}

int64_t room_to_add(const RunOptions& options, const models::Checkpoint& checkpoint,
                    std::span<const datasets::Fact> facts) {
  const bool as_folder = options.save == std::vector<std::string>{"model"};
  const bool edited = !editors::lineage_of(checkpoint.path()).edits.empty();
  const auto refuse_room = [](const std::string& got, const std::string& expected) {
    refuse({setting("spare_neurons"), got, expected,
            "make room first: emend convert MODEL DIR, with " + setting("spare_neurons")});
  };
  if (options.spare_neurons == 0) return 0;
  if (options.spare_neurons != kAsNeeded) {
    if (!as_folder && !options.saves("none"))
      refuse_room("with " + setting("save", join(options.save)), setting("save") + " model or none");
    if (edited) refuse_room("a folder with edits in force", "one without");
    return options.spare_neurons;
  }
  const auto& editor = editors::find_editor(options.editor);
  if (!editor.neurons || !as_folder || edited) return 0;
  const auto config = models::parse_config(checkpoint.config(), checkpoint.path().string());
  if (!config.no_edit_site.empty()) return 0;  // experts: the editor says so itself
  const auto hparams = editor.effective(find_hparams(options.editor, options.hparams, options.set, checkpoint), Log());
  constexpr int64_t kBlock = 32;
  int64_t lacking = 0;
  const size_t all = std::max<size_t>(1, facts.size());
  const size_t batch = options.batch_size > 0 ? std::min(all, static_cast<size_t>(options.batch_size)) : all;
  for (const auto& [layer, taken] : editor.neurons(hparams, facts, editor.batch ? batch : 1))
    lacking = std::max(lacking, taken - models::idle_neurons(checkpoint, layer));
  return (lacking + kBlock - 1) / kBlock * kBlock;
}

// Hyper-parameters that this model cannot have, before it is loaded.
void check_hparams(const RunOptions& options, const models::Checkpoint& checkpoint) {
  const auto raw = find_hparams(options.editor, options.hparams, options.set, checkpoint);
  const auto effective = editors::find_editor(options.editor).effective(raw, Log());
  for (const char* name : {"layers", "v_loss_layer"})
    require_layers(effective.value(name, nlohmann::json()), checkpoint, raw.where(name),
                   ": use hyper-parameters made for it");
  if (editors::find_editor(options.editor).reads_moments(effective))
    require_statistics(options, checkpoint, effective.value("layers", nlohmann::json()));
}

}  // namespace emend::workflow
