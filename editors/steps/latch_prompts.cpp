#include <emend/core/mapped.h>
#include <emend/editors/detail/latch_prompts.h>
#include <emend/editors/steps/continuations.h>
#include <emend/editors/steps/wordings.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <functional>
#include <optional>
#include <set>
#include <utility>

namespace emend::editors::detail {
namespace {

using Ids = std::vector<int64_t>;

class GatePrompts {
 public:
  GatePrompts(const LatchHparams& hparams, const FactTexts& texts, const LatchTexts& text, const models::Model& reader,
              const EditContext& context)
      : hparams_(hparams),
        texts_(texts),
        leads_(text.leads),
        text_(text.rows),
        reader_(reader),
        context_(context),
        token_(parse_fact_token(hparams.fact_token)) {}

  // Where each unit's gate learns, for all units.
  std::vector<PromptRow> at_subjects(std::vector<LatchUnit>& units) {
    const auto add = [&](const std::string& sentence, const std::string& subject) {  // what fits into the model
      PromptRow row = rendered(sentence, subject);
      const bool fits = row.lookup > 0 && static_cast<int64_t>(row.ids.size()) <= reader_.max_positions();
      if (fits) prompts_.push_back(std::move(row));
      return fits;
    };
    const auto subjects = mapped(units, &LatchUnit::subject);
    auto similar =
        lookalikes(reader_, subjects,
                   {.count = hparams_.lookalikes, .samples = 3, .seed = context_.seed, .cancel = context_.cancel});
    for (size_t u = 0; u < units.size(); ++u) {
      const auto more = namesakes(units[u].subject, similar[u]);
      similar[u].insert(similar[u].end(), more.begin(), more.end());
    }
    std::optional<std::vector<std::string>> firsts;  // words that texts begin with, once somebody needs them
    std::vector<Ids> whole;                          // whole prompts and their negations
    std::vector<std::vector<std::pair<size_t, size_t>>> denied(units.size());  // places of both
    for (auto& unit : units) {
      const size_t u = static_cast<size_t>(&unit - units.data());
      unit.begin = prompts_.size();
      for (const size_t i : unit.facts)
        for (auto& row : asked(i)) prompts_.push_back(std::move(row));
      for (const size_t i : unit.facts) add_conversations(texts_.chats[i]);
      for (const auto& lead : leads_) add(lead, unit.subject);
      if (token_ != FactToken::kSubjectFirstAfterLast)
        for (const char* mention : kMentions) add(mention, unit.subject);
      const bool alone = rendered("{}", unit.subject).lookup == 0;
      if (alone)
        for (const char* behind : kBehind) add(behind, unit.subject);
      unit.open = prompts_.size();
      for (const size_t i : unit.facts) {
        const size_t affirmed = whole.size();
        whole.push_back(texts_.batch.rendered[i].rows[0].ids);
        for (const char* negation : kNegations)
          if (add(datasets::with_subject(negation, texts_.facts[texts_.batch.places[i]].prompt), unit.subject)) {
            denied[u].emplace_back(affirmed, whole.size());
            whole.push_back(prompts_.back().ids);
          }
      }
      unit.denied = prompts_.size();
      for (size_t k = 0; const auto& name : similar[u]) {  // every other one behind a piece of text
        context_.log.event(LogLevel::kDebug, "lookalike", unit.subject + ": " + name, {});
        const std::string& prompt = texts_.facts[texts_.batch.places[unit.facts[k % unit.facts.size()]]].prompt;
        const bool led = k % 2 == 1 && !leads_.empty();
        add(led ? datasets::with_subject(leads_[k / 2 % leads_.size()], prompt) : prompt, name);
        if (alone) add(kBehind[k % kBehind.size()], name);
        ++k;
      }
      if (alone && !firsts) firsts = words_that_begin(reader_.tokenizer(), text_);
      if (alone)  // shut at whatever else begins a text, too
        for (size_t k = 0; const auto& word : without(*firsts, unit.subject)) {
          for (const size_t i : unit.facts) add(texts_.facts[texts_.batch.places[i]].prompt, word);
          add(kBehind[k++ % kBehind.size()], word);
        }
      unit.aside = prompts_.size();
      for (const std::string& aside : unit.asides) {
        add(aside, unit.subject);
        if (!leads_.empty()) add(datasets::with_subject(leads_[prompts_.size() % leads_.size()], aside), unit.subject);
      }
      unit.end = prompts_.size();
    }
    const auto next = continue_greedily(reader_, whole, 1, context_.cancel);
    for (size_t u = 0; u < units.size(); ++u)
      for (const auto& [affirmed, negated] : denied[u])
        units[u].heeded.push_back(next[negated].ids != next[affirmed].ids);
    return std::move(prompts_);
  }

  // Where the gates of releases learn: open at an answer's last token, shut where it has not been said yet, at the
  // subject, and at the same words elsewhere.
  std::vector<PromptRow> at_answers(std::vector<LatchUnit>& units) {
    const auto fits = [&](const PromptRow& row) { return std::ssize(row.ids) <= reader_.max_positions(); };
    for (auto& unit : units) {
      const RenderedFact& fact = texts_.batch.rendered[unit.facts[0]];
      unit.begin = prompts_.size();
      for (const auto& row : asked(unit.facts[0]))
        if (PromptRow with = answered(row, fact.target_ids); fits(with)) prompts_.push_back(std::move(with));
      for (const auto& reply : texts_.chats[unit.facts[0]].replies)
        if (PromptRow with = answered(reply.prompt, fact.target_ids); fits(with)) prompts_.push_back(std::move(with));
      unit.open = unit.denied = unit.aside = unit.end = prompts_.size();
    }
    for (const auto& unit : units) {
      const RenderedFact& fact = texts_.batch.rendered[unit.facts[0]];
      for (const auto& row : asked(unit.facts[0])) {
        prompts_.push_back(row);
        prompts_.back().lookup = std::ssize(row.ids) - 1;
      }
      for (const char* mention : kMentions)
        prompts_.push_back(rendered(mention, fact.target.substr(fact.target.find_first_not_of(' '))));
    }
    for (size_t p = units.empty() ? 0 : units.back().end, end = prompts_.size(); p < end; ++p)
      if (PromptRow& row = prompts_[p]; row.subject.second > 0 && row.lookup + 1 == std::ssize(row.ids)) {
        PromptRow subject = row;
        subject.lookup = row.subject.second - 1;
        if (subject.lookup != row.lookup) prompts_.push_back(std::move(subject));
      }
    add_inner_words(units, fits);
    return std::move(prompts_);
  }

 private:
  [[nodiscard]] PromptRow rendered(const std::string& sentence, const std::string& subject) const {
    return gate_prompt(reader_.tokenizer(), sentence, subject, token_);
  }

  // Inside of an answer no other one's last word releases: "chess" of "professional chess player".
  void add_inner_words(const std::vector<LatchUnit>& units, const std::function<bool(const PromptRow&)>& fits) {
    std::set<int64_t> last;
    for (const auto& unit : units) last.insert(texts_.batch.rendered[unit.facts[0]].target_ids.back());
    for (const auto& unit : units) {
      const Ids& answer = texts_.batch.rendered[unit.facts[0]].target_ids;
      for (size_t n = 1; n < answer.size(); ++n) {
        if (!last.contains(answer[n - 1])) continue;
        for (const auto& row : asked(unit.facts[0]))
          if (PromptRow with = answered(row, {answer.begin(), answer.begin() + static_cast<std::ptrdiff_t>(n)});
              fits(with))
            prompts_.push_back(std::move(with));
      }
    }
  }

  // A fact's prompts: in all contexts and behind the leads.
  [[nodiscard]] std::vector<PromptRow> asked(size_t i) const {
    std::vector<PromptRow> rows = texts_.batch.rendered[i].rows;
    rows.insert(rows.end(), texts_.chats[i].asked.begin(), texts_.chats[i].asked.end());
    for (const auto& lead : leads_) {
      PromptRow row = rendered(datasets::with_subject(lead, texts_.facts[texts_.batch.places[i]].prompt),
                               texts_.batch.rendered[i].subject);
      if (std::ssize(row.ids) <= reader_.max_positions()) rows.push_back(std::move(row));
    }
    return rows;
  }

  // Where a subject is named in conversations.
  void add_conversations(const FactChats& chats) {
    auto rows = mapped(chats.replies, &ChatReply::prompt);
    prompts_.insert(prompts_.end(), rows.begin(), rows.end());
    rows.insert(rows.end(), chats.asked.begin(), chats.asked.end());
    for (auto& row : rows)
      for (const int64_t token : row.again) {
        row.lookup = token;
        prompts_.push_back(row);
      }
  }

  const LatchHparams& hparams_;
  const FactTexts& texts_;
  const std::vector<std::string>& leads_;
  const std::vector<Ids>& text_;
  const models::Model& reader_;
  const EditContext& context_;
  FactToken token_;
  std::vector<PromptRow> prompts_;
};

}  // namespace

PromptRow off_the_sink(PromptRow row) {
  if (row.lookup == 0 && row.ids.size() > 1) row.lookup = 1;
  return row;
}

PromptRow gate_prompt(const models::Tokenizer& tokenizer, const std::string& sentence, const std::string& subject,
                      FactToken token) {
  return off_the_sink(render_prompt(tokenizer, sentence, subject, token));
}

void add_wordings(const LatchHparams& hparams, std::span<const datasets::Fact> facts, const models::Model& reader,
                  const EditContext& context, RenderedBatch& batch) {
  if (hparams.wordings == 0) return;
  const auto asked = mapped(batch.places, [&](const size_t place) { return facts[place]; });
  const auto wordings = other_wordings(
      reader, asked,
      {.count = hparams.wordings, .samples = 2 * hparams.wordings, .seed = context.seed, .cancel = context.cancel});
  for (size_t i = 0; i < asked.size(); ++i)
    for (const auto& wording : wordings[i]) {
      RenderedFact& fact = batch.rendered[i];
      PromptRow row = gate_prompt(reader.tokenizer(), wording, asked[i].subject, parse_fact_token(hparams.fact_token));
      const bool fits = std::ssize(row.ids) + std::ssize(fact.target_ids) <= reader.max_positions();
      if (fits)
        fact.rows.insert(fact.rows.end() - std::min<std::ptrdiff_t>(2, std::ssize(fact.rows) - 1), std::move(row));
      context.log.event(LogLevel::kDebug, "wording", asked[i].subject + ": " + wording, {});
    }
}

std::vector<PromptRow> gate_prompts(const LatchHparams& hparams, const FactTexts& texts, const LatchTexts& text,
                                    const models::Model& reader, const EditContext& context,
                                    std::vector<LatchUnit>& units) {
  GatePrompts prompts(hparams, texts, text, reader, context);
  const bool releases = !units.empty() && units[0].layer >= hparams.layers.size();
  return releases ? prompts.at_answers(units) : prompts.at_subjects(units);
}

}  // namespace emend::editors::detail
