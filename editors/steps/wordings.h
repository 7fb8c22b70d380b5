// Other wordings of facts, written by the model that is edited.
#pragma once

#include <emend/core/cancel.h>
#include <emend/datasets/fact.h>
#include <emend/models/model.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace emend::editors {

struct WordingOptions {
  int64_t count = 3;    ///< of a fact, at most
  int64_t samples = 6;  ///< texts that the model writes for a fact
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
                                                                   const WordingOptions& options);

}  // namespace emend::editors
