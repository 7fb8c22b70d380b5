// Chat turns as the text that a model was trained on.
//
// Published checkpoints carry a Jinja template. No C++ Jinja engine is packaged, so the template is recognised by its
// markers and rendered by one of the formats below, with what differs among the templates of a format read from it; a
// test compares them with the templates themselves. A template without a known marker is an error with the list of
// formats.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emend::models {

class Tokenizer;

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// What one kind of template writes around the contents.
struct ChatFormat {
  std::string name;                       ///< "chatml", "llama3", …
  std::string begin;                      ///< before the first turn
  std::string system_open, system_close;  ///< empty: the system text joins the first user turn
  std::string user_open, user_close;
  std::string reply_open, reply_close;
  std::string joined_system = {};   ///< how the system text, %s, stands in the first user turn
  bool trim = false;                ///< contents lose the white space at their ends
  std::string system_head = {};     ///< in front of every system text, also where the messages have none
  std::string default_system = {};  ///< used when the first message is not a system message; empty: none
};

/// What a template calls bos_token and eos_token; either may be empty.
struct ChatTokens {
  std::string bos = "<s>", eos = "</s>";
};

struct RenderedChat {
  std::string text;
  /// Byte ranges of the assistant's contents, each including the marker that ends the turn, and blanks that lead to the
  /// first word: what training predicts.
  std::vector<std::pair<size_t, size_t>> replies;
};

/// The names of all formats.
[[nodiscard]] std::vector<std::string> chat_format_names();

/// Recognises a Jinja template by its markers. An empty template gives "instruction", the common Alpaca form. A date
/// that the template asks of the clock is today's. Throws Error(kUnsupported) with the formats that exist if no marker
/// is known.
[[nodiscard]] ChatFormat detect_chat_format(std::string_view chat_template, const ChatTokens& tokens = {});
/// By name. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] ChatFormat chat_format(std::string_view name, const ChatTokens& tokens = {});
/// With this tokenizer's tokens: the named format, or that of its template if `name` is empty. Throws as those two.
[[nodiscard]] ChatFormat chat_format_of(const Tokenizer& tokenizer, std::string_view name = "");

/// The conversation as text. With `open_reply` it ends where the assistant's answer begins.
/// Special tokens are written out in the text, so encode it without adding specials.
/// Throws Error(kInvalidArgument) for an unknown role or a system message that is not first.
[[nodiscard]] RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages,
                                       bool open_reply);

}  // namespace emend::models
