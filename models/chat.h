// Chat turns as the text that a model was trained on.
//
// Published checkpoints carry a Jinja template, which detail/jinja.h renders as transformers does. The formats that
// have a name here are for models without a template, and for those who want another than the model's.
#pragma once

#include <emend/core/log.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emend::models {

namespace detail {
class Jinja;
}

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// What a template calls bos_token, eos_token, …; one that is empty is not defined there.
struct ChatTokens {
  std::string bos = "<s>", eos = "</s>", unk = {}, pad = {};
};

/// What is written around the contents: by the table of named formats, or by a template.
struct ChatFormat {
  std::string name;                       ///< "chatml", "llama3", …; "template" for a model's own
  std::string begin;                      ///< before the first turn
  std::string system_open, system_close;  ///< empty: the system text joins the first user turn
  std::string user_open, user_close;
  std::string reply_open, reply_close;              ///< a template's reply_close is what it writes behind an answer
  std::string joined_system = {};                   ///< how the system text, %s, stands in the first user turn
  bool trim = false;                                ///< contents lose the white space at their ends
  std::shared_ptr<const detail::Jinja> jinja = {};  ///< set: the template writes everything
  ChatTokens tokens = {};                           ///< the template's
};

struct RenderedChat {
  std::string text;
  /// Byte ranges of the assistant's contents, each including the marker that ends the turn, and blanks that lead to the
  /// first word: what training predicts. A template gives none with `open_reply`.
  std::vector<std::pair<size_t, size_t>> replies;
};

/// The names of all formats.
[[nodiscard]] std::vector<std::string> chat_format_names();

/// The format that a Jinja template describes, which messages call `place`. An empty template gives "instruction", the
/// common Alpaca form. Throws Error(kUnsupported) with line and reason if the template cannot be parsed.
[[nodiscard]] ChatFormat detect_chat_format(std::string_view chat_template, const ChatTokens& tokens = {},
                                            const std::string& place = "chat template");
/// By name. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] ChatFormat chat_format(std::string_view name, const ChatTokens& tokens = {});
/// With this tokenizer's tokens: the named format, or that of its template if `name` is empty; `log` is warned where
/// there is none. Throws as those two.
[[nodiscard]] ChatFormat chat_format_of(const Tokenizer& tokenizer, std::string_view name = "", const Log& log = {});

/// The conversation as text. With `open_reply` it ends where the assistant's answer begins.
/// Special tokens are written out in the text, so encode it with encode_chat().
/// Where a template refuses a system message, the system text joins the first user turn, with a blank line between.
/// Throws Error(kInvalidArgument) for an unknown role, a named format's system message that is not first, and with the
/// template's words where it refuses the conversation; Error(kUnsupported) for what emend's Jinja cannot do, and for an
/// answer that a template does not write out (without `open_reply`).
[[nodiscard]] RenderedChat render_chat(const ChatFormat& format, const std::vector<ChatMessage>& messages,
                                       bool open_reply);

/// Ids and offsets of a rendered conversation: Tokenizer::encode without added specials, also for tokenizers that do
/// not look for their special tokens in a text (ChatGLM3).
[[nodiscard]] Encoding encode_chat(const Tokenizer& tokenizer, std::string_view text);

}  // namespace emend::models
