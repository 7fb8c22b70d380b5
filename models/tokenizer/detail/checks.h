// Checks of what callers pass in, shared by all tokenizers.
#pragma once

#include <emend/core/text.h>

#include <cstdint>
#include <string_view>

namespace emend::models::detail {

/// Throws Error(kInvalidArgument) naming the byte offset unless `text` is valid UTF-8 and shorter than 4 GiB.
void check_text(std::string_view text);
/// Throws Error(kInvalidArgument) for a negative id.
void check_id(int64_t id);

}  // namespace emend::models::detail
