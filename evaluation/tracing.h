// Causal tracing (Meng et al. 2022, §2): which hidden states carry a fact.
//
// A run with a noised subject loses the answer; putting one clean state back (or the MLP or attention outputs of a
// window of layers at one token) shows how much of the answer that state restores. Noise: Gaussian with 3 times the
// standard deviation of the token embeddings of the subjects of the known facts (all entries of all their tokens, one
// number for the model), added to the subject's token embeddings; every figure is the mean over `samples` noise draws.
//
// Computed once: the clean run, and the noised runs with their keys and values. A restored state then only re-runs the
// tokens from its own on, and the layers above it; all states of a token share one batch. Draws stop early where the
// effect is already known: most states restore nothing, and two draws show it. What the noised runs, which have all
// draws, say about those that were left out then counts by the share of the noise's effect that is left.
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/datasets/fact.h>
#include <emend/models/model.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace emend::evaluation {

enum class TraceKind { kState, kMlp, kAttention };  ///< what is restored

struct TraceOptions {
  double noise_multiple = 3.0;  ///< of the embeddings' standard deviation; published value 3
  double noise = 0;             ///< standard deviation itself; 0: noise_multiple · embedding_deviation
  int samples = 10;             ///< noise draws at most, published value 10
  double precision = 0.05;      ///< a state gets no more draws once its standard error is below; 0: always `samples`
  int window = 10;              ///< layers restored together for MLP and attention, centred
  std::vector<TraceKind> kinds = {TraceKind::kState, TraceKind::kMlp, TraceKind::kAttention};
  int64_t max_facts = -1;       ///< correctly predicted facts to trace; -1: all
  bool any_answer = false;      ///< trace what the model says, right or wrong
  int64_t batch_tokens = 4096;  ///< of a forward pass, or one prompt
  uint64_t seed = 1;
  ProgressFn progress;  ///< phase "trace", in facts
  CancelToken cancel;
};

/// Restored probabilities of one fact: value[kind][token][layer].
struct FactTrace {
  datasets::Fact fact;
  std::vector<std::string> tokens;             ///< of the prompt, as text
  int64_t subject_begin = 0, subject_end = 0;  ///< token span
  int64_t answer = 0;                          ///< token id that the clean run predicts
  std::string answer_text;
  double clean = 0;      ///< probability of the answer
  double corrupted = 0;  ///< mean over the noised runs
  double draws = 0;      ///< noise draws of a state, on average
  std::map<TraceKind, std::vector<std::vector<double>>> restored;
};

/// Standard deviation of the embedding entries of the subjects' tokens. Throws Error(kNumeric) if it is not finite.
[[nodiscard]] double embedding_deviation(const models::Model& model, const std::vector<datasets::Fact>& facts);

/// Average indirect effect by kind of token, as the paper draws it.
struct TraceSummary {
  int64_t facts = 0;                           ///< traced
  int64_t skipped = 0;                         ///< not predicted correctly
  double noise = 0, clean = 0, corrupted = 0;  ///< means
  int window = 10, samples = 10, n_layers = 0;
  double precision = 0;
  /// "first subject token", "middle subject tokens", "last subject token", "first subsequent token",
  /// "further tokens", "last token"; effect[kind][row][layer] = mean (restored - corrupted); 0 facts give NaN (null in
  /// JSON).
  std::vector<std::string> rows;
  std::map<TraceKind, std::vector<std::vector<double>>> effect;
  std::vector<FactTrace> traces;
};

/// Traces the facts that the model predicts correctly (the first token of target_true is the clean argmax), or all.
/// Throws Error(kInvalidArgument) if a prompt has no {} for its subject, Error(kNumeric) for probabilities that are not
/// finite, Error(kCancelled).
[[nodiscard]] TraceSummary trace_facts(const models::Model& model, const std::vector<datasets::Fact>& facts,
                                       const TraceOptions& options);

/// Fills in `rows`, `effect` and the means from `traces`.
void average(TraceSummary& summary, const std::vector<TraceKind>& kinds);

[[nodiscard]] std::string_view to_string(TraceKind kind) noexcept;  ///< "state", "mlp", "attention"
[[nodiscard]] nlohmann::json to_json(const TraceSummary& summary);  ///< the members by their names
/// The layer with the largest average effect of MLP outputs at the subject's last token, among windows without the
/// first layer's MLP (which reads the noised embedding itself), and the `count` layers that end there, as the MEMIT
/// paper chooses its range: {"peak": 8, "layers": [4,5,6,7,8], "effect": 0.12, "standard_error": 0.02, "facts": 50,
/// "why": ["…"], "caveat": "…"}, the caveat being the line of `why` that speaks against them, or empty. Throws
/// Error(kInvalidArgument) if no MLP outputs were traced.
[[nodiscard]] nlohmann::json suggest_layers(const TraceSummary& summary, int count = 5);

/// A self-contained page (templates/page.html): the averages, what they suggest, and heat maps of the averages and of
/// the first 20 facts, as the ROME paper draws them.
[[nodiscard]] std::string trace_page(const TraceSummary& summary, const std::string& model_name);

}  // namespace emend::evaluation
