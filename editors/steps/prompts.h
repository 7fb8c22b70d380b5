// From facts to token rows: which tokens a prompt has, where its subject is, which tokens the target adds.
//
// Every row's tokens come from encoding its whole string once; the subject is then found by character offsets, never by
// adding up the lengths of separately encoded pieces. The target's tokens are appended as ids, not encoded again.
#pragma once

#include <emend/datasets/fact.h>
#include <emend/editors/steps/contexts.h>

namespace emend::models {
struct Encoding;
class Tokenizer;
}  // namespace emend::models

namespace emend::editors {

/// Where a fact is looked up (`fact_token` in hyper-parameter files).
enum class FactToken {
  kSubjectLast,            ///< last token that overlaps the subject's last character
  kSubjectFirst,           ///< first token that overlaps its first character
  kSubjectFirstAfterLast,  ///< the token after the subject; the subject's last token if nothing follows
  kLast,                   ///< last token of the prompt
};
/// "subject_last", "subject_first", "subject_first_after_last", "last". Throws Error(kInvalidArgument) with a near one.
[[nodiscard]] FactToken parse_fact_token(std::string_view text);

/// One sentence with its subject filled in, without the target.
struct PromptRow {
  std::string text;
  std::vector<int64_t> ids;                   ///< with BOS where the tokenizer adds it
  int64_t lookup = 0;                         ///< index into ids
  std::pair<int64_t, int64_t> subject{0, 0};  ///< tokens that overlap the subject, half open
  std::vector<int64_t> again = {};            ///< further indices where the text names its subject again
};

struct RenderedFact {
  int64_t case_id = 0;
  std::string where;            ///< for messages
  std::string subject, target;  ///< the target with its leading space
  std::vector<int64_t> target_ids;
  std::vector<PromptRow> rows;     ///< one a context, in flat order; rows[0] is the plain prompt
  std::vector<PromptRow> kl_rows;  ///< one a KL prompt
};

struct RenderOptions {
  FactToken fact_token = FactToken::kSubjectLast;
  std::vector<std::string> kl_prompts = {"{} is a"};  ///< the subject takes the place of {}
};

/// One space in front unless the target begins with one.
[[nodiscard]] std::string with_leading_space(std::string_view target);

/// Ids of `target` (already with its space) as they follow `prompt`, which evaluations score. Where a merge crosses the
/// border, those of the target alone, encoded without special tokens; a leading BOS or UNK is dropped.
[[nodiscard]] std::vector<int64_t> target_token_ids(const models::Tokenizer& tokenizer, std::string_view prompt,
                                                    std::string_view target);

/// The token of a text with which the subject, its bytes [first, second), is looked up; -1 if it has no token.
[[nodiscard]] int64_t looked_up_token(const models::Encoding& encoding, std::string_view text,
                                      std::pair<size_t, size_t> subject, FactToken fact_token);

/// `template_text` has exactly one "{}", the subject's place.
[[nodiscard]] PromptRow render_prompt(const models::Tokenizer& tokenizer, std::string_view template_text,
                                      std::string_view subject, FactToken fact_token);

/// All rows of a fact. Throws Error(kInvalidArgument) naming the fact if a subject has no token of its own or the
/// target has no tokens.
[[nodiscard]] RenderedFact render_prompts(const models::Tokenizer& tokenizer, const datasets::Fact& fact,
                                          const ContextTemplates& contexts, const RenderOptions& options = {});

/// `row` with the target's ids behind it, all but the last (the model never reads the last one).
[[nodiscard]] std::vector<int64_t> with_target(const PromptRow& row, const std::vector<int64_t>& target_ids);

}  // namespace emend::editors
