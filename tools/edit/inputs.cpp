#include "inputs.h"

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/datasets/corpus.h>
#include <emend/editors/published_statistics.h>
#include <emend/editors/session.h>
#include <emend/editors/shared_statistics.h>

namespace emend::tools {
namespace {

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

}  // namespace

hparams::RawHparams editor_hparams(const std::string& editor, const std::string& file_or_name,
                                   const std::vector<std::string>& set, const models::Checkpoint& checkpoint,
                                   const models::Model* model, const Common& common) {
  return editors::find_hparams(editor, file_or_name, set, checkpoint, model, common.log);
}

std::optional<editors::ContextTemplates> named_contexts(const std::string& path) {
  if (path.empty()) return std::nullopt;
  const auto json = nlohmann::json::parse(read_file(path), nullptr, false);
  if (json.is_discarded())
    throw Error(ErrorClass::kInvalidArgument,
                {path, "not JSON", "a list of context templates, or a list of lists", ""});
  return editors::parse_contexts(json, path);
}

std::unique_ptr<editors::StatisticsProvider> statistics_provider(const EditOptions& options, const Common& common) {
  if (!options.stats_import.empty()) return editors::make_published_statistics(options.stats_import, common.log);
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
  if (common.group) return editors::make_shared_statistics(std::move(text), std::move(statistics), *common.group);
  return std::make_unique<editors::CorpusStatistics>(std::move(text), std::move(statistics));
}

std::string short_model_name(const models::Checkpoint& checkpoint) {
  const auto path = checkpoint.path();
  auto name = path.extension() == ".gguf" ? path.stem().string() : path.filename().string();
  return name.empty() ? path.parent_path().filename().string() : name;
}

}  // namespace emend::tools
