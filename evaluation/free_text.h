// What a model writes on its own: greedy continuations with a natural end, and how they are read.
//
// Goals: the text that a user would see, decoded without the answer's help ("The Mirage of Model Editing", arXiv
// 2502.11177). Non-goals: sampling (detail/generation.h), probabilities (scoring.h).
#pragma once

#include <emend/core/cancel.h>
#include <emend/core/log.h>
#include <emend/datasets/fact.h>
#include <emend/devices/work_sharing.h>
#include <emend/models/model.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace emend::evaluation {

struct Evaluation;

struct FreeTextOptions {
  int64_t max_tokens = 40;     ///< more only while the text is the beginning of a name
  bool whole_sentence = true;  ///< ends behind the first sentence; otherwise at max_tokens or the end of the text only
  /// Prompts are conversations as render_chat writes them: no special tokens are added to theirs.
  bool conversations = false;
  int64_t rows = 128;  ///< prompts that are continued together; does not change the texts
  /// For each prompt (or none) the names that its text may hold, such as the answer: no text ends inside of one.
  std::vector<std::vector<std::string>> names = {};
  /// For each prompt (or none) texts that its continuation may be like, such as the one from before an edit, likely
  /// ones first. They save time and change nothing (generation.h).
  std::vector<std::vector<std::string>> drafts = {};
  ProgressFn progress = {};  ///< phase "write"
  CancelToken cancel = {};
  devices::WorkSharing sharing = {};  ///< processes with the same model and prompts that share them
};

/// The continuation of one prompt, without the prompt and without special tokens.
struct FreeText {
  std::string text;
  std::vector<int64_t> ids;
};

/// Greedy continuations, in the order of the prompts. Each depends on its own prompt alone. Throws
/// Error(kInvalidArgument) for a prompt without tokens or longer than the model's positions, Error(kCancelled).
[[nodiscard]] std::vector<FreeText> write_on(const models::Model& model, const std::vector<std::string>& prompts,
                                             const FreeTextOptions& options = {});

/// What the model writes after a fact's own prompt, as far as it takes to tell whether it begins with the new answer.
struct Answer {
  bool said = false;
  std::string text;
};
[[nodiscard]] std::vector<Answer> answers(const models::Model& model, std::span<const datasets::Fact> facts,
                                          const FreeTextOptions& options = {});

/// The answer that a longer text of the same prompt shows; none where the text is a beginning of `target`.
[[nodiscard]] std::optional<Answer> answer_in(const std::string& text, const std::string& target);

/// What the family "free" has read after the prompt of the fact `place`; none where it has not, or not far enough.
[[nodiscard]] std::optional<Answer> answer_read(const Evaluation& evaluation, size_t place, const std::string& target);

/// What the family "free" has read beside the edited prompt: the first text of each kind, in both states.
struct FurtherText {
  std::string label;  ///< "in other words", "negated", "a neighbour", "in a chat"
  std::string prompt, before, after;
};
/// Of the family's values of one case; kinds that one of them lacks are left out.
[[nodiscard]] std::vector<FurtherText> further_texts(const nlohmann::json& before, const nlohmann::json& after);

/// True if a sentence has ended in `text`: a full stop, question or exclamation mark behind a letter or digit and, if
/// closing quotes or brackets follow, behind these, with white space or nothing next to it; "。" and its like; or a
/// line break behind text. A full stop behind a single capital ("J. Smith"), a title ("Dr. Grey") or inside a number
/// does not end one, and no mark inside of one of the `names` ("St. Louis", "Panic! at the Disco").
[[nodiscard]] bool sentence_ended(std::string_view text, const std::vector<std::string>& names = {});

/// Lower case, form KD, typographic marks as plain ones, white space collapsed, quotes and what else is no letter or
/// digit dropped at both ends.
[[nodiscard]] std::string plain_words(std::string_view text);
/// `text` begins with `answer` as whole words (compared as plain_words; an article in front of either does not count).
[[nodiscard]] bool begins_with(std::string_view text, std::string_view answer);
/// Both begin with the same word (compared as plain_words: what stands at its ends does not count).
[[nodiscard]] bool begins_alike(std::string_view text, std::string_view other);
/// Place of `answer` as whole words among the plain words of `text`; npos if it is not there. What stands inside of
/// `aside`, such as a subject that is repeated, does not count: "BMW" in "the BMW Z3".
[[nodiscard]] size_t place_of(std::string_view text, std::string_view answer, std::string_view aside = "");
/// What stands in `text` behind the first repetition of `sentence` (as whole words, compared as plain_words); all of it
/// where there is none. A view of `text`.
[[nodiscard]] std::string_view behind_repetition(std::string_view text, std::string_view sentence);
/// Where the last sentence of `text` begins, told by sentence_ended; text.size() for a text without words.
[[nodiscard]] size_t last_sentence(std::string_view text, const std::vector<std::string>& names = {});
/// A 3-gram of words stands in `text` at least four times.
[[nodiscard]] bool loops(std::string_view text);

}  // namespace emend::evaluation
