// Generated text (Meng et al. 2022): fluency, consistency with reference texts, and how well the model still knows the
// subject's own description.
//
//   ngram_entropy    one sample for each generation prompt; mean over the texts of mean(2/3·H2, 4/3·H3), × 100
//   reference_score  cosine between TF-IDF vectors of a record's texts joined by spaces and of the reference texts for
//                    (relation, new target) joined by spaces, × 100; null without a file of reference texts
//   essence_score    perplexity of up to 100 tokens of the reference texts named after the subject: exp(-Σ log p /
//                    tokens), the first token counted in the divisor as published; null where there is none
#include <emend/core/error.h>
#include <emend/evaluation/detail/generation.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/text_metrics.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

class Generation final : public Metric {
 public:
  using Metric::Metric;

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    outcome_.cases.resize(context.facts.facts.size());
    for (json& row : outcome_.cases) row["essence_score"] = row["reference_score"] = nullptr;
    if (context.options.snippets.empty()) return;
    snippets_ = std::make_unique<detail::Snippets>(context.options.snippets, context.options.idf_corpus);
    for (size_t i = 0; context.model && i < outcome_.cases.size(); ++i) plan_essence(context, i, sheet);
  }

  void measure(const MetricContext& context) override {
    EMEND_CHECK(context.model != nullptr, "generation needs a model");
    std::vector<std::string> prompts;
    std::vector<size_t> owner;
    const auto& facts = context.facts.facts;
    for (size_t i = 0; i < facts.size(); ++i)
      for (const auto& prompt : facts[i].generation_prompts.empty() ? std::vector<std::string>{facts[i].full_prompt()}
                                                                    : facts[i].generation_prompts) {
        prompts.push_back(context.options.asked(prompt));
        owner.push_back(i);
      }
    const auto texts = detail::generate_texts(*context.model, prompts, context.options);
    for (size_t i = 0, at = 0; i < facts.size(); ++i) {
      std::vector<std::string> own;
      for (; at < texts.size() && owner[at] == i; ++at) own.push_back(texts[at]);
      json& row = outcome_.cases[i];
      row["ngram_entropy"] = mean_ngram_entropy(own);
      if (snippets_) row["reference_score"] = detail::or_null(snippets_->similarity(facts[i], own));
      row["text"] = own;
    }
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override {
    return {options.generation_length, options.seed, detail::file_key(options.snippets),
            detail::file_key(options.idf_corpus)};
  }

 private:
  /// A text is scored as its first word followed by the rest: the tokens behind the first word are predicted.
  void plan_essence(const MetricContext& context, size_t i, ScoreSheet& sheet) {
    const auto text = snippets_->own_text(context.facts.facts[i]);
    const size_t space = text.find(' ');
    if (text.empty() || space == std::string::npos || space + 1 >= text.size()) return;
    // Cut to 100 tokens at a word, so that the words before the cut keep their tokens.
    const auto encoded = context.model->tokenizer().encode(text);
    size_t end = text.size();
    if (encoded.size() > 100) end = text.rfind(' ', encoded.offsets[100].first);
    if (end == std::string::npos || end <= space + 1) return;
    sheet.add(i, text.substr(0, space), text.substr(space + 1, end - space - 1),
              [&essence = outcome_.cases[i]["essence_score"]](const Score& score) {
                essence = std::exp(-score.total_log_prob() / static_cast<double>(score.labels.size() + 1));
              });
  }

  std::unique_ptr<detail::Snippets> snippets_;
};

}  // namespace

MetricInfo make_generation() {
  return {"generation",
          "fluency (n-gram entropy) and consistency (TF-IDF with reference texts) of sampled text; slow",
          "ROME and MEMIT (Meng et al. 2022/23): top-k 5, 100 tokens",
          3,
          {
              {"ngram_entropy", "GE", "Weighted entropy of the 2- and 3-grams of sampled texts; repetition lowers it.",
               "bit × 100", true, value_of("ngram_entropy")},
              {"reference_score", "RS",
               "Cosine of TF-IDF vectors of the sampled texts and reference texts about the new target.", "× 100", true,
               value_of("reference_score")},
              {"essence_score", "Essence",
               "Perplexity of a reference text about the subject; a rise means the subject's nature was lost.",
               "perplexity", false, value_of("essence_score"), "", 1},
          },
          made<Generation>,
          /*judge=*/{},
          /*keyed=*/{},
          /*alone=*/false,
          /*memit_names=*/true};
}

}  // namespace emend::evaluation
