#include "statistics_options.h"

#include <emend/editors/statistics.h>

namespace emend::tools {
namespace {

// "auto" or a number from 0 on; nothing else.
int64_t parse_tokens(const std::string& text) {
  if (text == "auto") return editors::kAutoTokens;
  if (text.empty() || text.size() > 15 || text.find_first_not_of("0123456789") != std::string::npos)
    throw CLI::ValidationError("--stats-tokens", "\"" + text + "\"; expected a number of tokens from 0 on, or auto");
  return std::stoll(text);
}

}  // namespace

void add_stats_amount_options(CLI::App& command, int64_t& tokens, std::string& import, const std::string& group) {
  auto* amount = command
                     .add_option_function<std::string>(
                         "--stats-tokens", [&tokens](const std::string& text) { tokens = parse_tokens(text); },
                         "tokens to read; 0: ten for each key dimension; auto: until two halves of the text agree")
                     ->type_name("N|auto")
                     ->default_str("0");
  auto* files = command
                    .add_option("--stats-import", import,
                                "published statistics instead: .npz files as the MEMIT repository has them, {layer} "
                                "standing for the layer")
                    ->type_name("PATTERN");
  if (group.empty()) return;
  amount->group(group);
  files->group(group);
}

}  // namespace emend::tools
