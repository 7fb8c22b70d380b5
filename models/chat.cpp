#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <ctime>
#include <iomanip>
#include <locale>
#include <sstream>

namespace emend::models {
namespace {

struct Known {
  std::string marker;  // in the Jinja template; the first match in the table's order wins; empty: told otherwise
  ChatFormat format;   // with <s> and </s> for the tokenizer's own
};

const std::vector<Known>& formats() {
  static const std::vector<Known> known = {
      {"<|start_header_id|>",
       {"llama3", "<|begin_of_text|>", "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "", true}},
      {"<|im_sep|>",
       {"phi4", "", "<|im_start|>system<|im_sep|>", "<|im_end|>", "<|im_start|>user<|im_sep|>", "<|im_end|>",
        "<|im_start|>assistant<|im_sep|>", "<|im_end|>"}},
      {"<|im_start|>",
       {"chatml", "", "<|im_start|>system\n", "<|im_end|>\n", "<|im_start|>user\n", "<|im_end|>\n",
        "<|im_start|>assistant\n", "<|im_end|>\n"}},
      {"<start_of_turn>",
       {"gemma", "<bos>", "", "", "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n",
        "<end_of_turn>\n", "%s\n\n", true}},
      {"[gMASK]<sop>", {"glm4", "[gMASK]<sop>", "<|system|>\n", "", "<|user|>\n", "", "<|assistant|>\n", ""}},
      {"[gMASK]sop", {"chatglm3", "[gMASK]sop", "<|system|>\n ", "", "<|user|>\n ", "", "<|assistant|>\n ", ""}},
      {"'|>' + message['content'] + '<|end|>'",
       {"phi4-mini", "", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"}},
      {"<|end|>", {"phi3", "", "<|system|>\n", "<|end|>\n", "<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>\n"}},
      {"<|assistant|>", {"zephyr", "", "<|system|>\n", "</s>\n", "<|user|>\n", "</s>\n", "<|assistant|>\n", "</s>\n"}},
      {"", {"tulu", "", "<|system|>\n", "\n", "<|user|>\n", "\n", "<|assistant|>\n", "</s>\n"}},
      {"<<SYS>>", {"llama2", "", "", "", "<s>[INST] ", " [/INST]", " ", " </s>", "<<SYS>>\n%s\n<</SYS>>\n\n", true}},
      {"[INST]", {"mistral", "<s>", "", "", " [INST] ", " [/INST]", " ", "</s>", "%s\n\n"}},
      {"### Instruction", {"instruction", "", "", "\n\n", "### Instruction:\n", "\n\n", "### Response:\n", "\n\n"}},
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

bool holds(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// What stands between `open` and the next of `close`; `otherwise` where it does not.
std::string between(std::string_view text, std::string_view open, std::string_view close, std::string_view otherwise) {
  const size_t at = text.find(open), begin = at + open.size();
  const size_t end = at == std::string_view::npos ? at : text.find_first_of(close, begin);
  return std::string(end == std::string_view::npos ? otherwise : text.substr(begin, end - begin));
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::put_time(&local, "%d %b %Y");
  return text.str();
}

// Llama 3.1 and later begin every system text with two dates.
std::string dates_in(std::string_view text) {
  constexpr std::string_view kCutting = "Cutting Knowledge Date: ";
  if (!holds(text, kCutting)) return "";
  const std::string date =
      holds(text, "strftime_now") ? today() : between(text, "date_string = \"", "\"", "26 Jul 2024");
  return std::string(kCutting) + between(text, kCutting, "\n\"", "December 2023") + "\nToday Date: " + date + "\n\n";
}

// Templates of one format differ in spaces: those in quotes count.
void read_mistral(std::string_view text, ChatFormat& format) {
  const auto quoted = [&](const std::string& part) { return holds(text, "'" + part) || holds(text, '"' + part); };
  if (!quoted(" [INST]")) format.user_open = "[INST] ";
  if (!quoted(" [/INST]")) format.user_close = "[/INST]";
  if (!quoted(" ' + message") && !quoted(" \" + message")) format.reply_open = "";
  if (holds(text, "eos_token + ' '") || holds(text, "eos_token + \" \"")) format.reply_close += " ";
}

// Templates such as SmolLM2's write a fixed system turn when the conversation has none.
std::string default_system_in(std::string_view text, const ChatFormat& turns) {
  if (turns.system_open.empty()) return "";
  for (size_t from = 0;;) {
    const size_t open = text.find(turns.system_open, from);
    if (open == std::string_view::npos) return "";
    const size_t begin = open + turns.system_open.size();
    const size_t close = text.find(turns.system_close.substr(0, turns.system_close.size() - 1), begin);
    std::string content(close == std::string_view::npos ? "" : text.substr(begin, close - begin));
    // Inside of a quoted text the next such quote ends it.
    const char before = open > 0 ? text[open - 1] : ' ';
    const bool quoted = before == '\'' || before == '"';
    const std::string quote(1, before), escaped = "\\" + quote;
    const bool whole = quoted ? replace_all(content, escaped, "").find(before) == std::string::npos
                              : content.find_first_of("{}'\"+") == std::string::npos;
    if (!content.empty() && whole) return quoted ? replace_all(content, escaped, quote) : content;
    from = begin;
  }
}

}  // namespace

std::vector<std::string> chat_format_names() {
  return mapped(formats(), [](const Known& known) { return known.format.name; });
}

ChatFormat chat_format(std::string_view name, const ChatTokens& tokens) {
  for (const Known& known : formats())
    if (known.format.name == name) return with_tokens(known.format, tokens);
  refuse({"chat format", "\"" + std::string(name) + "\"", "a known format", did_you_mean(name, chat_format_names())});
}

ChatFormat detect_chat_format(std::string_view chat_template, const ChatTokens& tokens) {
  if (chat_template.empty()) return chat_format("instruction", tokens);
  const std::string text = replace_all(std::string(chat_template), "\\n", "\n");
  for (const Known& known : formats()) {
    if (known.marker.empty() || !holds(text, known.marker)) continue;
    std::string name = known.format.name;
    // Where the user's turn is not closed with the end token, a line break closes it.
    const std::string user = between(text, "<|user|>", "}", text);
    if (name == "zephyr" && !holds(user, "eos_token") && (tokens.eos.empty() || !holds(user, tokens.eos)))
      name = "tulu";
    ChatFormat format = chat_format(name, tokens);
    const bool shows_bos =
        format.begin.empty() && !format.user_open.starts_with(tokens.bos) && holds(text, "bos_token");
    if (shows_bos) format.begin = tokens.bos;
    if (name == "mistral") read_mistral(text, format);
    if (name == "llama3") format.system_head = dates_in(text);
    format.default_system = default_system_in(text, format);
    return format;
  }
  throw Error(ErrorClass::kUnsupported, {"chat template", "none of the known turn markers appears in it",
                                         join(chat_format_names()), "name one of these formats explicitly"});
}

ChatFormat chat_format_of(const Tokenizer& tokenizer, std::string_view name) {
  const auto text_of = [&](std::optional<int64_t> id) { return id ? tokenizer.token_text(*id) : ""; };
  const ChatTokens tokens{text_of(tokenizer.bos_id()), text_of(tokenizer.eos_id())};
  return name.empty() ? detect_chat_format(tokenizer.chat_template(), tokens) : chat_format(name, tokens);
}

RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages, bool open_reply) {
  const auto content_of = [&](const ChatMessage& m) {
    return format.trim ? std::string(trimmed(m.content)) : m.content;
  };
  RenderedChat chat;
  chat.text = format.begin;
  std::string pending_system;
  const auto add_system = [&](const std::string& content) {
    const std::string whole = format.system_head + content;
    if (!format.joined_system.empty()) {
      pending_system = format.joined_system;
      pending_system.replace(pending_system.find("%s"), 2, whole);
    } else {
      chat.text += format.system_open + whole + format.system_close;
    }
  };
  const bool own_system = !format.default_system.empty() || !format.system_head.empty();
  if (own_system && (messages.empty() || messages[0].role != "system")) add_system(format.default_system);
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role == "system") {
      if (i != 0) refuse({"message " + std::to_string(i), "a system message", "it to be the first", ""});
      add_system(content_of(message));
    } else if (message.role == "user") {
      chat.text += format.user_open + pending_system + content_of(message) + format.user_close;
      pending_system.clear();
    } else if (message.role == "assistant") {
      chat.text += format.reply_open;
      const size_t blank = format.reply_open.find_last_not_of(' ') + 1;  // tokenizers join blanks to the first word
      const size_t begin = chat.text.size() - (format.reply_open.size() - blank);
      chat.text += content_of(message) + format.reply_close;
      chat.replies.emplace_back(begin, chat.text.size());
    } else {
      refuse({"message " + std::to_string(i), "role \"" + message.role + "\"", "system, user or assistant", ""});
    }
  }
  // A trailing space before the answer would change its first token.
  if (open_reply && format.reply_open != " ") chat.text += format.reply_open;
  return chat;
}

}  // namespace emend::models
