// The prompts at which LATCH's gates learn to open and to stay shut (methods/latch.cpp).
#pragma once

#include <emend/editors/detail/latch_gates.h>
#include <emend/editors/steps/chat_rows.h>

#include <span>
#include <string>
#include <vector>

namespace emend::editors::detail {

/// What a batch knows of its facts.
struct FactTexts {
  std::span<const datasets::Fact> facts;
  const RenderedBatch& batch;
  const std::vector<FactChats>& chats;  ///< a rendered fact each
};

/// A text's first token has much the same state in the layers of gates, whatever it is (an attention sink). A subject
/// that is one, where there is no BOS, is read off the token behind it.
[[nodiscard]] PromptRow off_the_sink(PromptRow row);
/// A sentence about the subject, so read. Throws what render_prompt throws.
[[nodiscard]] PromptRow gate_prompt(const models::Tokenizer& tokenizer, const std::string& sentence,
                                    const std::string& subject, FactToken token);

/// Gives each fact of the batch a row for each of its other wordings, which `reader` writes, in front of the two forms
/// that end its rows. Throws Error(kCancelled).
void add_wordings(const LatchHparams& hparams, std::span<const datasets::Fact> facts, const models::Model& reader,
                  const EditContext& context, RenderedBatch& batch);

/// For all units of a stage, of which each gets its ranges and what its model heeds. Those of subjects: open at the
/// subject, shut behind negations that the model heeds, at names like it and behind other questions. Those of releases
/// (units in `release_layers`): open at an answer's last token, shut where it has not been said yet, at the subject,
/// and at the same words elsewhere. `reader` writes what is needed for it. Throws Error(kCancelled).
[[nodiscard]] std::vector<PromptRow> gate_prompts(const LatchHparams& hparams, const FactTexts& texts,
                                                  const LatchTexts& text, const models::Model& reader,
                                                  const EditContext& context, std::vector<LatchUnit>& units);

}  // namespace emend::editors::detail
