// Editing a loaded model from a program, in a few lines: hyper-parameters, statistics, batches, progress, undo.
//
//   models::Model model = models::load_placed("models/gpt2-xl");
//   editors::Session session(model, "memit", {.progress = [](const ProgressUpdate& p) { return !window_closed(p); }});
//   session.edit(facts.facts);                       // may be called again: the next batch of the same sequence
//   session.save_pack("edit.safetensors");
//
// Goals: what a program needs around an Editor (editor.h) in one object, with the rules that memit_edit follows.
// Non-goals: judging the outcome (evaluation::evaluate), resumable runs (memit_edit), choosing facts.
#pragma once

#include <emend/editors/editor.h>
#include <emend/editors/pack.h>
#include <emend/editors/statistics.h>
#include <emend/hparams/raw.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace emend::editors {

/// The hyper-parameters that a program uses: a file, a preset by name, or (empty) the preset that fits the model; then
/// `set`, assignments "v_lr=0.1". `model` may be null where only the checkpoint is open.
/// Throws Error(kNotFound) listing the editor's presets if nothing was named and none fits, and what the readers throw.
[[nodiscard]] hparams::RawHparams find_hparams(const std::string& editor, const std::string& file_or_name,
                                               const std::vector<std::string>& set,
                                               const models::Checkpoint& checkpoint, const models::Model* model,
                                               const Log& log = {});

struct SessionOptions {
  std::string hparams = {};           ///< file or preset; empty: the preset that fits the model
  std::vector<std::string> set = {};  ///< "v_lr=0.1", over it
  /// Text for the second moments of the keys; empty: text that the model samples. Read when first needed.
  std::filesystem::path corpus = {};
  int64_t statistics_tokens = 0;     ///< 0: ten a key dimension
  std::filesystem::path cache = {};  ///< folder that remembers statistics; empty: none
  /// Statistics of the caller's own, used instead of corpus, tokens and cache; must outlive the session.
  StatisticsProvider* statistics = nullptr;
  std::optional<ContextTemplates> contexts = {};  ///< empty: sampled from the model at the first edit
  uint64_t seed = 0;
  Engine engine = Engine::kFast;
  /// Called between steps with what is done; returning false ends the edit there with Error(kCancelled). It may throw.
  /// Either way every weight has the bytes it had before the call of edit(), and the session can go on.
  std::function<bool(const ProgressUpdate&)> progress = {};
  CancelToken cancel = {};  ///< the same from another thread or a signal handler, for good
  Log log = {};
};

/// A sequence of edits of one model by one editor. The model must outlive it and must not move. Ending the session
/// keeps changes of weights; what lies beside the weights (GRACE, WISE, IKE) is in force as long as the session lives.
class Session {
 public:
  /// Throws Error(kInvalidArgument) for an unknown editor and for hyper-parameters that do not fit, Error(kNotFound)
  /// if no preset fits.
  Session(models::Model& model, std::string_view editor, SessionOptions options = {});
  /// With an editor of the caller's own; `hparams` and `set` are not looked at.
  Session(models::Model& model, std::unique_ptr<Editor> editor, SessionOptions options = {});
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Writes one batch of facts into the model. Same promises as Editor::edit. The result is valid
  /// until the next call.
  const EditResult& edit(std::span<const datasets::Fact> facts);
  /// To be called once after the last batch: editors that correct the sum of all changes (PRUNE) do it here.
  void finish();
  /// Gives the model back every byte that it had when the session began, and forgets the edits.
  void undo();

  [[nodiscard]] const std::vector<EditResult>& results() const noexcept { return results_; }
  /// Facts that could not be edited, over all batches.
  [[nodiscard]] int64_t failed() const;
  /// The change so far, as a pack.
  [[nodiscard]] EditPack pack() const;
  /// Throws Error(kIo).
  void save_pack(const std::filesystem::path& path) const;
  /// The facts as they are to be asked now: editors that speak through the prompt (IKE) stand in front of it.
  [[nodiscard]] datasets::FactSet asked(datasets::FactSet facts) const;

  [[nodiscard]] models::Model& model() const noexcept { return model_; }
  [[nodiscard]] Editor& editor() const noexcept { return *editor_; }

 private:
  void prepare();

  models::Model& model_;
  std::unique_ptr<Editor> editor_;
  SessionOptions options_;
  std::unique_ptr<StatisticsProvider> own_statistics_;
  std::unique_ptr<EditTransaction> transaction_;
  EditContext context_;
  std::vector<EditResult> results_;
  std::vector<datasets::Fact> facts_;
};

}  // namespace emend::editors
