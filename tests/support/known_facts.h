// A model that knows a fact, for verbs that work on known ones.
#pragma once

#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/models/model.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/tiny_model.h"

namespace emend::testing {

/// Writes folder/model, random, and folder/known.json with a prompt that it answers with a blank, the first token of
/// every target here.
inline void write_known_facts(const std::filesystem::path& folder) {
  std::vector<std::string> prompts;
  for (char last = '!'; last <= '~'; ++last)
    for (const char* middle : {" is ", " of a", " or x", " by 7"})
      prompts.push_back(std::string("The capital of France") + middle + last);
  for (uint64_t seed = 1; seed < 100; ++seed) {
    write_tiny_model(folder / "model", seed);
    const auto model = models::load_model((folder / "model").string());
    std::vector<std::vector<int64_t>> rows;
    for (const auto& prompt : prompts) rows.push_back(model.tokenizer().encode_ids(prompt));
    const auto batch = models::TokenBatch::from_rows(rows);
    const at::Tensor answers = model.forward(batch).logits.argmax(-1);
    for (size_t i = 0; i < prompts.size(); ++i)
      if (answers[batch.token(static_cast<int64_t>(i), -1)].item<int64_t>() == ' ') {
        const nlohmann::json known = {{{"prompt", prompts[i]}, {"subject", "France"}, {"attribute", "x"}}};
        write_file(folder / "known.json", known.dump());
        return;
      }
  }
  throw std::runtime_error("no model answers any prompt with a blank");
}

}  // namespace emend::testing
