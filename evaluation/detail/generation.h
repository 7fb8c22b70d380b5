// Sampled text as the published evaluations draw it, and reference texts: attribute_snippets.json of the ROME release,
// or a file of the same form.
#pragma once

#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/text_metrics.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::evaluation::detail {

/// One sample for each prompt: top-k 5, temperature 1, `options.generation_length` tokens with the prompt's, no stop at
/// the end-of-sequence token; decoded, NFKD, "\n\n" becomes a space. The texts begin with the prompts. Prompts that are
/// already that long come back as they are. What is drawn for a text depends on `options.seed` and its number, `first`
/// and the place in `prompts`, whatever it is sampled together with.
[[nodiscard]] std::vector<std::string> generate_texts(const models::Model& model,
                                                      const std::vector<std::string>& prompts,
                                                      const EvaluateOptions& options, size_t first = 0);

class Snippets {
 public:
  /// `path`: a list of {"relation_id", "target_id", "samples": [{"name", "text"}]}. Document frequencies come from
  /// `idf_corpus` (datasets/corpus.h) or, if that is empty, from the snippets. Throws Error(kNotFound, kIo),
  /// Error(kCorruption) naming file and entry.
  Snippets(const std::filesystem::path& path, const std::filesystem::path& idf_corpus);

  /// Cosine of the texts and the references for the fact's relation and new target; absent if there are none.
  [[nodiscard]] std::optional<double> similarity(const datasets::Fact& fact,
                                                 const std::vector<std::string>& texts) const;
  /// The references named after the subject (of the old target), joined; empty if there is none.
  [[nodiscard]] std::string own_text(const datasets::Fact& fact) const;

 private:
  struct Sample {
    std::string name, text;
  };
  std::map<std::pair<std::string, std::string>, std::vector<Sample>> samples_;  // relation, target
  std::optional<TfIdf> vectors_;
};

/// The target's Wikidata id where the facts file has one ("new" or "true"), else empty.
[[nodiscard]] std::string target_id(const datasets::Fact& fact, const std::string& which);
/// Hash of a file's bytes for cache keys; null for an empty path.
[[nodiscard]] nlohmann::json file_key(const std::filesystem::path& path);

}  // namespace emend::evaluation::detail
