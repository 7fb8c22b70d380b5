#include "run.h"

#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/devices/route.h>
#include <emend/editors/ledger.h>
#include <emend/editors/pack.h>
#include <emend/editors/registry.h>
#include <emend/editors/runtime.h>
#include <emend/evaluation/report.h>
#include <emend/models/family.h>

#include <chrono>
#include <iostream>

#include "../compute_options.h"
#include "../run_directory.h"
#include "documents.h"
#include "guards.h"
#include "inputs.h"
#include "outputs.h"
#include "preflight.h"

namespace emend::tools {
namespace {

// Adds the seconds of a scope to a phase.
class PhaseTimer {
 public:
  PhaseTimer(std::map<std::string, double>& seconds, std::string phase) : seconds_(seconds), phase_(std::move(phase)) {}
  ~PhaseTimer() {
    seconds_[phase_] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::map<std::string, double>& seconds_;
  std::string phase_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class EditRun {
 public:
  EditRun(const EditOptions& options, Common& common)
      : options_(options),
        common_(common),
        schedule_(parse_eval_at(options.eval_at)),
        on_collapse_(parse_on_collapse(options.on_collapse)) {}

  int execute() {
    {
      const PhaseTimer total(record_.seconds, "total");
      open();
      if (options_.dry_run) return dry_run();
      evaluate_before();
      edit_all();
      evaluate_after();
      if (folder_) save_outputs(options_, *folder_, facts_, *model_, *transaction_, common_.log, record_);
    }
    if (folder_) {
      write_documents();
      checkpoint_->remove();
      print();
    }
    if (stopped_) return exit_code(ErrorClass::kNumeric);
    return options_.strict && record_.failed > 0 ? 6 : 0;
  }

 private:
  void open();
  void open_folder(const models::Checkpoint& checkpoint);
  int dry_run();
  void evaluate_before();
  void edit_all();
  void edit_batch(size_t begin, size_t end);
  void compare_updates(const editors::EditResult& result) const;
  [[nodiscard]] bool keep(editors::EditResult& result, std::span<const datasets::Fact> facts);
  void resume();
  void finish();
  void check_protocol() const;
  void judge_alone(size_t begin, size_t end);
  void judge_again();
  void close_alone(editors::EditResult& result);
  void take_back(editors::EditTransaction& batch, const std::map<std::string, at::Tensor>& state);
  void evaluate_between(size_t edits);
  void evaluate_after();
  void write_documents();
  void print() const;
  [[nodiscard]] nlohmann::json settings() const;
  [[nodiscard]] size_t batch_size() const;
  [[nodiscard]] std::vector<datasets::Fact> shown_facts() const;
  [[nodiscard]] datasets::FactSet asked_facts(datasets::FactSet facts) const;

  const EditOptions& options_;
  Common& common_;
  EvalSchedule schedule_;
  OnCollapse on_collapse_;
  bool stopped_ = false;  ///< by the collapse guard
  datasets::FactSet facts_;
  std::optional<RunDirectory> folder_;
  std::optional<models::Model> model_;
  std::unique_ptr<editors::Editor> editor_;
  std::unique_ptr<editors::StatisticsProvider> statistics_;
  std::unique_ptr<editors::EditTransaction> transaction_;
  std::optional<RunCheckpoint> checkpoint_;
  std::optional<evaluation::CollapseGuard> guard_;
  std::optional<evaluation::SeparateEvaluation> alone_;  ///< of the single protocol
  editors::EditContext context_;
  RunRecord record_;
};

void EditRun::open() {
  const PhaseTimer timer(record_.seconds, "load");
  record_.command_line = common_.command_line;
  record_.editor = editors::find_editor(options_.editor).name;
  facts_ = load_named_facts(options_.facts, common_);
  record_.metrics = evaluation::resolve_metrics(options_.metrics.names, facts_);
  check_protocol();
  const auto contexts = named_contexts(options_.contexts);
  const auto checkpoint = open_named(options_.model);
  record_.model_path = checkpoint->path().string();
  if (!editors::active_runtime_packs(checkpoint->path()).empty())
    common_.log.warning("edit.beside", record_.model_path +
                                           " has edits beside its weights in force: they take no part "
                                           "in this run");
  // The run folder comes before the slow part, so that a folder that cannot be used is known at once.
  if (!options_.dry_run)
    record_.out = common_.sharing.by_first([&] {
      open_folder(*checkpoint);
      return folder_->path().string();
    });
  require_room(options_, *checkpoint, facts_, common_);
  model_.emplace(load_named(checkpoint, options_.model, common_));
  check_outputs(options_, *model_);
  facts_ = check_request(std::move(facts_), *model_, options_, common_, record_.findings);
  const auto raw = editor_hparams(record_.editor, options_.hparams, options_.set, *checkpoint, &*model_, common_);
  editor_ = editors::make_editor(record_.editor, raw, *model_, common_.log);
  record_.hparams = editor_->hparams();
  statistics_ = statistics_provider(options_, common_);

  context_.seed = options_.seed;
  context_.engine = editors::parse_engine(options_.engine);
  context_.contexts = contexts;
  context_.statistics = statistics_.get();
  context_.solve_dtype = parse_dtype(options_.solve_dtype, "--solve-dtype");
  context_.sharing = common_.sharing;
  const auto compute = chosen_compute(options_.compute_dtype, context_.engine, *model_);
  context_.compute_dtype = compute.dtype;
  context_.tf32 = compute.tf32;
  record_.compute_dtype = compute.name;
  context_.cancel = common_.cancel;
  context_.progress = common_.progress;
  context_.log = common_.log;
  transaction_ = std::make_unique<editors::EditTransaction>(*model_);
  if (!options_.dry_run) guard_.emplace(*model_, options_.guard);
  if (!options_.dry_run)
    checkpoint_.emplace(std::filesystem::path(record_.out) / "checkpoint", settings(), options_.resume, !folder_);
}

// Of several processes the first one has the folder and writes.
void EditRun::open_folder(const models::Checkpoint& checkpoint) {
  folder_.emplace(options_.out.empty() ? RunDirectory::default_name(record_.editor, short_model_name(checkpoint))
                                       : std::filesystem::path(options_.out),
                  options_.resume);
  common_.log = common_.log_also_to(*folder_ / "run.jsonl");
  common_.log.event(LogLevel::kDebug, "run.begin", "", {{"command", record_.command_line}});
}

// The single protocol leaves no edits behind, so there is nothing to save and nothing to retain.
void EditRun::check_protocol() const {
  if (!options_.single()) return;
  evaluation::SeparateEvaluation::check(record_.metrics);
  for (const char* what : {"model", "gguf", "peft"})
    if (options_.saves(what))
      throw Error(ErrorClass::kInvalidArgument, {"--save", what + std::string(" with --protocol single"), "none",
                                                 "the edits are taken back; use --protocol sequential to keep them"});
  if (schedule_.each || schedule_.every > 0)
    throw Error(ErrorClass::kInvalidArgument, {"--eval-at", "each or every=N with --protocol single", "end",
                                               "every fact is judged alone, right after its edit"});
  if (record_.editor == "ike")
    throw Error(ErrorClass::kUnsupported, {"--protocol", "single, with ike", "sequential",
                                           "ike changes no weights: it has nothing to take back"});
}

// Everything that decides the result; two runs with equal settings give equal packs.
nlohmann::json EditRun::settings() const {
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

size_t EditRun::batch_size() const {
  if (options_.batch_size > 0) return static_cast<size_t>(options_.batch_size);
  return editor_->is_batch_editor() && !options_.single() ? std::max<size_t>(1, facts_.facts.size()) : 1;
}

std::vector<datasets::Fact> EditRun::shown_facts() const {
  const size_t n = std::min<size_t>(options_.show, facts_.facts.size());
  return {facts_.facts.begin(), facts_.facts.begin() + n};
}

int EditRun::dry_run() {
  const size_t batch = batch_size();
  nlohmann::ordered_json plan = {
      {"editor", record_.editor},
      {"hparams", record_.hparams},
      {"facts", facts_.facts.size()},
      {"batches", (facts_.facts.size() + batch - 1) / batch},
      {"batch_size", batch},
      {"statistics_layers", editor_->statistics_layers()},
      {"metrics", record_.metrics},
      {"device_map", model_->placement().to_json(models::device_module_names(model_->family(), model_->config()))}};
  if (common_.sharing.first()) std::cout << dump_json(plan) << '\n';
  return 0;
}

void EditRun::evaluate_before() {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (!record_.metrics.empty()) {
    bool cached = false;
    record_.before = evaluation::evaluate_before(
        *model_, facts_, record_.metrics, evaluate_options(options_.metrics, common_, options_.seed),
        std::filesystem::path(options_.metrics.cache) / "evaluations", &cached);
    common_.log.info("evaluate.before",
                     cached ? "evaluation of the unedited model taken from the cache" : "evaluated the unedited model");
  }
  if (options_.single() && !record_.metrics.empty()) {
    auto evaluate = evaluate_options(options_.metrics, common_, options_.seed);
    evaluate.before = &*record_.before;
    alone_.emplace(facts_, record_.metrics, evaluate);
  }
  if (options_.show > 0)
    record_.text_before = evaluation::continue_facts(*model_, shown_facts(), 12, 5, common_.cancel);
}

void EditRun::edit_all() {
  record_.batches = checkpoint_->load(common_.log);
  if (!common_.sharing.equal(std::to_string(record_.batches.size())))
    throw Error(ErrorClass::kInvalidArgument,
                {"--resume", "the processes find different numbers of finished batches", "one run folder for all",
                 "put --out on a file system that all machines share"});
  if (!record_.batches.empty()) resume();
  const devices::TransferScope transfers;
  const size_t size = batch_size(), n = facts_.facts.size();
  for (size_t begin = record_.batches.size() * size; begin < n; begin += size)
    edit_batch(begin, std::min(n, begin + size));
  if (!options_.single() && !record_.batches.empty() && !record_.batches.back().closing) finish();
  record_.transfers = transfers.to_json();
  record_.statistics = statistics_->describe();
  for (const auto& batch : record_.batches)
    for (const auto& outcome : batch.outcomes) record_.failed += outcome.value("status", "") == "failed";
  record_.weights_changed = transaction_->changed();
}

// The model, the editor and the measurements as they were after the last finished batch.
void EditRun::resume() {
  const auto& batches = record_.batches;
  common_.log.info("run.resume", "going on after " + std::to_string(batches.size()) + " finished batches");
  // The statistics of a run are those of the unedited model.
  if (const auto layers = editor_->statistics_layers(); !layers.empty()) statistics_->prepare(*model_, layers);
  if (!batches.back().contexts.is_null())
    context_.contexts = editors::parse_contexts(batches.back().contexts, "checkpoint");
  if (options_.single()) return judge_again();
  reapply(batches, *transaction_);
  editor_->load_state(checkpoint_->editor_state(batches.size()));
  record_.runtime = editor_->runtime();
  const size_t done = std::min(facts_.facts.size(), batches.size() * batch_size());
  size_t last = 0;
  if (const auto measured = checkpoint_->measured(done); !measured.is_null()) {
    record_.efficacy_by_edits = measured.at("efficacy_by_edits");
    record_.retention = evaluation::RetentionMatrix::from_json(measured.at("retention"));
    last = record_.efficacy_by_edits.back().at("edits");
  }
  if (last < done) evaluate_between(done);
}

// The single protocol, while the edits of the facts [begin, end) are in force.
void EditRun::judge_alone(size_t begin, size_t end) {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (alone_) alone_->judge(*model_, begin, end);
  const auto shown = shown_facts();
  if (begin >= shown.size()) return;
  const std::vector<datasets::Fact> facts(shown.begin() + begin, shown.begin() + std::min(end, shown.size()));
  for (auto& text : evaluation::continue_facts(*model_, facts, 12, 5, common_.cancel))
    record_.text_after.push_back(std::move(text));
}

// What the editor does after the last batch; in the single protocol every batch is the last.
void EditRun::close_alone(editors::EditResult& result) {
  if (auto closing = editor_->finish(*model_, context_))
    for (auto& delta : closing->deltas) result.deltas.push_back(std::move(delta));
}

// The finished batches of an interrupted run in the single protocol: each is put in force once more. One that left no
// delta (it failed, was taken back, or lay beside the weights) is edited again, with those after it.
void EditRun::judge_again() {
  for (size_t i = 0; i < record_.batches.size(); ++i) {
    if (record_.batches[i].deltas.empty()) return record_.batches.resize(i);
    editors::EditTransaction batch(*model_, transaction_.get());
    reapply({record_.batches[i]}, batch);
    judge_alone(i * batch_size(), std::min(facts_.facts.size(), (i + 1) * batch_size()));
    batch.restore();
  }
}

// The model and the editor as they were before the batch.
void EditRun::take_back(editors::EditTransaction& batch, const std::map<std::string, at::Tensor>& state) {
  batch.restore();
  editor_->reset();
  editor_->load_state(state);
}

// What the editor does once, after the last batch.
void EditRun::finish() {
  common_.cancel.check("edit");
  editors::EditTransaction scope(*model_, transaction_.get());
  context_.transaction = &scope;
  const auto result = editor_->finish(*model_, context_);
  scope.commit();
  if (!result) return;
  for (const auto& [phase, seconds] : result->seconds) record_.seconds[phase] += seconds;
  record_.batches.push_back(finished_batch(*result));
  record_.batches.back().closing = true;
  checkpoint_->save(record_.batches.size() - 1, record_.batches.back(), editor_->state());
  common_.log.event(LogLevel::kInfo, "edit.finish", "corrected the sum of all changes", result->to_json());
}

void EditRun::edit_batch(size_t begin, size_t end) {
  common_.cancel.check("edit");
  const std::span<const datasets::Fact> facts(facts_.facts.data() + begin, end - begin);
  editors::EditResult result;
  if (stopped_) {
    result.editor = record_.editor;
    result.outcomes = failed_outcomes(facts, "not edited: the collapse guard had stopped the run");
    if (options_.single()) judge_alone(begin, end);
  } else {
    editors::EditTransaction batch(*model_, transaction_.get());
    context_.transaction = &batch;
    const auto state = editor_->state();
    result = editor_->edit(*model_, facts, context_);
    const bool kept = keep(result, facts);
    if (!kept) take_back(batch, state);
    if (options_.single()) {
      if (kept) close_alone(result);
      judge_alone(begin, end);
      if (kept) take_back(batch, state);
    }
    batch.commit();
  }
  for (const auto& [phase, seconds] : result.seconds) record_.seconds[phase] += seconds;
  compare_updates(result);
  record_.batches.push_back(finished_batch(result));
  checkpoint_->save(record_.batches.size() - 1, record_.batches.back(), editor_->state());
  common_.log.event(LogLevel::kInfo, "edit.batch",
                    "edited facts " + std::to_string(begin + 1) + "-" + std::to_string(end) + " of " +
                        std::to_string(facts_.facts.size()),
                    result.to_json());
  if (options_.single()) return;
  record_.runtime = editor_->runtime();
  evaluate_between(end);
}

// Processes insert the same targets with the same keys. Processors of different kinds round differently; what is saved
// is the first process's.
void EditRun::compare_updates(const editors::EditResult& result) const {
  if (common_.sharing.alone()) return;
  Sha256 hash;
  for (const auto& delta : result.deltas)
    for (const auto* part : {&delta.left_DR, &delta.right_FR, &delta.dense_DF})
      if (part->defined()) {
        const at::Tensor host = devices::to_host(part->detach()).contiguous();
        hash.update(host.const_data_ptr(), host.numel() * host.element_size());
      }
  if (!common_.sharing.equal(hash.hex()))
    common_.log.warning("processes.rounding",
                        "the processes' updates differ in rounding (are the machines of different kinds?): the first "
                        "process's are kept");
}

// False if the batch is to be taken back: `result` then says so for every fact and has no delta.
bool EditRun::keep(editors::EditResult& result, std::span<const datasets::Fact> facts) {
  const auto reading = read_guard(*guard_, *model_, result);
  record_.guard.push_back(evaluation::to_json(reading));
  if (reading.alarms.empty()) return true;
  std::string why;
  for (const auto& alarm : reading.alarms) why += (why.empty() ? "" : "; ") + alarm;
  common_.log.event(LogLevel::kWarning, "edit.collapse", "the model may be broken after this batch: " + why,
                    record_.guard.back());
  if (on_collapse_ == OnCollapse::kWarn) return true;
  if (on_collapse_ == OnCollapse::kRevert)
    throw Error(ErrorClass::kNumeric,
                {"collapse guard", why, "a model that stays within the limits of --max-…",
                 "nothing was saved; use smaller batches, another editor, or --on-collapse skip"});
  stopped_ = on_collapse_ == OnCollapse::kStop;
  result.deltas.clear();
  result.layers.clear();
  result.outcomes = failed_outcomes(facts, "taken back by the collapse guard: " + why);
  return false;
}

// The state after some of the facts, for retention; the state after all of them is evaluated in full by evaluate_after.
void EditRun::evaluate_between(size_t edits) {
  const size_t before = edits == 0 ? 0 : (edits - 1) / batch_size() * batch_size();
  const bool due = schedule_.each || (schedule_.every > 0 && edits / schedule_.every > before / schedule_.every);
  if (!due) return;
  const PhaseTimer timer(record_.seconds, "evaluate");
  evaluation::ScoreOptions score;
  score.sharing = common_.sharing;
  const auto efficacy = evaluation::evaluate_efficacy(*model_, asked_facts(facts_).facts, score);
  record_.retention.add(static_cast<int64_t>(edits), efficacy);
  int64_t successes = 0;
  for (size_t i = 0; i < edits; ++i) successes += efficacy[i].success();
  record_.efficacy_by_edits.push_back(
      {{"edits", edits}, {"efficacy_success", 100.0 * successes / static_cast<double>(edits)}});
  checkpoint_->save_measured(
      {{"efficacy_by_edits", record_.efficacy_by_edits}, {"retention", record_.retention.to_json()}});
}

// The facts as they are asked after the edits: editors that speak through the prompt (IKE) stand in front of it. The
// edits themselves are in force as long as the editor lives.
datasets::FactSet EditRun::asked_facts(datasets::FactSet facts) const {
  editors::RuntimeScope prompts;
  for (const auto& part : record_.runtime)
    if (part.kind == "ike") prompts.add(part, *model_, record_.editor);
  return prompts.empty() ? facts : prompts.with_prefixes(std::move(facts));
}

void EditRun::evaluate_after() {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (options_.single()) {
    if (alone_) record_.after = alone_->finish();
    return;
  }
  if (!record_.metrics.empty()) {
    auto evaluate = evaluate_options(options_.metrics, common_, options_.seed);
    evaluate.before = &*record_.before;
    record_.after = evaluation::evaluate(*model_, asked_facts(facts_), record_.metrics, evaluate);
  }
  if (options_.show == 0) return;
  datasets::FactSet shown;
  shown.facts = shown_facts();
  record_.text_after = evaluation::continue_facts(*model_, asked_facts(std::move(shown)).facts, 12, 5, common_.cancel);
}

void EditRun::write_documents() {
  for (const char* phase : {"statistics", "targets", "insert", "evaluate"}) record_.seconds.try_emplace(phase, 0.0);
  evaluation::RunReport report;
  report.cases = case_documents(record_, facts_);
  folder_->write_lines("cases.jsonl", report.cases);
  report.extras = report_extras(record_, facts_, *model_);
  folder_->write_json("report.json", report.extras);
  const auto results = results_document(record_, options_, facts_, *model_);
  report.results = results;
  evaluation::write_report(*folder_ / "report.html", report);
  evaluation::write_metrics_csv(*folder_ / "metrics.csv", report);
  record_.files["report"] = (*folder_ / "report.html").string();
  record_.files["results"] = (*folder_ / "results.json").string();
  folder_->write_json("results.json", results);  // last: its presence says that the run is complete
}

void EditRun::print() const {
  if (common_.json) {
    std::cout << dump_json(results_document(record_, options_, facts_, *model_)) << '\n';
  } else {
    std::cout << summary_text(record_, facts_);
  }
}

}  // namespace

int run_edit(const EditOptions& options, Common& common) {
  return EditRun(options, common).execute();
}

}  // namespace emend::tools
