// Settings in messages, spelled as the caller can give them.
//
// The library knows settings by their field names ("batch_size"), which are also the names in Python. A program with
// options says once how it spells them, so that no advice names an option that its reader does not have.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace emend {

/// "batch_size", or "batch_size 4" with a value; "--batch-size 4" after spell_settings(option_spelling).
[[nodiscard]] std::string setting(std::string_view name, std::string_view value = "");

/// How setting() spells a name from now on; once, at the start of a program. An empty function is the field name.
void spell_settings(std::function<std::string(std::string_view name)> spelling);

/// "batch_size" → "--batch-size".
[[nodiscard]] std::string option_spelling(std::string_view name);

}  // namespace emend
