// What the model writes on its own: greedy text without the answer's help, to a natural end.
//
//   edit, paraphrases, question, prefixed   the new answer is asked for; "prefixed" stands behind foreign text
//   negation, doubt                         the statement is denied or doubted: nothing is asked for
//   neighbors                               other subjects; nothing may change there
//
// Protocol: live decoding and a natural stop as in "The Mirage of Model Editing" (arXiv 2502.11177); negated prompts as
// in "Built on Sand" (arXiv 2510.00625). `retrieval` is the unedited model with the fact in its context, as IKE tells
// it (Zheng et al., 2023): what needs no editing at all.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/health.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/text_metrics.h>

#include <algorithm>
#include <map>

namespace emend::evaluation {
namespace {

using detail::member;
using nlohmann::json;

constexpr size_t kParaphrases = 2, kNeighbors = 3;
constexpr int64_t kNeighborTokens = 10;
// Foreign text of about 50 tokens; every fact gets the next one.
const std::vector<std::string>& foreign_texts() {
  static const std::vector<std::string> texts = {
      "The ferry left the harbour a little after six, when the fog had begun to lift. Two men on the upper deck argued "
      "about the price of timber, and a child counted the gulls that followed the boat. Nobody looked back at the "
      "town.",
      "Most of the garden is in the shade by four in the afternoon. Ferns do well there, and so does ivy, but the "
      "roses "
      "were moved to the south wall last spring. Water them in the evening, and never when the sun is on the leaves.",
      "The second half of the match was slower than the first. Both teams kept the ball in midfield, and the crowd "
      "grew "
      "quiet. Ten minutes before the end a long pass found the striker, who missed from close range.",
      "To clean the filter, switch the machine off and wait until it is cold. Open the flap on the left side, pull the "
      "handle towards you and rinse the sieve under warm water. Let it dry before you put it back in its place."};
  return texts;
}

// What must not change: the fact's own neighbours, or other subjects in its prompt where it brings none.
std::vector<std::string> neighbors_of(const datasets::Fact& fact) {
  static const std::vector<std::string> subjects = {"Marie Curie",   "Norway",          "the University of Oxford",
                                                    "Mount Everest", "Agatha Christie", "Buenos Aires",
                                                    "the Beatles"};
  std::vector<std::string> prompts = fact.neighborhood_prompts;
  if (!prompts.empty()) {
    prompts.resize(std::min(kNeighbors, prompts.size()));
    return prompts;
  }
  for (auto i = static_cast<size_t>(fact.case_id); prompts.size() < kNeighbors; ++i) {
    datasets::Fact other = fact;
    other.subject = subjects[i % subjects.size()];
    if (other.subject != fact.subject) prompts.push_back(other.full_prompt());
  }
  return prompts;
}

// A figure of the mean over what stands in lists of texts: numbers, or truth values, which count as 1 and 0.
CaseFigure mean(std::vector<std::string> groups, std::string what) {
  return [groups = std::move(groups), what = std::move(what)](const json& raw) {
    std::vector<double> values;
    for (const auto& group : groups)
      for (const auto& text : member(raw, {group}))
        if (const json& value = member(text, {what}); value.is_boolean())
          values.push_back(value.get<bool>() ? 1 : 0);
        else if (const auto number = detail::as_number(value))
          values.push_back(*number);
    return record_mean(values);
  };
}

const std::vector<std::string> kAsked = {"edit", "paraphrase", "question", "prefixed"};

CaseVerdict judge(const json& raw) {
  CaseVerdict verdict;
  const json& edit = member(raw, {"edit"});
  if (!edit.is_array() || edit.empty()) return verdict;
  verdict.success = member(edit[0], {"begins"}) == json(true);
  if (!*verdict.success)
    verdict.reason = "the model writes \"" + detail::shorten(detail::text(edit[0], "text"), 60) + "\"";
  return verdict;
}

const MetricInfo& free_info() {
  static const MetricInfo info = {
      "free",
      "what the model writes: greedy text after the edited prompt, paraphrases, a question, foreign text, negation, "
      "neighbours",
      "live decoding (arXiv 2502.11177), negation (arXiv 2510.00625), greedy, to the end of the sentence, 40 tokens at "
      "most",
      2,
      {
          {"edit_begins", "EB", "Edited prompts whose continuation begins with the new answer.", "%", true,
           mean({"edit"}, "begins"), "says"},
          {"edit_names", "EN", "Edited prompts whose continuation names the new answer, and not the old one before it.",
           "%", true, mean({"edit"}, "names")},
          {"paraphrase_begins", "PB", "Paraphrases (at most two a fact) whose continuation begins with the new answer.",
           "%", true, mean({"paraphrase"}, "begins"), "says paraphrased"},
          {"paraphrase_names", "PN", "Paraphrases whose continuation names the new answer.", "%", true,
           mean({"paraphrase"}, "names")},
          {"question_begins", "QB", "Answers to the prompt as a question that begin with the new answer.", "%", true,
           mean({"question"}, "begins"), "answers"},
          {"prefixed_begins", "FB", "Edited prompts behind foreign text that are continued with the new answer.", "%",
           true, mean({"prefixed"}, "begins"), "behind text"},
          {"negation_begins", "NB",
           "Negated prompts (\"It is not true that …\") that are continued with the new answer.", "%", false,
           mean({"negation"}, "begins"), "says negated"},
          {"doubt_begins", "DB", "Doubted prompts (\"I doubt that …\") that are continued with the new answer.", "%",
           false, mean({"doubt"}, "begins")},
          {"negation_repeats", "NR",
           "Negated prompts that are continued as the prompt itself is, by the first word: how little negation does to "
           "this model's answers, edited or not.",
           "%", false, mean({"negation"}, "repeats")},
          {"loops", "Loops", "Continuations in which a 3-gram stands four times.", "%", false, mean(kAsked, "loops")},
          {"entropy", "Entropy", "n-gram entropy of the continuations: mean of 2/3·H₂ and 4/3·H₃.", "bit", true,
           mean(kAsked, "entropy"), "", 1},
          {"neighborhood_first_token_kept",
           "NK1",
           "Neighbours (at most three a fact) continued with the same first token as before the edit.",
           "%",
           true,
           mean({"neighbor"}, "first_kept"),
           "neighbours kept",
           100,
           {},
           false,
           true},
          {"neighborhood_ten_tokens_kept",
           "NK10",
           "Neighbours whose first ten tokens are the same as before the edit.",
           "%",
           true,
           mean({"neighbor"}, "ten_kept"),
           "",
           100,
           {},
           false,
           true},
          {"neighborhood_kl",
           "NKL",
           "Mean Kullback-Leibler divergence of the next-token distribution after neighbours' prompts, unedited "
           "relative to edited.",
           "nat",
           false,
           mean({"neighbor"}, "kl"),
           "",
           1,
           {},
           false,
           true},
          {"neutral_kl",
           "KL",
           "The same on 32 beginnings of sentences that have nothing to do with the facts.",
           "nat",
           false,
           {},
           "",
           1,
           {},
           false,
           true},
      },
      judge};
  return info;
}

// One text that is to be written, and where it belongs.
struct Asked {
  size_t fact;
  const char* group;
  std::string prompt;
};

class Free final : public Metric {
 public:
  [[nodiscard]] const MetricInfo& info() const override { return free_info(); }
  [[nodiscard]] bool suits(const datasets::FactSet& set) const override {
    if (set.format == "mquake" || set.facts.empty()) return false;  // its own protocol writes
    const auto any = [&](const auto& has) { return std::any_of(set.facts.begin(), set.facts.end(), has); };
    return any([](const auto& fact) { return !fact.paraphrase_prompts.empty(); }) ||
           !any([](const auto& fact) { return !fact.neighborhood_prompts.empty() || !fact.locality.empty(); });
  }
  void plan(const MetricContext& context, ScoreSheet&) override {
    cases_.resize(context.facts.facts.size(), json::object());
    retrieval_.resize(cases_.size());
  }

  void observe(const models::Model& model, const MetricContext& context, size_t begin, size_t end) override {
    end = std::min(end, last(context));
    if (begin >= end) return;
    write(model, context, begin, end, false, cases_);
    if (!context.options.before) write(model, context, begin, end, true, retrieval_);
    divergences(model, context, begin, end);
  }

  [[nodiscard]] MetricOutcome measure(const MetricContext& context, const ScoreSheet&) override {
    MetricOutcome outcome;
    if (!context.options.before) {
      MetricOutcome told;
      told.cases = std::move(retrieval_);
      summarise(context, told);
      outcome.summary["retrieval"] = std::move(told.summary);
    }
    outcome.cases = std::move(cases_);
    outcome.summary["n"] = last(context);
    if (neutral_PV_.defined()) {
      const Evaluation* before = context.options.before;
      if (const auto at = before ? before->kept.find("free.neutral") : decltype(before->kept.end()){};
          before && at != before->kept.end())
        outcome.summary["neutral_kl"] = mean_divergence(at->second, neutral_PV_);
      outcome.kept["free.neutral"] = neutral_PV_;
    }
    if (!neighbors_.empty()) outcome.kept["free.neighbors"] = at::cat(neighbors_);
    return outcome;
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override { return {options.free_limit}; }

 private:
  static size_t last(const MetricContext& context) {
    const size_t all = context.facts.facts.size();
    const int64_t limit = context.options.free_limit;
    return limit < 0 ? all : std::min(all, static_cast<size_t>(limit));
  }

  // Prompts of facts [begin, end); `told` puts each fact in front of its own.
  static std::vector<Asked> asked(const MetricContext& context, size_t begin, size_t end, bool told) {
    std::vector<Asked> all;
    for (size_t i = begin; i < end; ++i) {
      const auto& fact = context.facts.facts[i];
      const std::string prompt = fact.full_prompt();
      const std::string front = told ? "New Fact: " + prompt + " " + fact.target_new + "\nPrompt: " : "";
      const auto add = [&](const char* group, const std::string& text) { all.push_back({i, group, front + text}); };
      add("edit", prompt);
      for (size_t k = 0; k < std::min(kParaphrases, fact.paraphrase_prompts.size()); ++k)
        add("paraphrase", fact.paraphrase_prompts[k]);
      add("question", "Question: " + prompt + (prompt.ends_with('?') ? "" : " what?") + "\nAnswer:");
      add("prefixed", foreign_texts()[i % foreign_texts().size()] + " " + prompt);
      add("negation", "It is not true that " + prompt);
      add("doubt", "I doubt that " + prompt);
      for (const auto& neighbor : neighbors_of(fact)) add("neighbor", neighbor);
    }
    return all;
  }

  void write(const models::Model& model, const MetricContext& context, size_t begin, size_t end, bool told,
             std::vector<json>& cases) const {
    const auto all = asked(context, begin, end, told);
    FreeTextOptions whole, fixed;
    whole.progress = context.options.progress;
    whole.cancel = context.options.cancel;
    whole.sharing = context.options.sharing;
    fixed = whole;
    fixed.max_tokens = kNeighborTokens;
    fixed.whole_sentence = false;
    for (const bool neighbors : {false, true}) {
      std::vector<std::string> prompts;
      std::vector<const Asked*> places;
      auto& options = neighbors ? fixed : whole;
      std::map<std::pair<size_t, std::string>, size_t> met;
      for (const auto& one : all) {
        if ((std::string_view(one.group) == "neighbor") != neighbors) continue;
        prompts.push_back(one.prompt);
        places.push_back(&one);
        const auto& fact = context.facts.facts[one.fact];
        if (!neighbors) options.names.push_back({fact.target_new, fact.target_true.value_or(fact.target_new)});
        options.drafts.push_back(drafts_of(one, fact, before_of(context, one, met[{one.fact, one.group}]++, told)));
      }
      const auto texts = write_on(model, prompts, options);
      for (size_t t = 0; t < texts.size(); ++t) {
        const Asked& one = *places[t];
        json& list = cases[one.fact][one.group];
        list.push_back(neighbors ? neighbor(one, texts[t], before_of(context, one, list.size(), told))
                                 : read(context.facts.facts[one.fact], cases[one.fact], one, texts[t]));
      }
    }
  }

  static json read(const datasets::Fact& fact, const json& own, const Asked& one, const FreeText& text) {
    const size_t found = place_of(text.text, fact.target_new);
    const size_t old = fact.target_true ? place_of(text.text, *fact.target_true) : std::string::npos;
    json entry = {{"prompt", one.prompt},
                  {"text", text.text},
                  {"begins", begins_with(text.text, fact.target_new)},
                  {"names", found != std::string::npos && found <= old},
                  {"loops", loops(text.text)},
                  {"entropy", weighted_ngram_entropy(text.text)}};
    if (std::string_view(one.group) == "negation")
      entry["repeats"] = first_word(text.text) == first_word(own.at("edit").at(0).at("text").get<std::string>());
    return entry;
  }

  static std::string first_word(const std::string& text) {
    const std::string words = plain_words(text);
    return words.substr(0, words.find(' '));
  }

  // What the unedited model wrote after the same prompt; null without one.
  [[nodiscard]] const json& before_of(const MetricContext& context, const Asked& one, size_t place, bool told) const {
    static const json none;
    const Evaluation* before = context.options.before;
    if (!told && (!before || one.fact >= before->cases.size())) return none;
    const json& list =
        told ? member(cases_[one.fact], {one.group}) : member(before->cases[one.fact], {"free", one.group});
    return list.is_array() && place < list.size() ? list[place] : none;
  }

  // The new answer where it is asked for, and what was written before; none before there is anything to compare with.
  static std::vector<std::string> drafts_of(const Asked& one, const datasets::Fact& fact, const json& before) {
    if (!before.is_object()) return {};
    std::vector<std::string> drafts = {" " + fact.target_new, detail::text(before, "text")};
    if (std::find(kAsked.begin(), kAsked.end(), one.group) == kAsked.end()) std::swap(drafts[0], drafts[1]);
    return drafts;
  }

  static json neighbor(const Asked& one, const FreeText& text, const json& before) {
    json entry = {{"prompt", one.prompt}, {"text", text.text}, {"ids", text.ids}};
    if (const json& ids = member(before, {"ids"}); ids.is_array() && !ids.empty()) {
      entry["first_kept"] = !text.ids.empty() && ids[0] == text.ids[0];
      entry["ten_kept"] = ids == json(text.ids);
    }
    return entry;
  }

  // Next-token distributions after the neighbours of these facts, and once after the neutral texts.
  void divergences(const models::Model& model, const MetricContext& context, size_t begin, size_t end) {
    ScoreOptions score;
    score.batch_tokens = context.options.batch_tokens;
    score.cancel = context.options.cancel;
    std::vector<std::string> prompts;
    std::vector<std::pair<size_t, size_t>> places;
    size_t earlier = 0;
    for (size_t i = 0; i < begin; ++i) earlier += neighbors_of(context.facts.facts[i]).size();
    for (size_t i = begin; i < end; ++i)
      for (size_t k = 0; k < cases_[i].value("neighbor", json::array()).size(); ++k) {
        prompts.push_back(cases_[i]["neighbor"][k]["prompt"].get<std::string>());
        places.emplace_back(i, k);
      }
    constexpr size_t kRows = 256;
    for (size_t from = 0; from < prompts.size(); from += kRows) {
      const size_t to = std::min(from + kRows, prompts.size());
      const at::Tensor now = next_token_log_probs(
          model,
          {prompts.begin() + static_cast<std::ptrdiff_t>(from), prompts.begin() + static_cast<std::ptrdiff_t>(to)},
          score);
      compare(context, now, places, from, earlier + from);
      if (!context.options.before) neighbors_.push_back(now.to(at::kHalf));
    }
    if (begin == 0) neutral_PV_ = next_token_log_probs(model, probe_prompts(), score);
  }

  void compare(const MetricContext& context, const at::Tensor& now,
               const std::vector<std::pair<size_t, size_t>>& places, size_t from, size_t row) {
    const Evaluation* before = context.options.before;
    if (!before) return;
    const auto at = before->kept.find("free.neighbors");
    if (at == before->kept.end()) return;
    if (static_cast<int64_t>(row) + now.size(0) > at->second.size(0)) return;
    const at::Tensor old = at->second.narrow(0, static_cast<int64_t>(row), now.size(0)).to(at::kFloat);
    const at::Tensor kl = (old.exp() * (old - now)).sum(1).to(at::kDouble);
    for (int64_t r = 0; r < kl.size(0); ++r) {
      const auto& [fact, place] = places[from + static_cast<size_t>(r)];
      cases_[fact]["neighbor"][place]["kl"] = std::max(0.0, kl[r].item<double>());
    }
  }

  std::vector<json> cases_, retrieval_;
  std::vector<at::Tensor> neighbors_;  // [prompts, V] half
  at::Tensor neutral_PV_;
};

}  // namespace

std::unique_ptr<Metric> make_free() {
  return std::make_unique<Free>();
}

}  // namespace emend::evaluation
