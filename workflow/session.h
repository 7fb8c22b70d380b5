// Editing a loaded model from a program, batch by batch: hyper-parameters, statistics, guard, progress, undo.
//
//   models::Model model = models::load_placed("models/gpt2-xl");
//   workflow::Session session(model, {.editor = "memit"}, {.progress = workflow::stopping(ask_the_window)});
//   session.edit(facts.facts);                       // may be called again: the next batch of the same sequence
//   session.save_pack("edit.safetensors");
//
// Goals: what a batch is, in one place, for programs and for Run (run.h), which adds evaluation, files and resuming.
// Non-goals: judging the outcome, choosing facts.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/packs/pack.h>
#include <emend/evaluation/evaluation.h>
#include <emend/workflow/changes.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>
#include <emend/workflow/record.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

struct SaveFormat;

/// A sequence of edits of one model by one editor. The model must outlive it and must not move. Ending the session
/// keeps changes of weights; what lies beside the weights (GRACE, WISE, IKE) is in force as long as the session lives.
class Session {
 public:
  /// Throws Error(kInvalidArgument) for an unknown editor and for options that do not fit, Error(kNotFound) if no
  /// preset fits.
  explicit Session(models::Model& model, RunOptions options = {}, Handles lent = {});
  /// With an editor of the caller's own; `editor`, `hparams` and `set` of the options are not looked at.
  Session(models::Model& model, std::unique_ptr<editors::Editor> editor, RunOptions options = {}, Handles lent = {});
  ~Session();

  /// Writes one batch of facts into the model. Same promises as Editor::edit. Where the collapse guard raises an alarm,
  /// options.on_collapse decides: a batch that is taken back has failed facts and no deltas, and after "stop" nothing
  /// more is edited; "revert" undoes everything and throws Error(kNumeric). The result is valid until the next call.
  /// With a `judge` the edit is alone: that is called while it is in force (also for one that the guard took back),
  /// then every byte comes back. It is no part of deltas(), pack() and what is saved.
  const Batch& edit(std::span<const datasets::Fact> facts, const std::function<void()>& judge = {});
  /// To be called once after the last batch: editors that correct the sum of all changes (PRUNE) do it here. Null where
  /// there is nothing to do.
  const Batch* finish();
  /// Takes the edits out and forgets them: the model has every byte that it had when the session began. What others
  /// (sessions, packs, of Changes) wrote since stays.
  void undo();

  /// Takes up a sequence that another session began on the same model: `batches` with their `facts`, and state() after
  /// them. In the single protocol nothing is written.
  void resume(std::vector<Batch> batches, std::span<const datasets::Fact> facts, SessionState state);
  /// What resume() needs beside the batches.
  [[nodiscard]] SessionState state() const;
  /// Calls `work` while one batch of the single protocol is in force once more.
  void during(const Batch& batch, const std::function<void()>& work);

  /// Of every batch, also of those that were judged and taken back.
  [[nodiscard]] const std::vector<Batch>& results() const noexcept { return results_; }
  [[nodiscard]] const std::vector<evaluation::GuardReading>& readings() const noexcept { return readings_; }
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }  ///< by the collapse guard
  /// Lets the deltas of the batches so far go, so that a long sequence needs no more memory than a short one: the
  /// change is from now on the difference between the weights and what they were.
  void forget_deltas();
  /// Facts that could not be edited, over all batches.
  [[nodiscard]] int64_t failed() const;
  /// What the model says to every fact so far: [{"case_id", "prompt", "target", "verdict", "reason", "text"}].
  [[nodiscard]] nlohmann::json verdicts() const;
  /// Throws Error(kInvalidArgument) for a form that holds the whole model where edits of others are in force in it,
  /// which that would leave out.
  void require_alone(const SaveFormat& format) const;
  /// Writes the change so far in one of the forms of save_formats.h. Throws Error(kUnsupported) if there is no such
  /// form of it, Error(kInvalidArgument) for what the model was loaded from (apart.h), for what is of another kind
  /// (require_own_kind) and what require_alone refuses, Error(kIo).
  void save(const std::string& form, const std::filesystem::path& out);
  /// The change so far: the batches' deltas, or one a weight after forget_deltas().
  [[nodiscard]] std::vector<editors::WeightDelta> deltas() const;
  /// The same as a pack, which no party (Changes) puts on top of it.
  [[nodiscard]] editors::EditPack pack();
  /// save() as a pack.
  void save_pack(const std::filesystem::path& path) { save("pack", path); }
  /// The facts as they are to be asked now: editors that speak through the prompt (IKE) stand in front of it.
  [[nodiscard]] datasets::FactSet asked(datasets::FactSet facts) const {
    return evaluation::asked(std::move(facts), front());
  }
  [[nodiscard]] evaluation::Front front() const {
    return [this](std::string_view prompt) { return editor_->prefix(prompt); };
  }

  [[nodiscard]] models::Model& model() const noexcept { return model_; }
  [[nodiscard]] editors::Editor& editor() const noexcept { return *editor_; }
  [[nodiscard]] editors::EditContext& context() noexcept { return context_; }  ///< of every batch
  [[nodiscard]] const std::string& compute_dtype() const noexcept { return compute_dtype_; }
  /// Holds the weights' bytes from before the first batch.
  [[nodiscard]] editors::EditTransaction& transaction() noexcept { return changes_.transaction(); }

 private:
  class Scope;
  void forget();
  void write_into(Scope& scope, Batch& result, std::span<const datasets::Fact> facts,
                  const std::function<void()>& judge);
  [[nodiscard]] std::string alarms(const Batch& result);
  void take_back(Scope& scope, const std::map<std::string, at::Tensor>& state);

  models::Model& model_;
  RunOptions options_;
  Handles lent_;
  std::unique_ptr<editors::Editor> editor_;
  std::unique_ptr<editors::StatisticsProvider> own_statistics_;
  Changes changes_;
  std::optional<evaluation::CollapseGuard> guard_;
  editors::EditContext context_;
  std::string compute_dtype_;
  std::vector<Batch> results_;
  std::vector<bool> taken_back_;  ///< of each: it is not in the model, nor in what is saved
  std::vector<evaluation::GuardReading> readings_;
  std::vector<datasets::Fact> facts_;
  bool stopped_ = false, forgets_ = false;
};

}  // namespace emend::workflow
