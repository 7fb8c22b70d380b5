// Files that can be computed again: named by a hash of everything they depend on, checked when they are read, bounded
// in size by leaving out what was not used for the longest time.
//
// A cache file is a safetensors file whose metadata hold "checksum", the SHA-256 of all other metadata and all tensors.
// Its name is the hash of its key (64 hexadecimal digits, or "before-" and 32). Nothing else in a folder is ever listed
// or removed, so a folder named by mistake loses nothing.
//
// Goals: a damaged file is never taken for a good one and never stops a run; a folder does not grow without end.
// Non-goal: sharing between machines that write at the same time (the last writer wins; both write the same bytes).
#pragma once

#include <emend/core/log.h>
#include <emend/core/safetensors.h>

#include <functional>
#include <optional>

namespace emend {

/// Writes tensors of the host atomically, with "checksum" added to the metadata. Throws as write_safetensors does.
void write_checked(const std::filesystem::path& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   std::map<std::string, std::string> metadata);

/// Throws Error(kCorruption) naming the file unless its metadata and tensors have the recorded checksum. Files without
/// one, of earlier versions, pass if their "sha256" is that of their only tensor or of their "evaluation" text.
void require_intact(const SafetensorsFile& file);

/// Opens and checks a cache file and notes that it was used. Nothing if there is none. Throws Error(kCorruption).
[[nodiscard]] std::optional<SafetensorsFile> open_cached(const std::filesystem::path& path);

struct CacheEntry {
  std::filesystem::path path;
  std::string kind;  ///< "statistics", "evaluation"; "abandoned" for what a killed process left half written
  uint64_t bytes = 0;
  std::filesystem::file_time_type last_used;
};
/// The cache files in a folder and below it, least recently used first. An absent folder has none. Throws Error(kIo).
[[nodiscard]] std::vector<CacheEntry> list_cache(const std::filesystem::path& folder);

/// What is wrong with a file, or nothing. Reads all of it.
[[nodiscard]] std::optional<std::string> fault_of(const CacheEntry& entry);

/// Removes the least recently used files until the rest takes at most `max_bytes`; abandoned ones go first and always.
/// `keep` stays in any case. Returns what was removed. Throws Error(kIo).
std::vector<CacheEntry> prune_cache(const std::filesystem::path& folder, uint64_t max_bytes,
                                    const std::filesystem::path& keep = {});

/// Runs what writes into a cache. A folder that cannot be written to, or is full, becomes a warning `event`, because
/// what was to be kept can be computed again.
void keep_if_possible(const Log& log, const std::string& event, const std::function<void()>& write);

/// One for a user's projects: $EMEND_CACHE, else emend in $XDG_CACHE_HOME or ~/.cache; without a home .cache/emend.
[[nodiscard]] std::filesystem::path user_cache();

/// What a cache folder may hold: $EMEND_CACHE_GIB, 20 GiB unless it is set; without bound if that is 0.
/// Throws Error(kInvalidArgument) for anything else than a number.
[[nodiscard]] uint64_t cache_limit();

}  // namespace emend
