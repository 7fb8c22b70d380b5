// A file under a second name.
#pragma once

#include <filesystem>

namespace emend {

/// Gives the contents of `from` (links are followed) to `to`, which is replaced: by a hard link where the file system
/// allows it, else by a copy. `to` is at no moment absent or half written. Sharing bytes is safe with files that are
/// only ever replaced, as AtomicFile does. Throws Error(kNotFound) or Error(kIo).
void link_or_copy(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace emend
