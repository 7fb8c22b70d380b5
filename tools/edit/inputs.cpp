#include "inputs.h"

#include <emend/editors/shared_statistics.h>

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/datasets/corpus.h>
#include <emend/hparams/preset.h>
#include <emend/models/config.h>
#include <emend/models/family.h>

namespace emend::tools {
namespace {

hparams::ModelHints hints_of(const models::Checkpoint& checkpoint, const models::Model* model) {
  hparams::ModelHints hints;
  hints.names = {checkpoint.path().string(), checkpoint.path().filename().string()};
  for (const char* key : {"_name_or_path", "name", "general.name"})
    if (const auto it = checkpoint.config().find(key); it != checkpoint.config().end() && it->is_string())
      hints.names.push_back(it->get<std::string>());
  if (model) {
    hints.family = model->family().name;
    hints.n_layers = model->n_layers();
    hints.hidden = model->hidden_size();
  }
  return hints;
}

// The documents of a file, opened at each pass.
editors::StatisticsText corpus_text(const std::string& path) {
  editors::StatisticsText text;
  text.fingerprint = datasets::corpus_hash(path);
  text.name = std::filesystem::path(path).filename().string();
  text.each = [path](const std::function<bool(const std::string&)>& sink) {
    datasets::CorpusReader reader(path);
    for (auto document = reader.next(); document && sink(document->text);) document = reader.next();
  };
  return text;
}

std::string preset_list(const std::string& editor) {
  std::string names;
  for (const auto& preset : hparams::all_presets())
    if (preset.editor == editor) names += (names.empty() ? "" : ", ") + preset.name;
  return names.empty() ? "none" : names;
}

}  // namespace

hparams::RawHparams editor_hparams(const std::string& editor, const std::string& file_or_name,
                                   const std::vector<std::string>& set, const models::Checkpoint& checkpoint,
                                   const models::Model* model, const Common& common) {
  hparams::RawHparams raw;
  if (!file_or_name.empty()) {
    raw = hparams::load_file_or_preset(editor, file_or_name);
  } else if (const auto* preset = hparams::find_preset(editor, hints_of(checkpoint, model))) {
    raw = hparams::load_preset(*preset);
    common.log.info("hparams.preset", "hyper-parameters from the preset " + preset->path);
  } else {
    throw Error(
        ErrorClass::kNotFound,
        {"--hparams", "no preset of " + editor + " fits this model", "one of the presets: " + preset_list(editor),
         "name a preset or a file with --hparams; emend suggest makes one for a new model"});
  }
  for (const auto& assignment : set) raw.set(assignment);
  return raw;
}

std::optional<editors::ContextTemplates> named_contexts(const std::string& path) {
  if (path.empty()) return std::nullopt;
  const auto json = nlohmann::json::parse(read_file(path), nullptr, false);
  if (json.is_discarded())
    throw Error(ErrorClass::kInvalidArgument,
                {path, "not JSON", "a list of context templates, or a list of lists", ""});
  return editors::parse_contexts(json, path);
}

std::unique_ptr<editors::StatisticsProvider> statistics_provider(const EditOptions& options, const Common& common,
                                                                 devices::Collectives* group) {
  editors::StatisticsOptions statistics;
  statistics.tokens = options.stats_tokens;
  statistics.max_length = options.stats_length;
  statistics.dtype = parse_dtype(options.stats_dtype, "--stats-dtype");
  statistics.seed = options.seed;
  statistics.cache = options.stats_cache.empty() ? std::filesystem::path(options.metrics.cache) / "statistics"
                                                 : std::filesystem::path(options.stats_cache);
  statistics.cancel = common.cancel;
  statistics.progress = common.progress;
  statistics.log = common.log;
  std::optional<editors::StatisticsText> text;
  if (!options.corpus.empty()) text = corpus_text(options.corpus);
  if (group) return editors::make_shared_statistics(std::move(text), std::move(statistics), *group);
  return std::make_unique<editors::CorpusStatistics>(std::move(text), std::move(statistics));
}

std::string short_model_name(const models::Checkpoint& checkpoint) {
  const auto path = checkpoint.path();
  auto name = path.extension() == ".gguf" ? path.stem().string() : path.filename().string();
  return name.empty() ? path.parent_path().filename().string() : name;
}

}  // namespace emend::tools
