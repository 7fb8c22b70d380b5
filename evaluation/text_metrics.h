// Measures on generated text: n-gram entropy (fluency) and TF-IDF similarity (consistency).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emend::evaluation {

/// Words and punctuation as NLTK's word_tokenize separates them (Penn Treebank rules on sentences): "don't" → "do",
/// "n't"; commas, quotes, brackets and a sentence's last full stop stand alone.
[[nodiscard]] std::vector<std::string> word_tokenize(std::string_view text);

/// Shannon entropy in bits of the frequencies of n-grams; 0 for a text shorter than n words.
[[nodiscard]] double ngram_entropy(const std::vector<std::string>& words, int n);

/// The published fluency of one text: mean(2/3 · H₂, 4/3 · H₃), in bits.
[[nodiscard]] double weighted_ngram_entropy(std::string_view text);
/// Mean over texts; 0 for none.
[[nodiscard]] double mean_ngram_entropy(const std::vector<std::string>& texts);

/// TF-IDF vectors with scikit-learn's defaults: lower case, tokens of two or more word characters, raw counts,
/// idf = ln((1+n)/(1+df)) + 1, rows of length 1.
class TfIdf {
 public:
  /// Learns vocabulary and idf. Documents may be empty; at least one word must occur.
  explicit TfIdf(const std::vector<std::string>& documents);

  /// Cosine of two texts' vectors; 0 if either has no known word.
  [[nodiscard]] double similarity(std::string_view a, std::string_view b) const;

 private:
  std::unordered_map<std::string, int64_t> vocabulary_;
  std::vector<double> idf_;
};

}  // namespace emend::evaluation
