// CounterFact (Meng et al. 2022, §3.4 of ROME and §5.1 of MEMIT), as the MEMIT repository computes it.
//
// For every prompt both targets are scored by their mean per-token negative log-likelihood (nll):
//   success   rewrite, paraphrases: nll(true) > nll(new)      neighbourhood: nll(true) < nll(new)        (strict)
//   magnitude rewrite, paraphrases: exp(-nll(new)) - exp(-nll(true))         neighbourhood: the reverse
//   accuracy  every token of the right target (new; neighbourhood: true) is the argmax under teacher forcing
// Means are taken over the prompts of a record, then over the records. Score: harmonic mean of the three success means.
// Facts without target_true have accuracies only; facts without paraphrases or neighbours count in the other columns.
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/metric.h>

#include <algorithm>
#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

/// A kind of prompt, as the raw values name it.
struct Prompts {
  std::string raw_name;
  bool true_is_right = false;  ///< the old answer should stay the more probable one
};
const Prompts kRewrite{"rewrite_prompts"}, kParaphrase{"paraphrase_prompts"},
    kNeighborhood{"neighborhood_prompts", true};

/// The mean of `value(nll of the right target, nll of the other)` over the prompts that have both.
CaseFigure over_pairs(const Prompts& prompts, double (*value)(double, double)) {
  return [prompts, value](const json& raw) {
    std::vector<double> values;
    if (const json& list = detail::member(raw, {prompts.raw_name + "_probs"}); list.is_array())
      for (const auto& pair : list) {
        const auto fresh = detail::number(pair, "target_new"), old = detail::number(pair, "target_true");
        if (fresh && old) values.push_back(prompts.true_is_right ? value(*old, *fresh) : value(*fresh, *old));
      }
    return record_mean(values);
  };
}

CaseFigure success(const Prompts& prompts) {
  return over_pairs(prompts, [](double right, double wrong) { return more_probable(right, wrong) ? 1.0 : 0.0; });
}

CaseFigure magnitude(const Prompts& prompts) {
  return over_pairs(prompts, [](double right, double wrong) { return std::exp(-right) - std::exp(-wrong); });
}

CaseFigure accuracy(const Prompts& prompts) {
  return share_of_true(prompts.raw_name + "_correct");
}

/// A success: the new answer is more probable than the old one after the fact's own prompt.
CaseVerdict judge_counterfact(const json& raw) {
  CaseVerdict verdict;
  const json& pairs = detail::member(raw, {"rewrite_prompts_probs"});
  if (!pairs.is_array() || pairs.empty()) return verdict;
  const auto fresh = detail::number(pairs[0], "target_new"), old = detail::number(pairs[0], "target_true");
  // Of the whole answer; files without the number of tokens give its geometric mean.
  const auto tokens = detail::numbers(detail::member(pairs[0], {"tokens"}));
  if (fresh) verdict.p_new = std::exp(-*fresh * (tokens.size() == 2 ? tokens[0] : 1));
  if (!fresh || !old) return verdict;
  verdict.success = more_probable(*fresh, *old);
  if (!*verdict.success)
    verdict.reason = "the new answer is not the more probable one (new " + detail::probability(*verdict.p_new) +
                     ", old " + detail::probability(std::exp(-*old * (tokens.size() == 2 ? tokens[1] : 1))) + ")";
  return verdict;
}

class Counterfact final : public Metric {
 public:
  using Metric::Metric;

  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    if (facts.format == "zsre") return false;  // its own protocol compares other things
    return std::ranges::any_of(facts.facts, [](const datasets::Fact& fact) {
      return fact.target_true && (!fact.neighborhood_prompts.empty() || !fact.paraphrase_prompts.empty());
    });
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    const auto& facts = context.facts.facts;
    outcome_.cases.resize(facts.size());
    for (size_t i = 0; i < facts.size(); ++i) {
      ask(sheet, i, facts[i], kRewrite, {facts[i].full_prompt()});
      ask(sheet, i, facts[i], kParaphrase, facts[i].paraphrase_prompts);
      ask(sheet, i, facts[i], kNeighborhood,
          facts[i].target_true ? facts[i].neighborhood_prompts : std::vector<std::string>());
    }
  }

 private:
  /// Both targets behind each of the texts. The raw values are named as in the MEMIT repository's files.
  void ask(ScoreSheet& sheet, size_t i, const datasets::Fact& fact, const Prompts& prompts,
           const std::vector<std::string>& texts) {
    json& row = outcome_.cases[i];
    json &probs = row[prompts.raw_name + "_probs"] = json::array(),
         &correct = row[prompts.raw_name + "_correct"] = json::array();
    const bool true_is_right = prompts.true_is_right;
    for (const auto& text : texts) {
      sheet.add(i, text, fact.target_new, [&probs, &correct, true_is_right](const Score& score) {
        probs.push_back({{"target_new", score.mean_nll()}, {"target_true", nullptr}});
        probs.back()["tokens"] = {score.labels.size(), size_t{0}};
        if (!true_is_right) correct.push_back(score.all_correct());
      });
      if (!fact.target_true) continue;
      sheet.add(i, text, *fact.target_true, [&probs, &correct, true_is_right](const Score& score) {
        probs.back()["target_true"] = score.mean_nll();
        probs.back()["tokens"][1] = score.labels.size();
        if (true_is_right) correct.push_back(score.all_correct());
      });
    }
  }
};

}  // namespace

MetricInfo make_counterfact() {
  return {
      "counterfact",
      "success, magnitude and accuracy on rewrite, paraphrase and neighbourhood prompts; harmonic score",
      "ROME and MEMIT (Meng et al. 2022/23): eval_utils_counterfact.py, summarize.py",
      2,
      {
          harmonic_score("Harmonic mean of the three success rates; 0 if one of them is 0.",
                         {"efficacy_success", "paraphrase_success", "neighborhood_success"}),
          {"efficacy_success", "ES",
           "Facts whose new target is more probable than the old one after the fact's own prompt (mean negative "
           "log-likelihood per token, strictly lower).",
           "%", true, success(kRewrite), "efficacy"},
          {"paraphrase_success", "PS", "The same comparison on the paraphrases of the prompt.", "%", true,
           success(kParaphrase), "paraphrases"},
          {"neighborhood_success", "NS",
           "Prompts about other subjects with the same old answer on which the old answer is still the more probable "
           "one.",
           "%", true, success(kNeighborhood), "neighbours"},
          difference({"efficacy_magnitude", "EM",
                      "Mean difference of probabilities, new minus old target, after the fact's own prompt.", "%", true,
                      magnitude(kRewrite)}),
          difference({"paraphrase_magnitude", "PM", "The same difference on the paraphrases.", "%", true,
                      magnitude(kParaphrase)}),
          difference({"neighborhood_magnitude", "NM",
                      "Mean difference of probabilities, old minus new target, on the neighbourhood prompts.", "%",
                      true, magnitude(kNeighborhood)}),
          {"efficacy_accuracy", "EA", "Facts whose new target is predicted token for token (teacher forcing).", "%",
           true, accuracy(kRewrite)},
          {"paraphrase_accuracy", "PA", "Paraphrases after which the new target is predicted token for token.", "%",
           true, accuracy(kParaphrase)},
          {"neighborhood_accuracy", "NA",
           "Neighbourhood prompts after which the old answer is predicted token for token.", "%", true,
           accuracy(kNeighborhood)},
      },
      made<Counterfact>,
      judge_counterfact,
      /*keyed=*/{},
      /*alone=*/true,
      /*memit_names=*/true};
}

}  // namespace emend::evaluation
