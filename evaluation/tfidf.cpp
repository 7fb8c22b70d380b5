#include <Eigen/SparseCore>

#include <emend/core/error.h>
#include <emend/core/regex.h>
#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/text_metrics.h>

#include <cmath>
#include <set>

namespace emend::evaluation {
namespace {

using Vector = Eigen::SparseVector<double>;

/// Counts times idf, scaled to length 1.
Vector weigh(std::string_view text, const std::unordered_map<std::string, int64_t>& vocabulary,
             const std::vector<double>& idf) {
  std::map<int64_t, double> counts;
  for (const auto& token : tfidf_tokens(text))
    if (const auto at = vocabulary.find(token); at != vocabulary.end()) counts[at->second] += 1;
  Vector vector(static_cast<Eigen::Index>(idf.size()));
  for (const auto& [index, count] : counts) vector.insert(index) = count * idf[static_cast<size_t>(index)];
  const double length = vector.norm();
  if (length > 0) vector /= length;
  return vector;
}

}  // namespace

std::vector<std::string> tfidf_tokens(std::string_view text) {
  static const Regex words("\\b\\w\\w+\\b");
  return words.find_all(detail::lower_case(text));
}

TfIdf::TfIdf(const std::vector<std::string>& documents) {
  std::map<std::string, int64_t> document_counts;  // sorted, so indices do not depend on the order of documents
  for (const auto& document : documents) {
    const auto tokens = tfidf_tokens(document);
    for (const auto& token : std::set<std::string>(tokens.begin(), tokens.end())) ++document_counts[token];
  }
  if (document_counts.empty())
    throw Error(ErrorClass::kInvalidArgument,
                {"reference texts", "no word in " + std::to_string(documents.size()) + " documents",
                 "at least one word of two letters", "check the file with the reference texts"});
  const auto n = static_cast<double>(documents.size());
  for (const auto& [token, count] : document_counts) {
    vocabulary_.emplace(token, static_cast<int64_t>(idf_.size()));
    idf_.push_back(std::log((1 + n) / (1 + static_cast<double>(count))) + 1);
  }
}

std::map<std::string, double> TfIdf::transform(std::string_view text) const {
  const Vector vector = weigh(text, vocabulary_, idf_);
  std::map<std::string, double> weights;
  for (const auto& token : tfidf_tokens(text))
    if (const auto at = vocabulary_.find(token); at != vocabulary_.end()) weights[token] = vector.coeff(at->second);
  return weights;
}

double TfIdf::similarity(std::string_view a, std::string_view b) const {
  return weigh(a, vocabulary_, idf_).dot(weigh(b, vocabulary_, idf_));
}

}  // namespace emend::evaluation
