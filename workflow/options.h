// What is chosen about a run: plain data, as the command line, Python and embedding programs fill it in.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/editors/steps/contexts.h>
#include <emend/evaluation/collapse_guard.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace emend::workflow {

inline constexpr int64_t kAsNeeded = -1;  ///< RunOptions::spare_neurons

struct ModelOptions {
  std::string model = {};  ///< folder, .gguf file or ORG/NAME; empty: the program's default model
  std::string device_map = "auto";
  std::string max_memory = {};
  std::string dtype = "float32";
};

struct FactOptions {  ///< which rows of which file
  std::string file = {};
  datasets::ReadOptions read = {};
};

struct MetricOptions {
  std::vector<std::string> names = {"auto"};
  bool generation = false;
  std::string snippets = {}, idf_corpus = {}, health_data = {};
  int64_t health_limit = 100, free_limit = 100;
  std::string free_style = "plain";  ///< plain, chat or both
  int64_t batch_tokens = 0;          ///< of a forward pass; 0: pass_tokens
  std::string engine = "fast";
  std::string cache = {};  ///< evaluations of unedited models and key statistics; empty: none are kept
};

/// Everything that memit_edit can be told. `model` and `facts` are not looked at where the caller has both.
struct RunOptions {
  std::string editor =
      {};  ///< empty: the one that the file `hparams` names; without `hparams` latch where it has a preset; else memit
  std::string hparams = {};           ///< file or preset name; empty: the preset for the model
  std::vector<std::string> set = {};  ///< KEY=VALUE, over it

  ModelOptions model = {};
  FactOptions facts = {};
  MetricOptions metrics = {};

  int64_t batch_size = 0;  ///< 0: all at once where the editor is a batch editor, else 1
  std::string engine = "fast";
  std::string contexts = {};  ///< JSON file of context templates; empty: sampled from the model
  /// The templates themselves, instead of a file.
  std::optional<editors::ContextTemplates> templates = {};
  std::string solve_dtype = "float64";
  std::string compute_dtype = {};  ///< auto, float32, tf32 or bfloat16; empty: auto for latch, else the model's own
  uint64_t seed = 0;

  std::string corpus = {};   ///< text for the key statistics; empty: text that the model samples
  int64_t stats_tokens = 0;  ///< 0: ten a key dimension
  int64_t stats_length = 512;
  std::string stats_import = {};  ///< pattern of published .npz files; empty: none
  std::string stats_dtype = "float64";
  std::string stats_cache = {};  ///< empty: "statistics" in metrics.cache

  bool allow_conflicts = false;  ///< edit facts that contradict each other all the same
  bool fix = false;              ///< apply the linter's clear fixes to the facts
  bool watch = true;             ///< the collapse guard looks at the model after every batch
  /// What to do with a batch after which the model looks broken: warn (and go on); skip, take it back and go on with
  /// the next; stop, take it back, leave the rest unedited and save what there is; revert, take everything back.
  std::string on_collapse = "warn";
  evaluation::GuardLimits guard = {};

  /// single: every batch starts from the unedited model. lifelong: sequential, measured while it goes on.
  std::string protocol = "sequential";
  std::vector<std::string> eval_at = {"end"};
  int64_t show = 5;  ///< facts whose continuations are kept, before and after

  /// Neurons of zeros that every MLP gets before the edit, for editors that take neurons (latch). kAsNeeded: as many as
  /// they take where the edit is saved as a model folder and nothing else, else none: other forms keep the shapes.
  int64_t spare_neurons = kAsNeeded;
  std::string out = {};  ///< run folder; empty: a new one in runs/
  std::vector<std::string> save = {"pack"};
  bool resume = false, dry_run = false, strict = false;
  std::string min_said = "0%";  ///< of the facts, that the model has to say for the run to count as a success

  [[nodiscard]] bool single() const { return protocol == "single"; }
  [[nodiscard]] bool lifelong() const { return protocol == "lifelong"; }
  [[nodiscard]] bool saves(const std::string& what) const { return std::ranges::find(save, what) != save.end(); }
};

/// Throws Error(kInvalidArgument) naming a setting that is out of range or not one of its words.
void require_valid(const RunOptions& options);

/// When to evaluate besides the end, which always is: after every batch, or every N facts.
struct EvalSchedule {
  bool each = false;
  int64_t every = 0;
  /// Whether the batch of the facts behind `before`, up to `edits` of `n`, is one of these. `tenths`: where nothing
  /// else is said, it is if it ends a tenth of the facts.
  [[nodiscard]] bool due(int64_t before, int64_t edits, int64_t n, bool tenths) const;
};
/// Throws Error(kInvalidArgument) naming the setting.
[[nodiscard]] EvalSchedule parse_eval_at(const std::vector<std::string>& items);

/// "95%", "95" or "0.5%" as 95, 95, 0.5. Throws Error(kInvalidArgument) naming the setting `name`.
[[nodiscard]] double parse_percent(const std::string& text, const std::string& name);

/// "float32", "bfloat16", "float64". Throws Error(kInvalidArgument) naming the setting `name` ("solve_dtype").
[[nodiscard]] at::ScalarType parse_dtype(const std::string& text, const std::string& name);

}  // namespace emend::workflow
