// Known facts for causal tracing: prompts whose answer the model is believed to know (known_1000.json of the ROME
// release).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets {

struct KnownFact {
  int64_t known_id = 0;
  std::string subject;
  std::string attribute;                  ///< the right answer
  std::string prompt;                     ///< with the subject filled in
  size_t subject_at = std::string::npos;  ///< byte of `prompt` where the subject begins; npos: its first occurrence
  std::string relation_id;
  int64_t line = 0;

  /// Takes a prompt in which {} stands for `subject` (filled in and noted), or which names it.
  void set_prompt(const std::string& text);
};

/// Reads rows with subject, prompt and attribute. A row whose prompt does not contain its subject is an error.
/// Errors as load_facts.
[[nodiscard]] std::vector<KnownFact> parse_known_facts(std::string_view text, const std::string& name);

}  // namespace emend::datasets
