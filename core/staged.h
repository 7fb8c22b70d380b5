// Outputs that appear whole or not at all: written under a name beside their own, moved into place by a rename.
//
// Goals: after an error, a full disk or a kill the target is what it was; what a killed process left is gone after the
// next write to the same target; nothing that is written shares bytes with what it was made from. Single files need no
// more than AtomicFile; this is for folders, and for what several steps make together.
#pragma once

#include <emend/core/error.h>

#include <chrono>
#include <cstddef>
#include <filesystem>

namespace emend {

/// A folder of the system's for temporary files, that goes with the object.
class TemporaryFolder {
 public:
  /// "<temporary files>/emend-<name>-XXXXXX", for this user alone. Throws Error(kIo); `advice` ends the message.
  explicit TemporaryFolder(const std::string& name, const std::string& advice = "");
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// Refuses what no rename can replace whole: a device, a pipe, a link to a place that is not there.
/// Throws Error(kInvalidArgument).
void require_place(const std::filesystem::path& path);

/// Refuses what require_place does, and the folder that the program runs in or one above it: who stands in a folder
/// that is exchanged for another one has lost it. For asking before the work. Throws Error(kInvalidArgument).
void require_replaceable(const std::filesystem::path& path);

/// Calls `write` with a free name beside `target` (inside it where it is a mount point), where it makes a file or a
/// folder, and moves that to `target`: a new or empty one appears by one rename, and a folder with files is exchanged
/// for the new one where the file system can. Missing parents are made. Files of an older folder stay unless the new
/// one has that name or `superseded` says so. On failure the target is as it was.
/// Throws what `write` throws, with `target` in the text for the name it was given; as require_replaceable; Error(kIo).
void write_whole(const std::filesystem::path& target, const std::function<void(const std::filesystem::path&)>& write,
                 const std::function<bool(const std::string& name)>& superseded = {});

/// An error that speaks of `to` where it spoke of `from`, a name that users do not know.
[[nodiscard]] Error renamed(const Error& error, const std::filesystem::path& from, const std::filesystem::path& to);

/// Copies a file (links are followed) to `to`, which is replaced atomically. Blocks are shared where the file system
/// copies on write; a program that writes into one of both files in place never changes the other.
/// Throws Error(kNotFound) or Error(kIo).
void clone_file(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes what processes that no longer live left beside `target` when they were to write it.
void remove_abandoned_of(const std::filesystem::path& target);

/// Removes what AtomicFile and write_whole left in a folder and below it, if the process no longer lives and it is
/// older than `age`. Errors are ignored: they are only in the way. Returns how many.
size_t remove_abandoned(const std::filesystem::path& folder, std::chrono::seconds age = std::chrono::hours(1));
/// Whether remove_abandoned would remove it.
[[nodiscard]] bool is_abandoned(const std::filesystem::directory_entry& entry, std::chrono::seconds age);

}  // namespace emend
