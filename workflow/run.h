// One run of an editor: evaluate, edit batch by batch, evaluate, save, report. It can be interrupted and taken up
// again.
//
//   workflow::Run run(model, facts, {.editor = "memit", .corpus = "wiki.jsonl", .out = "runs/mine", .resume = true});
//   run.execute();
//   std::cout << run.summary();          // and runs/mine holds report.html, results.json, the edit pack, …
//
// Goals: everything that memit_edit does between its options and its exit status. Non-goals: parsing options, printing.
#pragma once

#include <emend/evaluation/free_text.h>
#include <emend/evaluation/metric.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/checkpoint.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>
#include <emend/workflow/record.h>
#include <emend/workflow/run_directory.h>
#include <emend/workflow/session.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

class Run {
 public:
  /// Loads the facts and the model that the options name, checks the request, and opens the run folder. From then on
  /// `lent.log` also writes to its run.jsonl. `lent` must outlive the run.
  /// Throws what the readers throw; Error(kInvalidArgument) and Error(kUnsupported) for options that do not go
  /// together, Error(kDevice) if the work does not fit on the devices.
  Run(RunOptions options, Handles& lent);
  /// The same with a model and facts of the caller's, which `options.model` and `options.facts` do not name. The model
  /// must outlive the run and must not move; it stays edited after execute().
  Run(models::Model& model, datasets::FactSet facts, RunOptions options = {}, Handles lent = {});
  /// A run that did not come to its end leaves a lent model as it was, and its folder resumable.
  ~Run();

  /// Does the work. Of several processes the first one has the folder and writes. Throws Error(kCancelled) after saving
  /// the state, Error(kNumeric) if the collapse guard takes everything back.
  void execute();

  /// What execute() would do, as JSON.
  [[nodiscard]] nlohmann::ordered_json plan() const;
  [[nodiscard]] const RunRecord& record() const noexcept { return record_; }
  /// results.json
  [[nodiscard]] nlohmann::ordered_json results() const;
  /// cases.jsonl
  [[nodiscard]] std::vector<nlohmann::json> cases() const;
  /// The same for people.
  [[nodiscard]] std::string summary() const;
  /// As many facts are said as options.strict (all) or options.min_said ask for.
  [[nodiscard]] bool said_enough() const;
  /// Every fact failed.
  [[nodiscard]] bool nothing_edited() const;
  /// The edits: to ask the model, to undo.
  [[nodiscard]] Session& session() noexcept { return *session_; }
  [[nodiscard]] bool stopped() const noexcept { return session_->stopped(); }  ///< by the collapse guard

 private:
  void open();
  void open_folder(const models::Checkpoint& checkpoint);
  [[nodiscard]] std::shared_ptr<const models::Checkpoint> with_room(
      std::shared_ptr<const models::Checkpoint> checkpoint);
  void work();
  void evaluate_before();
  void edit_all();
  void edit_batch(size_t begin, size_t end);
  void resume(std::vector<Batch> batches);
  void finish();
  void finished(const Batch& batch);
  void compare_updates(const Batch& batch) const;
  void judge_alone(size_t begin, size_t end);
  void evaluate_between(size_t edits);
  void evaluate_state(size_t edits);
  [[nodiscard]] bool scheduled(size_t edits) const;
  void measure(size_t edits);
  [[nodiscard]] size_t in_force() const;
  void evaluate_after();
  void save_outputs();
  void write_documents();
  [[nodiscard]] nlohmann::json choices() const;
  [[nodiscard]] nlohmann::json settings() const;
  [[nodiscard]] size_t batch_size() const;
  [[nodiscard]] std::vector<datasets::Fact> shown_facts() const;
  void ask(const datasets::FactSet& asked, size_t begin, size_t end);
  void judge();

  RunOptions options_;
  Handles own_;
  Handles& lent_;
  EvalSchedule schedule_;
  datasets::FactSet facts_;
  std::optional<RunDirectory> folder_;
  std::optional<models::Model> own_model_;
  models::Model* model_ = nullptr;
  std::unique_ptr<Session> session_;
  std::optional<RunCheckpoint> checkpoint_;
  at::Tensor neutral_PV_;                     ///< of the lifelong protocol: measure_sequence compares with it
  std::vector<evaluation::Answer> answers_;   ///< one a fact
  std::optional<evaluation::Judging> alone_;  ///< of the single protocol
  RunRecord record_;
  double least_said_ = 0;  ///< of the facts, in percent
  double began_ = 0;
  bool begun_ = false, complete_ = false;
};

}  // namespace emend::workflow
