// What the family "free" asks a model, in words.
#pragma once

#include <emend/datasets/fact.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace emend::evaluation::detail {

/// One text that is to be written, and where it belongs.
struct AskedText {
  size_t fact = 0;       ///< of the set
  std::string kind;      ///< "edit", "paraphrase", …
  bool chat = false;     ///< `prompt` is a message that the model answers, not a text that it continues
  std::string prompt;    ///< as the model gets it, but for the chat template
  std::string sentence;  ///< of a chat: the sentence to be completed, or the question; an answer may repeat it
  std::vector<std::string> answers = {};  ///< of probes; empty: the fact's own

  /// Under which the text stands in cases.jsonl: "edit", "edit_chat".
  [[nodiscard]] std::string group() const { return chat ? kind + "_chat" : kind; }
};

/// The kinds of texts: what the new answer is asked for with; what comes from probes with answers of their own.
[[nodiscard]] bool asks_for_new(std::string_view kind);
[[nodiscard]] bool is_probe(std::string_view kind);

/// What is asked of the facts [begin, end), in an order that depends on them alone; the hops and questions of groups
/// (MQuAKE) whose facts are all among them. `told` puts each fact in front of its own texts, as IKE tells it.
[[nodiscard]] std::vector<AskedText> asked_texts(const datasets::FactSet& facts, size_t begin, size_t end, bool chat,
                                                 bool told);

/// The subjects of a set, in the form that neighbors_of compares.
[[nodiscard]] std::set<std::string> edited_subjects(const datasets::FactSet& set);

/// What must not change: the fact's own neighbours, or, where it brings none, well-known subjects that are not `edited`
/// in its prompt.
[[nodiscard]] std::vector<std::string> neighbors_of(const datasets::Fact& fact, const std::set<std::string>& edited);

/// `text` as a user's message: a question as it is; otherwise its last sentence is to be completed, behind what stands
/// in front of it. No sentence ends inside of `subject`.
[[nodiscard]] std::string as_message(const std::string& text, const std::string& subject);

}  // namespace emend::evaluation::detail
