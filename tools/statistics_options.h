// How much text the key statistics are taken from, or which finished ones are used instead.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace emend::tools {

/// --stats-tokens N|auto (auto: editors::kAutoTokens) and --stats-import PATTERN. An empty group: the command's own.
void add_stats_amount_options(CLI::App& command, int64_t& tokens, std::string& import, const std::string& group);

}  // namespace emend::tools
