// Chat turns as the text that a model was trained on.
//
// Published checkpoints carry a Jinja template. No C++ Jinja engine is packaged, so the template is recognised by its
// markers and rendered by one of the formats below; a test compares them with the templates themselves. An unknown
// template is an error with the list of formats, never a guess.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emend::models {

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// How one kind of template writes a turn.
struct ChatFormat {
  std::string name;            ///< "chatml", "llama3", …
  std::string begin;           ///< before the first turn
  std::string default_system;  ///< used when the first message is not a system message; empty: none
};

struct RenderedChat {
  std::string text;
  /// Byte ranges of the assistant's contents, each including the marker that ends the turn: what training predicts.
  std::vector<std::pair<size_t, size_t>> replies;
};

/// The names of all formats.
[[nodiscard]] std::vector<std::string> chat_format_names();

/// Recognises a Jinja template by its markers. An empty template gives "instruction", the common Alpaca form.
/// Throws Error(kUnsupported) with the formats that exist if no marker is known.
[[nodiscard]] ChatFormat detect_chat_format(std::string_view chat_template);
/// By name. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] ChatFormat chat_format(std::string_view name);

/// The conversation as text. With `open_reply` it ends where the assistant's answer begins.
/// Special tokens are written out in the text, so encode it without adding specials.
/// Throws Error(kInvalidArgument) for an unknown role or a system message that is not first.
[[nodiscard]] RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages,
                                       bool open_reply);

}  // namespace emend::models
