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

const MetricInfo& counterfact_info() {
  static const MetricInfo info = {
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
      judge_counterfact,
      /*keyed=*/{},
      /*alone=*/true,
      /*memit_names=*/true};
  return info;
}

/// The two targets of one prompt.
struct Pair {
  size_t target_new = 0;
  std::optional<size_t> target_true;
};

class Counterfact final : public Metric {
 public:
  [[nodiscard]] const MetricInfo& info() const override { return counterfact_info(); }

  [[nodiscard]] bool suits(const datasets::FactSet& facts) const override {
    if (facts.format == "zsre") return false;  // its own protocol compares other things
    return std::ranges::any_of(facts.facts, [](const datasets::Fact& fact) {
      return fact.target_true && (!fact.neighborhood_prompts.empty() || !fact.paraphrase_prompts.empty());
    });
  }

  void plan(const MetricContext& context, ScoreSheet& sheet) override {
    for (size_t i = 0; i < context.facts.facts.size(); ++i) {
      const auto& fact = context.facts.facts[i];
      const auto pair = [&](const std::string& prompt) {
        Pair added;
        added.target_new = sheet.add(i, prompt, fact.target_new);
        if (fact.target_true) added.target_true = sheet.add(i, prompt, *fact.target_true);
        return added;
      };
      Record record;
      record.rewrite = {pair(fact.full_prompt())};
      for (const auto& prompt : fact.paraphrase_prompts) record.paraphrases.push_back(pair(prompt));
      if (fact.target_true)
        for (const auto& prompt : fact.neighborhood_prompts) record.neighborhood.push_back(pair(prompt));
      records_.push_back(std::move(record));
    }
  }

  [[nodiscard]] MetricOutcome measure(const MetricContext&, const ScoreSheet& sheet) override {
    MetricOutcome outcome;
    for (const auto& record : records_) {
      json& row = outcome.cases.emplace_back(json::object());
      put(sheet, record.rewrite, kRewrite, row);
      put(sheet, record.paraphrases, kParaphrase, row);
      put(sheet, record.neighborhood, kNeighborhood, row);
    }
    return outcome;
  }

 private:
  struct Record {
    std::vector<Pair> rewrite, paraphrases, neighborhood;
  };

  /// Adds one record's raw values to `row`, named as in the MEMIT repository's files.
  static void put(const ScoreSheet& sheet, const std::vector<Pair>& pairs, const Prompts& prompts, json& row) {
    json probs = json::array(), correct = json::array();
    for (const auto& pair : pairs) {
      const Score& fresh = sheet.at(pair.target_new);
      correct.push_back(prompts.true_is_right ? sheet.at(*pair.target_true).all_correct() : fresh.all_correct());
      probs.push_back({{"target_new", fresh.mean_nll()}, {"target_true", nullptr}});
      if (pair.target_true) probs.back()["target_true"] = sheet.at(*pair.target_true).mean_nll();
      probs.back()["tokens"] = {fresh.labels.size(), pair.target_true ? sheet.at(*pair.target_true).labels.size() : 0};
    }
    row[prompts.raw_name + "_probs"] = std::move(probs);
    row[prompts.raw_name + "_correct"] = std::move(correct);
  }

  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<Metric> make_counterfact() {
  return std::make_unique<Counterfact>();
}

}  // namespace emend::evaluation
