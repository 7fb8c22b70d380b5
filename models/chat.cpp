#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/chat.h>

#include <algorithm>
#include <array>

namespace emend::models {
namespace {

// What a format writes around the contents. In `user_with_system`, %s stands for the system text and %u for the user's.
struct Turns {
  std::string_view name;
  std::string_view marker;  // in the Jinja template; the first match in the table's order wins
  std::string_view begin;
  std::string_view system_open, system_close;  // empty: the system text joins the first user turn
  std::string_view user_open, user_close;
  std::string_view reply_open, reply_close;
  std::string_view joined_system;  // how the system text stands in the first user turn
  bool trim;
};

constexpr std::array<Turns, 12> kFormats = {{
    {"llama3", "<|start_header_id|>", "<|begin_of_text|>", "<|start_header_id|>system<|end_header_id|>\n\n",
     "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "", true},
    {"phi4", "<|im_sep|>", "", "<|im_start|>system<|im_sep|>", "<|im_end|>", "<|im_start|>user<|im_sep|>", "<|im_end|>",
     "<|im_start|>assistant<|im_sep|>", "<|im_end|>", "", false},
    {"chatml", "<|im_start|>", "", "<|im_start|>system\n", "<|im_end|>\n", "<|im_start|>user\n", "<|im_end|>\n",
     "<|im_start|>assistant\n", "<|im_end|>\n", "", false},
    {"gemma", "<start_of_turn>", "<bos>", "", "", "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n",
     "<end_of_turn>\n", "%s\n\n", true},
    {"glm4", "[gMASK]<sop>", "[gMASK]<sop>", "<|system|>\n", "", "<|user|>\n", "", "<|assistant|>\n", "", "", false},
    {"chatglm3", "[gMASK]sop", "[gMASK]sop", "<|system|>\n ", "", "<|user|>\n ", "", "<|assistant|>\n ", "", "", false},
    {"phi4-mini", "'|>' + message['content'] + '<|end|>'", "", "<|system|>", "<|end|>", "<|user|>", "<|end|>",
     "<|assistant|>", "<|end|>", "", false},
    {"phi3", "<|end|>", "", "<|system|>\n", "<|end|>\n", "<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>\n", "",
     false},
    {"zephyr", "<|assistant|>", "", "<|system|>\n", "</s>\n", "<|user|>\n", "</s>\n", "<|assistant|>\n", "</s>\n", "",
     false},
    {"llama2", "<<SYS>>", "", "", "", "<s>[INST] ", " [/INST]", " ", " </s>", "<<SYS>>\n%s\n<</SYS>>\n\n", true},
    {"mistral", "[INST]", "<s>", "", "", " [INST] ", " [/INST]", " ", "</s>", "%s\n\n", false},
    {"instruction", "### Instruction", "", "", "\n\n", "### Instruction:\n", "\n\n", "### Response:\n", "\n\n", "",
     false},
}};

// Null: no such format.
const Turns* find_turns(std::string_view name) {
  const auto found = std::ranges::find(kFormats, name, &Turns::name);
  return found == kFormats.end() ? nullptr : &*found;
}

ChatFormat make(const Turns& turns) {
  return {std::string(turns.name), std::string(turns.begin), ""};
}

// Templates such as SmolLM2's write a fixed system turn when the conversation has none.
std::string default_system_in(std::string_view text, const Turns& turns) {
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
  return mapped(kFormats, [](const Turns& turns) { return std::string(turns.name); });
}

ChatFormat chat_format(std::string_view name) {
  if (const auto* turns = find_turns(name)) return make(*turns);
  refuse({"chat format", "\"" + std::string(name) + "\"", "a known format", did_you_mean(name, chat_format_names())});
}

ChatFormat detect_chat_format(std::string_view chat_template) {
  if (chat_template.empty()) return make(kFormats.back());
  const std::string plain = replace_all(std::string(chat_template), "\\n", "\n");
  for (const auto& turns : kFormats) {
    if (plain.find(turns.marker) == std::string::npos) continue;
    ChatFormat format = make(turns);
    format.default_system = default_system_in(plain, turns);
    return format;
  }
  throw Error(ErrorClass::kUnsupported, {"chat template", "none of the known turn markers appears in it",
                                         join(chat_format_names()), "name one of these formats explicitly"});
}

RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages, bool open_reply) {
  const Turns* found = find_turns(format.name);
  if (!found) refuse({"chat format", "\"" + format.name + "\"", "a known format", ""});
  const Turns& turns = *found;
  const auto content_of = [&](const ChatMessage& m) {
    return turns.trim ? std::string(trimmed(m.content)) : m.content;
  };
  RenderedChat chat;
  chat.text = format.begin;
  std::string pending_system;
  const auto add_system = [&](const std::string& content) {
    if (!turns.joined_system.empty()) {
      pending_system = turns.joined_system;
      pending_system.replace(pending_system.find("%s"), 2, content);
    } else {
      chat.text += std::string(turns.system_open) + content + std::string(turns.system_close);
    }
  };
  if (!format.default_system.empty() && (messages.empty() || messages[0].role != "system"))
    add_system(format.default_system);
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role == "system") {
      if (i != 0) refuse({"message " + std::to_string(i), "a system message", "it to be the first", ""});
      add_system(content_of(message));
    } else if (message.role == "user") {
      chat.text += std::string(turns.user_open) + pending_system + content_of(message) + std::string(turns.user_close);
      pending_system.clear();
    } else if (message.role == "assistant") {
      chat.text += turns.reply_open;
      const size_t begin = chat.text.size();
      chat.text += content_of(message) + std::string(turns.reply_close);
      chat.replies.emplace_back(begin, chat.text.size());
    } else {
      refuse({"message " + std::to_string(i), "role \"" + message.role + "\"", "system, user or assistant", ""});
    }
  }
  if (open_reply) chat.text += turns.reply_open;
  // A trailing space before the answer would change its first token.
  if (open_reply && (turns.name == "llama2" || turns.name == "mistral") && chat.text.back() == ' ')
    chat.text.pop_back();
  return chat;
}

}  // namespace emend::models
