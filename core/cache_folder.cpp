#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/core/sha256.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>

#include <algorithm>
#include <tuple>

namespace emend {
namespace {

namespace fs = std::filesystem;

constexpr const char* kChecksum = "checksum";
constexpr double kDefaultGib = 20;

void add_tensor(Sha256& hash, const std::string& name, const at::Tensor& tensor) {
  std::string header = name + '\n' + c10::toString(tensor.scalar_type());
  for (const int64_t size : tensor.sizes()) header += ' ' + std::to_string(size);
  hash.update(header + '\n');
  hash.update(tensor.const_data_ptr(), tensor.nbytes());
}

// Of everything but the checksum itself; tensors in the order of their names.
std::string checksum(const std::map<std::string, std::string>& metadata,
                     const std::map<std::string, at::Tensor>& tensors) {
  Sha256 hash;
  for (const auto& [key, value] : metadata)
    if (key != kChecksum) hash.update(key + '\n' + std::to_string(value.size()) + '\n' + value);
  for (const auto& [name, tensor] : tensors) add_tensor(hash, name, tensor);
  return hash.hex();
}

// Files of earlier versions: a second moment, or an evaluation.
std::string earlier_checksum(const SafetensorsFile& file) {
  if (const auto text = file.metadata().find("evaluation"); text != file.metadata().end())
    return sha256_hex(text->second);
  if (file.tensors().size() != 1) return "";
  const at::Tensor tensor = file.tensor(file.tensors().begin()->first);
  Sha256 hash;
  hash.update(tensor.const_data_ptr(), tensor.nbytes());
  return hash.hex();
}

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// "statistics" or "evaluation" for the names that caches have, else "".
std::string kind_of_name(const std::string& name) {
  constexpr std::string_view kSuffix = ".safetensors", kBefore = "before-";
  if (!name.ends_with(kSuffix)) return "";
  const std::string_view stem = std::string_view(name).substr(0, name.size() - kSuffix.size());
  if (is_hex(stem, 64)) return "statistics";
  if (stem.starts_with(kBefore) && is_hex(stem.substr(kBefore.size()), 32)) return "evaluation";
  return "";
}

}  // namespace

void write_checked(const fs::path& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   std::map<std::string, std::string> metadata) {
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : tensors) by_name.emplace(name, tensor.contiguous());
  metadata[kChecksum] = checksum(metadata, by_name);
  write_safetensors(path, {by_name.begin(), by_name.end()}, metadata);
}

void require_intact(const SafetensorsFile& file) {
  const auto& metadata = file.metadata();
  auto recorded = metadata.find(kChecksum);
  const bool whole = recorded != metadata.end();
  if (!whole) recorded = metadata.find("sha256");
  std::string actual;
  if (whole) {
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, info] : file.tensors()) tensors.emplace(name, file.tensor(name));
    actual = checksum(metadata, tensors);
  } else if (recorded != metadata.end()) {
    actual = earlier_checksum(file);
  }
  if (recorded != metadata.end() && !actual.empty() && recorded->second == actual) return;
  throw Error(
      ErrorClass::kCorruption,
      {file.path().string(), recorded == metadata.end() ? "no checksum" : "a checksum that does not fit the contents",
       "an unaltered cache file", "delete the file; what it held will be computed again"});
}

std::optional<SafetensorsFile> open_cached(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  SafetensorsFile file(path);
  require_intact(file);
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);  // a read-only cache serves all the same
  return file;
}

std::vector<CacheEntry> list_cache(const fs::path& folder) {
  std::vector<CacheEntry> entries;
  std::error_code error;
  if (!fs::exists(folder, error)) return entries;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;  // another process may remove files meanwhile
    if (it->symlink_status(gone).type() != fs::file_type::regular) continue;
    CacheEntry entry{it->path(), kind_of_name(it->path().filename().string()), it->file_size(gone), {}};
    if (!gone) entry.last_used = it->last_write_time(gone);
    if (is_abandoned(*it, std::chrono::hours(1))) entry.kind = "abandoned";
    if (!entry.kind.empty() && !gone) entries.push_back(std::move(entry));
  }
  if (error)
    throw Error(class_of_errno(error.value()), {folder.string(), "cannot be listed (" + error.message() + ")",
                                                "a readable folder", "check the path and its permissions"});
  std::ranges::sort(entries, [](const CacheEntry& a, const CacheEntry& b) {
    return std::tie(a.last_used, a.path) < std::tie(b.last_used, b.path);
  });
  return entries;
}

std::optional<std::string> fault_of(const CacheEntry& entry) {
  if (entry.kind == "abandoned") return "left half written by a process that was killed";
  try {
    require_intact(SafetensorsFile(entry.path));
  } catch (const Error& error) {
    const std::string text = error.what(), path = entry.path.string() + ": ";
    return text.starts_with(path) ? text.substr(path.size()) : text;
  }
  return std::nullopt;
}

std::vector<CacheEntry> prune_cache(const fs::path& folder, uint64_t max_bytes, const fs::path& keep) {
  auto entries = list_cache(folder);
  std::ranges::stable_partition(entries, [](const auto& entry) { return entry.kind == "abandoned"; });
  uint64_t total = 0;
  for (const auto& entry : entries) total += entry.bytes;
  std::vector<CacheEntry> removed;
  for (const auto& entry : entries) {
    if (entry.path == keep || (total <= max_bytes && entry.kind != "abandoned")) continue;
    std::error_code error;
    fs::remove(entry.path, error);
    if (error)
      throw Error(class_of_errno(error.value()), {entry.path.string(), "cannot be removed (" + error.message() + ")",
                                                  "", "check the permissions of the folder"});
    total -= entry.bytes;
    removed.push_back(entry);
  }
  return removed;
}

void keep_if_possible(const Log& log, const std::string& event, const std::function<void()>& write) {
  try {
    write();
  } catch (const Error& error) {
    log.warning(event, std::string("not kept in the cache: ") + error.what());
  } catch (const fs::filesystem_error& error) {
    log.warning(event, std::string("not kept in the cache: ") + error.what());
  }
}

std::filesystem::path user_cache() {
  if (const auto own = environment("EMEND_CACHE"); !own.empty()) return own;
  if (const fs::path caches = environment("XDG_CACHE_HOME"); caches.is_absolute()) return caches / "emend";
  return fs::path(environment("HOME")) / ".cache" / "emend";
}

uint64_t cache_limit() {
  const std::string text = environment("EMEND_CACHE_GIB");
  const double gib = text.empty() ? kDefaultGib : number_in<double>(text).value_or(-1);
  if (!(gib >= 0 && gib < 1e9)) refuse({"EMEND_CACHE_GIB", "\"" + text + "\"", "a number of GiB; 0: no bound", ""});
  return gib > 0 ? static_cast<uint64_t>(gib * (uint64_t{1} << 30)) : UINT64_MAX;
}

}  // namespace emend
