// What is put around a text: the "post_processor" of a tokenizer.json.
#pragma once

#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/tokenizer.h>

namespace emend::models::detail {

/// Appends to special.prefix_ids and special.suffix_ids what the value `view` (null: nothing) puts around one text.
/// ByteLevel steps only trim offsets in the reference; ours always cover the text, so they have no effect.
/// Throws Error(kCorruption) or Error(kUnsupported).
void read_post_processor(const JsonView& view, SpecialTokens& special);

/// A TemplateProcessing value that puts `prefix` and `suffix` (pieces with their ids) around a text.
[[nodiscard]] nlohmann::json template_processor(const std::vector<std::pair<std::string, int64_t>>& prefix,
                                                const std::vector<std::pair<std::string, int64_t>>& suffix);

}  // namespace emend::models::detail
