// Conversations for fine-tuning: what people ask and what the model shall answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets {

/// One turn of a conversation.
struct Turn {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// One training example: a conversation whose assistant turns are to be learnt. Never empty; at most the first turn is
/// the system's, and users and assistants take turns, the assistant last.
struct Instruction {
  std::vector<Turn> turns;
  int64_t line = 0;  ///< 1-based line on which the row starts
};

/// Reads a JSON array or JSON lines of any of:
///   {"instruction": …, "input": …, "output": …}              the Alpaca form; "input" may be absent or empty, "system"
///                                                            and "history" ([[question, answer], …]) may be given
///   {"messages": [{"role": …, "content": …}, …]}             as chat services take them
///   {"conversations": [{"from": "human"|"gpt"|"system", "value": …}, …]}
/// `limit` rows (-1: all). Throws Error(kNotFound, kIo) for the file, Error(kCorruption) naming file, line and field,
/// Error(kInvalidArgument) for a limit of 0 or below -1.
[[nodiscard]] std::vector<Instruction> load_instructions(const std::filesystem::path& path, int64_t limit = -1);
/// The same from text; `name` stands for the file in messages.
[[nodiscard]] std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name,
                                                          int64_t limit = -1);

}  // namespace emend::datasets
