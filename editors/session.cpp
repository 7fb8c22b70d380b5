#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/runtime.h>
#include <emend/editors/session.h>
#include <emend/hparams/preset.h>
#include <emend/models/checkpoint.h>
#include <emend/models/family.h>

namespace emend::editors {
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

std::string preset_list(const std::string& editor) {
  std::string names;
  for (const auto& preset : hparams::all_presets())
    if (preset.editor == editor) names += (names.empty() ? "" : ", ") + preset.name;
  return names.empty() ? "none" : names;
}

std::unique_ptr<Editor> editor_for(const models::Model& model, std::string_view name, const SessionOptions& options) {
  const auto& info = find_editor(name);
  const auto raw = find_hparams(info.name, options.hparams, options.set, model.checkpoint(), &model, options.log);
  return info.make(raw, model, options.log);
}

}  // namespace

hparams::RawHparams find_hparams(const std::string& editor, const std::string& file_or_name,
                                 const std::vector<std::string>& set, const models::Checkpoint& checkpoint,
                                 const models::Model* model, const Log& log) {
  hparams::RawHparams raw;
  if (!file_or_name.empty()) {
    raw = hparams::load_file_or_preset(editor, file_or_name);
  } else if (const auto* preset = hparams::find_preset(editor, hints_of(checkpoint, model))) {
    raw = hparams::load_preset(*preset);
    log.info("hparams.preset", "hyper-parameters from the preset " + preset->path);
  } else {
    throw Error(
        ErrorClass::kNotFound,
        {"--hparams", "no preset of " + editor + " fits this model", "one of the presets: " + preset_list(editor),
         "name a preset or a file with --hparams; emend suggest makes one for a new model"});
  }
  for (const auto& assignment : set) raw.set(assignment);
  return raw;
}

Session::Session(models::Model& model, std::string_view editor, SessionOptions options)
    : model_(model), editor_(editor_for(model, editor, options)), options_(std::move(options)) {
  prepare();
}

Session::Session(models::Model& model, std::unique_ptr<Editor> editor, SessionOptions options)
    : model_(model), editor_(std::move(editor)), options_(std::move(options)) {
  if (!editor_) throw Error(ErrorClass::kInvalidArgument, {"Session", "no editor", "an editor", "make one first"});
  prepare();
}

Session::~Session() {
  transaction_->commit();
}

void Session::prepare() {
  transaction_ = std::make_unique<EditTransaction>(model_);
  context_.seed = options_.seed;
  context_.engine = options_.engine;
  context_.contexts = options_.contexts;
  context_.cancel = options_.cancel;
  context_.log = options_.log;
  if (options_.progress)
    context_.progress = [this](const ProgressUpdate& update) {
      if (!options_.progress(update))
        throw Error(ErrorClass::kCancelled,
                    {update.phase, "stopped by the progress callback", "", "edit again to go on"});
    };
  context_.statistics = options_.statistics;
  if (context_.statistics) return;
  StatisticsOptions statistics;
  statistics.tokens = options_.statistics_tokens;
  statistics.seed = options_.seed;
  statistics.cache = options_.cache;
  statistics.cancel = options_.cancel;
  statistics.progress = context_.progress;
  statistics.log = options_.log;
  std::optional<StatisticsText> text;
  if (!options_.corpus.empty()) text = StatisticsText::from_file(options_.corpus);
  own_statistics_ = std::make_unique<CorpusStatistics>(std::move(text), std::move(statistics));
  context_.statistics = own_statistics_.get();
}

const EditResult& Session::edit(std::span<const datasets::Fact> facts) {
  for (const auto& fact : facts) datasets::validate(fact);
  EditTransaction batch(model_, transaction_.get());
  context_.transaction = &batch;
  EditResult result = editor_->edit(model_, facts, context_);
  batch.commit();
  facts_.insert(facts_.end(), facts.begin(), facts.end());
  return results_.emplace_back(std::move(result));
}

void Session::finish() {
  EditTransaction scope(model_, transaction_.get());
  context_.transaction = &scope;
  auto result = editor_->finish(model_, context_);
  scope.commit();
  if (result) results_.push_back(std::move(*result));
}

void Session::undo() {
  transaction_->restore();
  editor_->reset();
  results_.clear();
  facts_.clear();
}

int64_t Session::failed() const {
  int64_t count = 0;
  for (const auto& result : results_) count += result.failed();
  return count;
}

EditPack Session::pack() const {
  auto pack = EditPack::from_results(model_, results_, facts_);
  pack.editor = editor_->name();
  pack.hparams = editor_->hparams();
  pack.runtime = editor_->runtime();
  return pack;
}

void Session::save_pack(const std::filesystem::path& path) const {
  editors::save_pack(path, pack());
}

datasets::FactSet Session::asked(datasets::FactSet facts) const {
  RuntimeScope prompts;
  for (const auto& part : editor_->runtime())
    if (part.kind == "ike") prompts.add(part, model_, editor_->name());
  return prompts.empty() ? facts : prompts.with_prefixes(std::move(facts));
}

}  // namespace emend::editors
