// What the model writes on its own: greedy text without the answer's help, to a natural end.
//
//   edit, paraphrases, question, prefixed   the new answer is asked for; "prefixed" stands behind foreign text
//   negation, doubt                         the statement is denied or doubted: nothing is asked for
//   neighbors                               other subjects; nothing may change there
//   portability, hop, multi_hop             what follows from the edits, where the data ask for it
//
// In two styles: the text is continued (plain), or it is a message that the model answers in its chat template (chat).
//
// Protocol: live decoding and a natural stop as in "The Mirage of Model Editing" (arXiv 2502.11177); negated prompts as
// in "Built on Sand" (arXiv 2510.00625). `retrieval` is the unedited model with the fact in its context, as IKE tells
// it (Zheng et al., 2023): what needs no editing at all.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/evaluation/detail/free_prompts.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/health.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/text_metrics.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <map>

namespace emend::evaluation {
namespace {

using detail::AskedText;
using detail::member;
using nlohmann::json;

constexpr int64_t kNeighborTokens = 10;

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
const std::vector<std::string> kAskedInChat = {"edit_chat", "paraphrase_chat", "question_chat", "prefixed_chat"};

// By the plain text, or by that of the chat where there is no other.
CaseVerdict judge(const json& raw) {
  CaseVerdict verdict;
  const bool plain = member(raw, {"edit"}).is_array();
  const json& edit = member(raw, {plain ? "edit" : "edit_chat"});
  if (!edit.is_array() || edit.empty()) return verdict;
  verdict.success = member(edit[0], {plain ? "begins" : "names"}) == json(true);
  if (!*verdict.success) verdict.reason = "the model writes \"" + shortened(detail::text(edit[0], "text"), 61) + "\"";
  return verdict;
}

// A share of the texts of one kind, which its key names with what is asked of them: "edit_names_chat". Left out of the
// summary where no text of the kind was written.
MetricField share_of_kind(const std::string& key, std::string paper, std::string definition, bool higher = true,
                          std::string label = "") {
  const bool chat = key.ends_with("_chat");
  const size_t what = key.find(key.find("_names") != key.npos ? "names" : "begins");
  const std::string group = key.substr(0, what - 1) + (chat ? "_chat" : "");
  return optional({key, std::move(paper), std::move(definition), "%", higher,
                   mean({group}, key.substr(what, key.size() - what - (chat ? 5 : 0))), std::move(label)});
}

// What follows from the edits; `told` in front of each definition.
std::vector<MetricField> probe_fields(const std::string& chat, const std::string& paper, const std::string& told) {
  return {share_of_kind("portability_names" + chat, "PoN" + paper,
                        told + "Questions that follow from the edit (at most two of a kind) whose text names a right "
                               "answer."),
          share_of_kind("hop_names" + chat, "HN" + paper,
                        told + "Single hops of multi-hop questions whose text names a right answer."),
          share_of_kind("multi_hop_names" + chat, "MHN" + paper,
                        told + "Multi-hop questions whose text names the new answer.")};
}

std::vector<MetricField> chat_fields() {
  return {
      share_of_kind("edit_names_chat", "EN chat",
                    "In the chat template: answers to the edited prompt that name the new answer, and not the old "
                    "one before it; what stands inside of a repeated subject does not count.",
                    true, "says in chat"),
      share_of_kind(
          "edit_begins_chat", "EB chat",
          "Answers to the edited prompt that begin with the new answer, behind the prompt if they repeat it."),
      share_of_kind("paraphrase_names_chat", "PN chat", "Answers to paraphrases that name the new answer."),
      share_of_kind("paraphrase_begins_chat", "PB chat",
                    "Answers to paraphrases that begin with the new answer, behind the paraphrase if they repeat "
                    "it."),
      share_of_kind("question_names_chat", "QN chat", "Answers to the prompt as a question that name the new answer."),
      share_of_kind("prefixed_names_chat", "FN chat",
                    "Answers to the edited prompt behind foreign text that name the new answer."),
      share_of_kind("negation_names_chat", "NN chat",
                    "Answers to negated prompts (\"It is not true that …\") that name the new answer.", false),
      share_of_kind("doubt_names_chat", "DN chat",
                    "Answers to doubted prompts (\"I doubt that …\") that name the new answer.", false),
      optional({"neighborhood_text_kept_chat", "NK chat",
                "Neighbours that are answered word for word as before the edit.", "%", true,
                mean({"neighbor_chat"}, "text_kept")}),
      optional({"loops_chat", "Loops chat", "Answers in which a 3-gram stands four times.", "%", false,
                mean(kAskedInChat, "loops")}),
      optional({"entropy_chat", "Entropy chat", "n-gram entropy of the answers.", "bit", true,
                mean(kAskedInChat, "entropy"), "", 1})};
}

struct Styles {
  bool plain = true, chat = false;
};

Styles styles_of(const EvaluateOptions& options) {
  static const std::vector<std::string> names = {"plain", "chat", "both"};
  const std::string& style = options.free_style;
  if (std::ranges::find(names, style) == names.end())
    refuse({setting("free_style"), "\"" + style + "\"", "plain, chat or both", did_you_mean(style, names)});
  return {style != "chat", style != "plain"};
}

void require_template(const models::Model& model, const EvaluateOptions& options) {
  if (!styles_of(options).chat || !model.tokenizer().chat_template().empty()) return;
  throw Error(ErrorClass::kUnsupported, {setting("free_style", options.free_style), "a model without a chat template",
                                         "one in tokenizer_config.json, chat_template.jinja or the GGUF file",
                                         "leave it out: " + setting("free_style", "plain") + " needs none"});
}

// How a text is written, and how far.
enum class Way { kSentence, kTenTokens, kAnswer };

Way way_of(const AskedText& one) {
  if (one.chat) return Way::kAnswer;
  return one.kind == "neighbor" ? Way::kTenTokens : Way::kSentence;
}

FreeTextOptions text_options(const EvaluateOptions& evaluate, Way way) {
  FreeTextOptions options;
  options.progress = evaluate.progress;
  options.cancel = evaluate.cancel;
  options.sharing = evaluate.sharing;
  options.whole_sentence = way == Way::kSentence;
  options.conversations = way == Way::kAnswer;
  if (way == Way::kTenTokens) options.max_tokens = kNeighborTokens;
  return options;
}

class Free final : public Metric {
 public:
  using Metric::Metric;
  [[nodiscard]] bool suits(const datasets::FactSet& set) const override {
    if (set.format == "mquake" || set.facts.empty()) return false;  // its own protocol writes
    const auto any = [&](const auto& has) { return std::ranges::any_of(set.facts, has); };
    return any([](const auto& fact) { return !fact.paraphrase_prompts.empty(); }) ||
           !any([](const auto& fact) { return !fact.neighborhood_prompts.empty() || !fact.locality.empty(); });
  }
  void plan(const MetricContext& context, ScoreSheet&) override {
    (void)styles_of(context.options);
    if (context.model) require_template(*context.model, context.options);
    outcome_.cases.resize(context.facts.facts.size(), json::object());
    retrieval_.resize(outcome_.cases.size());
  }

  void observe(const models::Model& model, const MetricContext& context, size_t begin, size_t end) override {
    end = std::min(end, last(context));
    if (begin >= end) return;
    require_template(model, context.options);
    write(model, context, begin, end, false, outcome_.cases);
    if (!context.options.before) write(model, context, begin, end, true, retrieval_);
    divergences(model, context, begin, end);
  }

  void measure(const MetricContext& context) override {
    if (!context.options.before) {
      MetricOutcome told;
      told.cases = std::move(retrieval_);
      summarise(context, told);
      told.summary["n"] = last(context);
      outcome_.summary["retrieval"] = std::move(told.summary);
    }
    outcome_.summary["n"] = last(context);
    if (neutral_PV_.defined()) {
      if (context.options.kept_before("free.neutral")) {
        outcome_.summary["neutral_kl"] = neutral_kl_ / static_cast<double>(states_);
        outcome_.summary["counts"]["neutral_kl"] = neutral_PV_.size(0);
      }
      outcome_.kept["free.neutral"] = neutral_PV_;
    }
    if (!neighbors_.empty()) outcome_.kept["free.neighbors"] = at::cat(neighbors_);
  }

  [[nodiscard]] json key(const EvaluateOptions& options) const override {
    return {options.free_limit, options.free_style};
  }

 private:
  static size_t last(const MetricContext& context) {
    const size_t all = context.facts.facts.size();
    const int64_t limit = context.options.free_limit;
    return limit < 0 ? all : std::min(all, static_cast<size_t>(limit));
  }

  void write(const models::Model& model, const MetricContext& context, size_t begin, size_t end, bool told,
             std::vector<json>& cases) const {
    const Styles styles = styles_of(context.options);
    for (const bool chat : {false, true}) {
      if (!(chat ? styles.chat : styles.plain)) continue;
      const auto all = detail::asked_texts(context.facts, begin, end, chat, told);
      for (const Way way : {Way::kSentence, Way::kTenTokens, Way::kAnswer}) {
        std::vector<const AskedText*> places;
        for (const auto& one : all)
          if (way_of(one) == way) places.push_back(&one);
        if (!places.empty()) write(model, context, way, places, told, cases);
      }
    }
  }

  void write(const models::Model& model, const MetricContext& context, Way way,
             const std::vector<const AskedText*>& places, bool told, std::vector<json>& cases) const {
    auto options = text_options(context.options, way);
    std::vector<std::string> prompts;
    std::map<std::pair<size_t, std::string>, size_t> met;
    const auto format = way == Way::kAnswer ? models::chat_format_of(model.tokenizer()) : models::ChatFormat();
    for (const AskedText* one : places) {
      const auto& fact = context.facts.facts[one->fact];
      const std::string asked = context.options.asked(one->prompt);
      prompts.push_back(way == Way::kAnswer ? models::render_chat(format, {{"user", asked}}, true).text : asked);
      if (way == Way::kSentence) options.names.push_back(names_of(*one, fact));
      options.drafts.push_back(drafts_of(*one, fact, before_of(context, *one, met[{one->fact, one->group()}]++, told)));
    }
    const auto texts = write_on(model, prompts, options);
    for (size_t t = 0; t < texts.size(); ++t) {
      const AskedText& one = *places[t];
      json& list = cases[one.fact][one.group()];
      list.push_back(one.kind == "neighbor" ? neighbor(one, texts[t], before_of(context, one, list.size(), told))
                                            : read(context.facts.facts[one.fact], cases[one.fact], one, texts[t]));
    }
  }

  // What a text may hold, and must not end inside of.
  static std::vector<std::string> names_of(const AskedText& one, const datasets::Fact& fact) {
    if (detail::is_probe(one.kind)) return one.answers;
    return {fact.target_new, fact.target_true.value_or(fact.target_new)};
  }

  static json read(const datasets::Fact& fact, const json& own, const AskedText& one, const FreeText& text) {
    const bool probe = detail::is_probe(one.kind);
    const std::string_view aside = one.chat ? std::string_view(fact.subject) : "";
    const std::string_view said = one.chat ? behind_repetition(text.text, one.sentence) : text.text;
    size_t found = std::string::npos;
    bool begins = false;
    for (const auto& answer : probe ? one.answers : std::vector{fact.target_new}) {
      found = std::min(found, place_of(text.text, answer, aside));
      begins = begins || begins_with(said, answer);
    }
    const size_t old = fact.target_true && !probe ? place_of(text.text, *fact.target_true, aside) : std::string::npos;
    json entry = {{"prompt", one.prompt},      {"text", text.text},
                  {"begins", begins},          {"names", found != std::string::npos && found <= old},
                  {"loops", loops(text.text)}, {"entropy", weighted_ngram_entropy(text.text)}};
    if (one.kind == "negation" && !one.chat)
      entry["repeats"] = begins_alike(text.text, own.at("edit").at(0).at("text").get<std::string>());
    return entry;
  }

  // What the unedited model wrote after the same prompt; null without one.
  [[nodiscard]] const json& before_of(const MetricContext& context, const AskedText& one, size_t place,
                                      bool told) const {
    static const json none;
    const Evaluation* before = context.options.before;
    if (!told && (!before || one.fact >= before->cases.size())) return none;
    const json& list =
        told ? member(outcome_.cases[one.fact], {one.group()}) : member(before->cases[one.fact], {"free", one.group()});
    const bool there = list.is_array() && place < list.size();
    return there && (told || member(list[place], {"prompt"}) == one.prompt) ? list[place] : none;
  }

  // The new answer where the text is to begin with it, and what was written before; none before there is anything to
  // compare with.
  static std::vector<std::string> drafts_of(const AskedText& one, const datasets::Fact& fact, const json& before) {
    if (!before.is_object()) return {};
    const std::string old = detail::text(before, "text"), target = " " + fact.target_new;
    if (one.chat || detail::is_probe(one.kind)) return {old};
    return detail::asks_for_new(one.kind) ? std::vector{target, old} : std::vector{old, target};
  }

  static json neighbor(const AskedText& one, const FreeText& text, const json& before) {
    json entry = {{"prompt", one.prompt}, {"text", text.text}, {"ids", text.ids}};
    if (const json& ids = member(before, {"ids"}); ids.is_array()) {  // empty: the text ended there
      if (one.chat) {
        entry["text_kept"] = ids == json(text.ids);
        return entry;
      }
      entry["first_kept"] = ids.empty() ? text.ids.empty() : !text.ids.empty() && ids[0] == text.ids[0];
      entry["ten_kept"] = ids == json(text.ids);
    }
    return entry;
  }

  // Next-token distributions after the neighbours of these facts, and once after the neutral texts.
  void divergences(const models::Model& model, const MetricContext& context, size_t begin, size_t end) {
    const ScoreOptions score = context.options.scoring();
    std::vector<std::string> prompts;
    std::vector<std::pair<size_t, size_t>> places;
    size_t earlier = 0;
    const auto edited = detail::edited_subjects(context.facts);
    for (size_t i = 0; i < begin; ++i) earlier += detail::neighbors_of(context.facts.facts[i], edited).size();
    for (size_t i = begin; i < end; ++i)
      for (size_t k = 0; k < outcome_.cases[i].value("neighbor", json::array()).size(); ++k) {
        prompts.push_back(context.options.asked(outcome_.cases[i]["neighbor"][k]["prompt"]));
        places.emplace_back(i, k);
      }
    constexpr size_t kRows = 256;
    for (size_t from = 0; from < prompts.size(); from += kRows) {
      const size_t to = std::min(from + kRows, prompts.size());
      const at::Tensor now = next_token_log_probs(model, {prompts.begin() + from, prompts.begin() + to}, score);
      compare(context, now, places, from, earlier + from);
      if (!context.options.before) neighbors_.push_back(now.to(at::kHalf));
    }
    note_neutral(next_token_log_probs(model, probe_prompts(), score), context.options);
  }

  // Of each model that is observed: one of all facts, or one a fact where each is judged alone.
  void note_neutral(const at::Tensor& now_PV, const EvaluateOptions& options) {
    neutral_PV_ = now_PV;
    if (const at::Tensor* before = options.kept_before("free.neutral")) neutral_kl_ += mean_divergence(*before, now_PV);
    ++states_;
  }

  void compare(const MetricContext& context, const at::Tensor& now,
               const std::vector<std::pair<size_t, size_t>>& places, size_t from, size_t row) {
    const at::Tensor* before = context.options.kept_before("free.neighbors");
    if (!before || static_cast<int64_t>(row) + now.size(0) > before->size(0)) return;
    const at::Tensor old = before->narrow(0, static_cast<int64_t>(row), now.size(0)).to(at::kFloat);
    // Both as they are kept. With −p + q no term is negative, and what rounding adds is of second order: rounded
    // probabilities do not add up to 1.
    const at::Tensor log_q = now.to(at::kHalf).to(at::kFloat), p = old.exp();
    const at::Tensor kl = (p * (old - log_q) - p + log_q.exp()).sum(1).to(at::kDouble);
    for (int64_t r = 0; r < kl.size(0); ++r) {
      const auto& [fact, place] = places[from + static_cast<size_t>(r)];
      const double one = kl[r].item<double>();
      outcome_.cases[fact]["neighbor"][place]["kl"] = one < 0 ? 0 : one;  // of rounding; what is no number stays that
    }
  }

  std::vector<json> retrieval_;
  std::vector<at::Tensor> neighbors_;  // [prompts, V] half
  at::Tensor neutral_PV_;
  double neutral_kl_ = 0;  // summed over so many states
  int64_t states_ = 0;
};

}  // namespace

MetricInfo make_free() {
  MetricInfo info = {
      "free",
      "what the model writes: greedy text after the edited prompt, paraphrases, a question, foreign text, negation, "
      "neighbours",
      "live decoding (arXiv 2502.11177), negation (arXiv 2510.00625), greedy, to the end of the sentence (in a chat: "
      "of the answer), 40 tokens at most",
      9,
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
          optional({"negation_begins", "NB",
                    "Negated prompts (\"It is not true that …\"; none of a question, or of a sentence about something "
                    "else) that are continued with the new "
                    "answer.",
                    "%", false, mean({"negation"}, "begins"), "says negated"}),
          optional({"doubt_begins", "DB",
                    "Doubted prompts (\"I doubt that …\") that are continued with the new answer.", "%", false,
                    mean({"doubt"}, "begins")}),
          optional(
              {"negation_repeats", "NR",
               "Negated prompts that are continued as the prompt itself is, by the first word: how little negation "
               "does to this model's answers, edited or not.",
               "%", false, mean({"negation"}, "repeats")}),
          {"loops", "Loops", "Continuations in which a 3-gram stands four times.", "%", false, mean(kAsked, "loops")},
          {"entropy", "Entropy", "n-gram entropy of the continuations: mean of 2/3·H₂ and 4/3·H₃.", "bit", true,
           mean(kAsked, "entropy"), "", 1},
          optional({"neighborhood_first_token_kept", "NK1",
                    "Neighbours (at most three a fact) continued with the same first token as before the edit.", "%",
                    true, mean({"neighbor"}, "first_kept"), "neighbours kept"}),
          optional({"neighborhood_ten_tokens_kept", "NK10",
                    "Neighbours whose first ten tokens are the same as before the edit.", "%", true,
                    mean({"neighbor"}, "ten_kept")}),
          optional(
              {"neighborhood_kl", "NKL",
               "Mean Kullback-Leibler divergence of the next-token distribution after neighbours' prompts, unedited "
               "relative to edited.",
               "nat", false, mean({"neighbor"}, "kl"), "", 1}),
          optional({"neutral_kl", "KL",
                    "The same on 32 beginnings of sentences that have nothing to do with the facts.", "nat", false}),
      },
      made<Free>,
      judge};
  for (const auto& more :
       {probe_fields("", "", ""), chat_fields(), probe_fields("_chat", " chat", "In the chat template: ")})
    info.fields.insert(info.fields.end(), more.begin(), more.end());
  return info;
}

}  // namespace emend::evaluation
