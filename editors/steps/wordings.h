// What the model that is edited writes of facts: other wordings, and names like a subject's.
#pragma once

#include <emend/core/cancel.h>
#include <emend/datasets/fact.h>
#include <emend/models/model.h>

#include <array>
#include <span>

namespace emend::editors {

/// Sentences in which a subject or a prompt stands while its gate learns.
inline constexpr std::array kMentions = {"{}", "What about {}", "Tell me about {}", "This is about {}", "Question: {}"};
/// What stands behind a subject that is a text's first token.
inline constexpr std::array kBehind = {"{}'s",  "{} is", "{} was",  "{},",    "{} and", "{} has",
                                       "{} in", "{} of", "{} will", "{} are", "{} (",   "{} often"};
/// Sentences that deny a prompt.
inline constexpr std::array kNegations = {"It is not true that {}", "It is false that {}", "I doubt that {}",
                                          "Nobody believes that {}"};

struct WritingOptions {
  int64_t count = 3;    ///< of a fact or subject, at most
  int64_t samples = 6;  ///< lines that the model writes for it
  uint64_t seed = 0;
  CancelToken cancel;
};

/// What stands before the answer in the first line of a text, with {} for the subject: "{} was born in" of "Marie Curie
/// was born in Paris." Empty if the line does not have the subject first and the answer, with words between, behind it.
[[nodiscard]] std::string wording_of(const std::string& text, const datasets::Fact& fact);

/// For each fact up to `count` beginnings of sentences that say it in other words, with {} for the subject: behind
/// three examples the model is asked to say prompt and new answer differently, and of each text that has the subject
/// before the answer, what stands before the answer is kept. Often fewer, sometimes none, as where the request does not
/// fit into the model. The model is not changed.
[[nodiscard]] std::vector<std::vector<std::string>> other_wordings(const models::Model& model,
                                                                   std::span<const datasets::Fact> facts,
                                                                   const WritingOptions& options);

/// The names in a list with commas but the last, perhaps cut off: once each, without those that contain the subject.
[[nodiscard]] std::vector<std::string> names_of(const std::string& list, const std::string& subject);

/// Names that end as the subject does and begin as others do. Of each of `names`: its first word, and all but its last,
/// in front of the subject's last word (of its last two where it has three); and its first word in the place of what
/// stands in the middle, and of one word there. "Naples International Airport", "Osaka Castle" → "Osaka Airport",
/// "Osaka International Airport", "Naples Osaka Airport". Of a name with the subject's first word, up to where they
/// part: "Naples Central Station" → "Naples Central Airport". Of words of six letters or more, half of each:
/// "Janakkala", "Helsinki" → "Helskkala". And up to twelve names with another number in a subject's: "Airbus A340" →
/// "Airbus A350", "Airbus A320". And other owners of what is somebody's: "My name" → "His name".
[[nodiscard]] std::vector<std::string> namesakes(const std::string& subject, std::span<const std::string> names);

/// Up to 201 words of a text, the most frequent first, that begin with a capital letter and are one token where they
/// begin a text: "The", "London".
[[nodiscard]] std::vector<std::string> words_that_begin(const models::Tokenizer& tokenizer,
                                                        const std::vector<std::vector<int64_t>>& rows);
/// The first 200 of them that are not `subject`.
[[nodiscard]] std::vector<std::string> without(std::vector<std::string> words, const std::string& subject);

/// For each subject up to `count` names of its kind: what the model writes behind three lists of names and the subject
/// ("Airbus A340," → "Airbus A350, Airbus A380"). Often fewer, sometimes none, as where the request does not fit into
/// the model. The model is not changed.
[[nodiscard]] std::vector<std::vector<std::string>> lookalikes(const models::Model& model,
                                                               std::span<const std::string> subjects,
                                                               const WritingOptions& options);

/// Of each subject up to `count` questions, with {} for it behind them ("The age of {} is"), that are not those of its
/// own prompts (ids): the model's next tokens behind both have little in common. Throws Error(kCancelled).
[[nodiscard]] std::vector<std::vector<std::string>> other_questions(
    const models::Model& model, std::span<const std::string> subjects,
    const std::vector<std::vector<std::vector<int64_t>>>& own, int64_t count, const CancelToken& cancel);

}  // namespace emend::editors
