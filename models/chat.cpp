#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/models/chat.h>
#include <emend/models/detail/jinja.h>
#include <emend/models/tokenizer/detail/added_tokens.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <span>

namespace emend::models {
namespace {

// With <s> and </s> for the tokenizer's own.
const std::vector<ChatFormat>& formats() {
  static const std::vector<ChatFormat> known = {
      {"llama3", "<|begin_of_text|>", "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>",
       "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
       "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "", true},
      {"phi4", "", "<|im_start|>system<|im_sep|>", "<|im_end|>", "<|im_start|>user<|im_sep|>", "<|im_end|>",
       "<|im_start|>assistant<|im_sep|>", "<|im_end|>"},
      {"chatml", "", "<|im_start|>system\n", "<|im_end|>\n", "<|im_start|>user\n", "<|im_end|>\n",
       "<|im_start|>assistant\n", "<|im_end|>\n"},
      {"gemma", "<bos>", "", "", "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n",
       "<end_of_turn>\n", "%s\n\n", true},
      {"glm4", "[gMASK]<sop>", "<|system|>\n", "", "<|user|>\n", "", "<|assistant|>\n", ""},
      {"chatglm3", "[gMASK]sop", "<|system|>\n ", "", "<|user|>\n ", "", "<|assistant|>\n ", ""},
      {"phi4-mini", "", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"},
      {"phi3", "", "<|system|>\n", "<|end|>\n", "<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>\n"},
      {"zephyr", "", "<|system|>\n", "</s>\n", "<|user|>\n", "</s>\n", "<|assistant|>\n", "</s>\n"},
      {"tulu", "", "<|system|>\n", "\n", "<|user|>\n", "\n", "<|assistant|>\n", "</s>\n"},
      {"llama2", "", "", "", "<s>[INST] ", " [/INST]", " ", " </s>", "<<SYS>>\n%s\n<</SYS>>\n\n", true},
      {"mistral", "<s>", "", "", " [INST] ", " [/INST]", " ", "</s>", "%s\n\n"},
      {"instruction", "", "", "\n\n", "### Instruction:\n", "\n\n", "### Response:\n", "\n\n"},
  };
  return known;
}

ChatFormat with_tokens(ChatFormat format, const ChatTokens& tokens) {
  for (auto* text : {&format.begin, &format.system_close, &format.user_open, &format.user_close, &format.reply_close}) {
    *text = replace_all(*text, "</s>", tokens.eos);
    *text = replace_all(*text, "<s>", tokens.bos);
  }
  return format;
}

using Messages = std::span<const ChatMessage>;

// An error of a template with the way out.
Error with_way_out(const Error& error) {
  auto parts = parts_of(error);
  if (error.error_class() == ErrorClass::kUnsupported)
    parts.advice = "name the format with " + setting("chat_format") + ": " + join(chat_format_names());
  return Error(error.error_class(), parts);
}

std::string by_template(const ChatFormat& format, Messages messages, bool open_reply) {
  nlohmann::ordered_json variables = {{"messages", nlohmann::ordered_json::array()},
                                      {"add_generation_prompt", open_reply},
                                      {"tools", nullptr},
                                      {"documents", nullptr}};
  for (const auto& [name, token] : {std::pair{"bos_token", &format.tokens.bos},
                                    {"eos_token", &format.tokens.eos},
                                    {"unk_token", &format.tokens.unk},
                                    {"pad_token", &format.tokens.pad}})
    if (!token->empty()) variables[name] = *token;
  for (const ChatMessage& message : messages)
    variables["messages"].push_back({{"role", message.role}, {"content", message.content}});
  return format.jinja->render(variables);
}

// Nothing where the template refuses this conversation.
std::optional<std::string> tried(const ChatFormat& format, Messages messages, bool open_reply) {
  try {
    return by_template(format, messages, open_reply);
  } catch (const Error&) {
    return std::nullopt;
  }
}

size_t common(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

using Range = std::pair<size_t, size_t>;

// The answer `i` is what its turn adds to the text that asks for it, if the whole begins with both.
std::optional<Range> reply_by_prefixes(const ChatFormat& format, Messages messages, size_t i, std::string_view whole) {
  const auto open = tried(format, messages.first(i), true), closed = tried(format, messages.first(i + 1), false);
  if (!open || !closed || !closed->starts_with(*open) || !whole.starts_with(*closed)) return std::nullopt;
  if (open->size() == closed->size() && !trimmed(messages[i].content).empty()) return std::nullopt;
  return Range(open->size(), closed->size());
}

// What the template writes up to the answer `i` and behind it (empty where that cannot be told): found by an answer
// that stands nowhere else.
std::pair<std::string, std::string> around_reply(const ChatFormat& format, Messages messages, size_t i) {
  constexpr const char* kAnswer = "answer-7f3a1c";
  std::vector<ChatMessage> list(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  list[i].content = kAnswer;
  const std::string text = tried(format, list, false).value_or("");
  const size_t at = text.rfind(kAnswer);
  if (at == text.npos) return {tried(format, messages.first(i), false).value_or(""), ""};
  return {text.substr(0, at), text.substr(at + std::string_view(kAnswer).size())};
}

// Where the content stands behind `from`, with what the template writes behind it. Templates may trim an answer, or
// leave its thoughts out.
std::optional<Range> reply_by_content(const ChatFormat& format, Messages messages, size_t i, std::string_view whole,
                                      size_t from) {
  const auto [before, tail] = around_reply(format, messages, i);
  from = std::max(from, common(before, whole));
  const std::string_view content = messages[i].content, marker = "</think>";
  const size_t thoughts = content.rfind(marker);
  const std::string_view said = thoughts == content.npos ? content : content.substr(thoughts + marker.size());
  for (const std::string_view text : {content, trimmed(content), trimmed(said)}) {
    const size_t at = text.empty() ? whole.npos : whole.find(text, from);
    if (at == whole.npos) continue;
    size_t closing = common(tail, whole.substr(at + text.size()));
    if (closing < tail.size())  // other turns end otherwise: not within a marker
      if (const size_t opened = tail.substr(0, closing).rfind('<');
          opened != tail.npos && tail.find('>', opened) >= closing)
        closing = opened;
    return Range(at, at + text.size() + closing);
  }
  return std::nullopt;
}

std::vector<Range> replies_in(const ChatFormat& format, Messages messages, std::string_view whole) {
  std::vector<Range> replies;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    const size_t from = replies.empty() ? 0 : replies.back().second;
    auto reply = reply_by_prefixes(format, messages, i, whole);
    if (!reply || reply->first < from) reply = reply_by_content(format, messages, i, whole, from);
    if (!reply && trimmed(messages[i].content).empty()) continue;
    if (!reply)
      throw Error(ErrorClass::kUnsupported,
                  {"message " + std::to_string(i), "an answer that the chat template leaves out",
                   "one that it writes as it is", ""});
    while (reply->first > from && whole[reply->first - 1] == ' ') --reply->first;  // joined to the first word
    replies.push_back(*reply);
  }
  return replies;
}

RenderedChat render_template(const ChatFormat& format, std::vector<ChatMessage> messages, bool open_reply) {
  RenderedChat chat;
  try {
    chat.text = by_template(format, messages, open_reply);
  } catch (const Error& error) {
    const bool may_join = messages.size() > 1 && messages[0].role == "system" && messages[1].role == "user";
    if (error.error_class() != ErrorClass::kInvalidArgument || !may_join) throw;
    messages[1].content = messages[0].content + "\n\n" + messages[1].content;
    messages.erase(messages.begin());
    chat.text = by_template(format, messages, open_reply);
  }
  if (!open_reply) chat.replies = replies_in(format, messages, chat.text);
  return chat;
}

RenderedChat render_named(const ChatFormat& format, const std::vector<ChatMessage>& messages, bool open_reply) {
  const auto content_of = [&](const ChatMessage& m) {
    return format.trim ? std::string(trimmed(m.content)) : m.content;
  };
  RenderedChat chat;
  chat.text = format.begin;
  std::string pending_system;
  const auto add_system = [&](const std::string& content) {
    if (!format.joined_system.empty()) {
      pending_system = format.joined_system;
      pending_system.replace(pending_system.find("%s"), 2, content);
    } else {
      chat.text += format.system_open + content + format.system_close;
    }
  };
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role == "system") {
      if (i != 0) refuse({"message " + std::to_string(i), "a system message", "it to be the first", ""});
      add_system(content_of(message));
    } else if (message.role == "user") {
      chat.text += format.user_open + pending_system + content_of(message) + format.user_close;
      pending_system.clear();
    } else {
      chat.text += format.reply_open;
      const size_t blank = format.reply_open.find_last_not_of(' ') + 1;  // tokenizers join blanks to the first word
      const size_t begin = chat.text.size() - (format.reply_open.size() - blank);
      chat.text += content_of(message) + format.reply_close;
      chat.replies.emplace_back(begin, chat.text.size());
    }
  }
  if (!pending_system.empty())
    refuse({"message 0", "a system message without a user's behind it",
            "a user's message, which it joins in this format", ""});
  // A trailing space before the answer would change its first token.
  if (open_reply) chat.text += format.reply_open.substr(0, format.reply_open.find_last_not_of(' ') + 1);
  return chat;
}

}  // namespace

std::vector<std::string> chat_format_names() {
  return mapped(formats(), &ChatFormat::name);
}

ChatFormat chat_format(std::string_view name, const ChatTokens& tokens) {
  for (const ChatFormat& known : formats())
    if (known.name == name) return with_tokens(known, tokens);
  refuse({"chat format", "\"" + std::string(name) + "\"", "a known format", did_you_mean(name, chat_format_names())});
}

ChatFormat detect_chat_format(std::string_view chat_template, const ChatTokens& tokens, const std::string& place) {
  if (chat_template.empty()) return chat_format("instruction", tokens);
  ChatFormat format;
  format.name = "template";
  format.tokens = tokens;
  try {
    format.jinja = std::make_shared<const detail::Jinja>(chat_template, place);
  } catch (const Error& error) {
    throw with_way_out(error);
  }
  format.reply_close =
      around_reply(format, std::vector<ChatMessage>{{"user", "a question"}, {"assistant", ""}}, 1).second;
  return format;
}

ChatFormat chat_format_of(const Tokenizer& tokenizer, std::string_view name, const Log& log) {
  if (name.empty() && tokenizer.chat_template().empty())
    log.warning("chat.template",
                "the model has no chat template: turns are written as \"### Instruction:\" and "
                "\"### Response:\" (" +
                    setting("chat_format", "instruction") + "), which it may not know");
  const auto text_of = [&](std::optional<int64_t> id) { return id ? tokenizer.token_text(*id) : ""; };
  const auto bos = tokenizer.bos_in_chats() ? tokenizer.bos_id() : std::nullopt;
  const ChatTokens tokens{text_of(bos), text_of(tokenizer.eos_id()), text_of(tokenizer.unk_id()),
                          text_of(tokenizer.pad_id())};
  if (!name.empty()) return chat_format(name, tokens);
  const std::string& place = tokenizer.chat_template_place();
  return detect_chat_format(tokenizer.chat_template(), tokens, place.empty() ? "chat template" : place);
}

RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages, bool open_reply) {
  static constexpr std::array<std::string_view, 3> kRoles = {"system", "user", "assistant"};
  for (size_t i = 0; i < messages.size(); ++i)
    if (std::ranges::find(kRoles, messages[i].role) == kRoles.end())
      refuse({"message " + std::to_string(i), "role \"" + messages[i].role + "\"", "system, user or assistant", ""});
  if (!format.jinja) return render_named(format, messages, open_reply);
  try {
    return render_template(format, messages, open_reply);
  } catch (const Error& error) {
    throw with_way_out(error);
  }
}

Encoding encode_chat(const Tokenizer& tokenizer, std::string_view text) {
  const auto unseen = [&](int64_t id) { return tokenizer.encode_ids(tokenizer.token_text(id)) != std::vector{id}; };
  if (std::ranges::none_of(tokenizer.prefix_ids(), unseen)) return tokenizer.encode(text);
  detail::AddedTokenSearch specials;
  for (int64_t id = tokenizer.vocab_size(); id-- > 0;)  // of equal texts the first id counts
    if (tokenizer.is_special(id)) specials.add(tokenizer.token_text(id), {.id = static_cast<uint32_t>(id)});
  std::vector<detail::AddedSpan> spans;
  specials.split(text, spans);
  Encoding all;
  for (const auto& [begin, end, token] : spans) {
    Encoding part;
    if (token)
      part = {{token->id}, {{0, end - begin}}};
    else
      part = tokenizer.encode(text.substr(begin, end - begin));
    all.ids.insert(all.ids.end(), part.ids.begin(), part.ids.end());
    for (const auto& [from, to] : part.offsets) all.offsets.emplace_back(begin + from, begin + to);
  }
  return all;
}

}  // namespace emend::models
