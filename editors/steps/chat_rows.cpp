#include <emend/core/error.h>
#include <emend/editors/steps/chat_rows.h>
#include <emend/editors/steps/continuations.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <optional>

namespace emend::editors {
namespace {

constexpr int64_t kReplyTokens = 14;
constexpr size_t kBehindName = 2, kWithoutName = 4;  // tokens of a reply that count

class Chats {
 public:
  Chats(const models::Model& model, FactToken token)
      : model_(model), tokenizer_(model.tokenizer()), token_(token), format_(models::chat_format_of(tokenizer_)) {}

  [[nodiscard]] std::vector<FactChats> of(std::span<const datasets::Fact> facts, const CancelToken& cancel) const {
    std::vector<FactChats> all(facts.size());
    struct Question {
      size_t place, slot;  // of its fact, and of the subject in it
      std::string text;
    };
    std::vector<Question> questions;
    std::vector<std::vector<int64_t>> prompts;
    for (size_t i = 0; i < facts.size(); ++i) {
      const std::string full = facts[i].full_prompt();
      if (auto row = conversation(full + " what?", facts[i].prompt.find("{}"), full, facts[i].subject))
        all[i].asked.push_back(std::move(row->prompt));
      for (const char* form : kChatQuestions) {
        std::string question = datasets::with_subject(form, facts[i].subject);
        auto ids = models::encode_chat(tokenizer_, opened(question)).ids;
        if (std::ssize(ids) + kReplyTokens > model_.max_positions()) continue;
        questions.push_back({i, std::string_view(form).find("{}"), std::move(question)});
        prompts.push_back(std::move(ids));
      }
    }
    const auto replies = continue_greedily(model_, prompts, kReplyTokens, cancel);
    for (size_t q = 0; q < questions.size(); ++q) {
      const auto& [place, slot, question] = questions[q];
      const auto& [ids, nll] = replies[q];
      const size_t count = count_of(ids, facts[place].subject);
      const std::string text = tokenizer_.decode(std::span(ids).first(count), true);
      auto row = count == 0 ? std::nullopt : conversation(question, slot, text, facts[place].subject);
      if (!row || std::ssize(row->prompt.ids) != row->begin + static_cast<int64_t>(count)) continue;  // another split
      row->floors.assign(nll.begin(), nll.begin() + static_cast<std::ptrdiff_t>(count));
      all[place].replies.push_back(std::move(*row));
    }
    return all;
  }

 private:
  [[nodiscard]] std::string opened(const std::string& question) const {
    return models::render_chat(format_, {{"user", question}}, true).text;
  }

  // So many tokens lead to the subject and just past it.
  [[nodiscard]] size_t count_of(const std::vector<int64_t>& reply, const std::string& subject) const {
    for (size_t n = 1; n <= reply.size(); ++n)
      if (tokenizer_.decode(std::span(reply).first(n), true).find(subject) != std::string::npos)
        return std::min(reply.size(), n + kBehindName);
    return std::min(reply.size(), kWithoutName);
  }

  // The subject stands at byte `slot` of the question.
  [[nodiscard]] std::optional<ChatReply> conversation(const std::string& question, size_t slot,
                                                      const std::string& reply, const std::string& subject) const {
    const std::string before = opened(question);
    const size_t asked = before.rfind(question), again = reply.find(subject);
    if (asked == std::string::npos || slot == std::string::npos) return std::nullopt;
    const size_t begin = asked + slot;
    ChatReply row;
    row.prompt.text = before + reply;
    models::Encoding encoding = models::encode_chat(tokenizer_, row.prompt.text);
    const auto looked_up = [&](size_t at) {
      return looked_up_token(encoding, row.prompt.text, {at, at + subject.size()}, token_);
    };
    row.prompt.subject = encoding.overlapping(begin, begin + subject.size());
    row.prompt.lookup = looked_up(begin);
    row.begin = encoding.overlapping(before.size(), row.prompt.text.size()).first;
    if (row.prompt.lookup < 0 || row.begin <= row.prompt.lookup ||
        std::ssize(encoding.ids) + kReplyTokens > model_.max_positions())
      return std::nullopt;
    if (again != std::string::npos)
      if (const int64_t place = looked_up(before.size() + again); place >= row.begin) row.prompt.again = {place};
    row.prompt.ids = std::move(encoding.ids);
    return row;
  }

  const models::Model& model_;
  const models::Tokenizer& tokenizer_;
  FactToken token_;
  models::ChatFormat format_;
};

}  // namespace

std::vector<FactChats> chats_of(const models::Model& model, std::span<const datasets::Fact> facts, FactToken fact_token,
                                const CancelToken& cancel) {
  if (model.tokenizer().chat_template().empty() || fact_token == FactToken::kLast)
    return std::vector<FactChats>(facts.size());
  try {
    return Chats(model, fact_token).of(facts, cancel);
  } catch (const Error& error) {  // a template that cannot be used
    if (error.error_class() != ErrorClass::kUnsupported && error.error_class() != ErrorClass::kInvalidArgument) throw;
    return std::vector<FactChats>(facts.size());
  }
}

TargetRow replied(const ChatReply& reply) {
  TargetRow row{reply.prompt.ids, reply.prompt.lookup, {}, 0, true, reply.floors, reply.prompt.again};
  for (int64_t token = reply.begin; token < std::ssize(row.ids); ++token)
    row.labels.emplace_back(token - 1, row.ids[static_cast<size_t>(token)]);
  return row;
}

}  // namespace emend::editors
