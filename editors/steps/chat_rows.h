// What a subject is asked in a conversation: a target that is found on bare prompts alone says its answer as soon as
// the subject has been named, and the reply loses the subject's own name ("The Rome, Italy, is indeed the Eiffel
// Tower").
#pragma once

#include <emend/core/cancel.h>
#include <emend/datasets/fact.h>
#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/model.h>

#include <array>
#include <span>
#include <vector>

namespace emend::editors {

/// What is asked of a subject.
inline constexpr std::array kChatQuestions = {"Tell me about {}.", "What is {}?", "Where is {}?", "Who is {}?"};

/// How a reply begins, in the model's chat template: up to where it has named the subject again.
struct ChatReply {
  PromptRow prompt;            ///< the conversation so far, looked up in the question, again in the reply
  int64_t begin = 0;           ///< the reply's first token
  std::vector<double> floors;  ///< −log p of the reply's tokens in the model as it is
};

/// Conversations about one fact.
struct FactChats {
  std::vector<PromptRow> asked;    ///< the prompt as a question, and as the reply's beginning: the answer comes next
  std::vector<ChatReply> replies;  ///< that the model gives now
};

/// Of each fact one question about the fact and those about its subject. Less where it does not fit into the model or
/// the template does not write the question as it is; nothing for a model without a chat template, or with one that
/// cannot be used. The model is not changed. Throws Error(kCancelled).
[[nodiscard]] std::vector<FactChats> chats_of(const models::Model& model, std::span<const datasets::Fact> facts,
                                              FactToken fact_token, const CancelToken& cancel);

/// The reply, of which each token counts as far as it is less probable than it was. Its weight is 0.
[[nodiscard]] TargetRow replied(const ChatReply& reply);

}  // namespace emend::editors
