// The folder of what can be computed again: what is in it, whether it is whole, and how to make it smaller.
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/units.h>

#include "../options.h"

namespace emend::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct CacheArguments {
  std::string action = "list", folder, max_size;
  bool remove = false;
};

uint64_t total_of(const std::vector<CacheEntry>& entries) {
  uint64_t bytes = 0;
  for (const auto& entry : entries) bytes += entry.bytes;
  return bytes;
}

std::string size_text(uint64_t bytes) {
  return devices::format_bytes(static_cast<int64_t>(bytes));
}

std::string time_text(fs::file_time_type time) {
  const auto system = std::chrono::file_clock::to_sys(time);
  return utc_text(
      std::chrono::system_clock::to_time_t(std::chrono::time_point_cast<std::chrono::system_clock::duration>(system)));
}

// What a file holds, in a few words: "120046 tokens of wiki_sample.jsonl", "counterfact, health".
std::string contents_of(const CacheEntry& entry) {
  if (entry.kind == "abandoned") return "half written";
  try {
    const SafetensorsFile file(entry.path);
    const auto& metadata = file.metadata();
    const auto format = metadata.find("format");
    if (format != metadata.end() && format->second.find("factor") != std::string::npos) return "factor of a moment";
    if (format != metadata.end() && format->second.find("partial") != std::string::npos) return "unfinished statistics";
    if (entry.kind == "statistics" && !metadata.contains("count") && metadata.at("format").starts_with("emend "))
      return metadata.at("format").substr(6);
    if (entry.kind == "statistics")
      return metadata.at("count") + " tokens of " +
             nlohmann::json::parse(metadata.at("origin")).at("text").get<std::string>();
    return join(nlohmann::json::parse(metadata.at("key")).at("metrics"), ", ",
                [](const nlohmann::json& metric) { return metric.at(0).get<std::string>(); });
  } catch (const std::exception&) {
    return "unreadable";
  }
}

ordered_json describe(const CacheEntry& entry) {
  return {{"file", entry.path.string()},
          {"kind", entry.kind},
          {"bytes", entry.bytes},
          {"last_used", time_text(entry.last_used)},
          {"contents", contents_of(entry)}};
}

ordered_json sizes(const std::vector<CacheEntry>& entries) {
  ordered_json kinds = ordered_json::object();
  for (const auto& entry : entries) {
    auto& kind = kinds[entry.kind];
    if (kind.is_null()) kind = {{"files", 0}, {"bytes", 0}};
    kind["files"] = kind["files"].get<uint64_t>() + 1;
    kind["bytes"] = kind["bytes"].get<uint64_t>() + entry.bytes;
  }
  const uint64_t limit = cache_limit();
  return {{"kinds", kinds},
          {"files", entries.size()},
          {"bytes", total_of(entries)},
          {"limit_per_folder", limit == UINT64_MAX ? ordered_json() : ordered_json(limit)}};
}

std::string summary(const std::vector<CacheEntry>& entries) {
  return std::to_string(entries.size()) + (entries.size() == 1 ? " file, " : " files, ") + size_text(total_of(entries));
}

ordered_json list(const CacheArguments& options, std::string& text) {
  const auto entries = list_cache(options.folder);
  ordered_json document = sizes(entries);
  document["entries"] = ordered_json::array();
  TextTable table({"", "size", "last used", "file"});
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    document["entries"].push_back(describe(*entry));
    table.add({entry->kind + "  " + shortened(contents_of(*entry), 60), size_text(entry->bytes),
               time_text(entry->last_used), shortened(entry->path.filename().string(), 24)});
  }
  text += summary(entries) + "\n" + (entries.empty() ? "" : table.text());
  return document;
}

ordered_json size(const CacheArguments& options, std::string& text) {
  const auto entries = list_cache(options.folder);
  const ordered_json document = sizes(entries);
  text += summary(entries) + "\n";
  for (const auto& [kind, one] : document["kinds"].items())
    text += "  " + kind + ": " + one["files"].dump() + " files, " + size_text(one["bytes"]) + "\n";
  if (document["limit_per_folder"].is_number())
    text += "each folder keeps within " + size_text(document["limit_per_folder"]) + " (EMEND_CACHE_GIB sets it)\n";
  return document;
}

ordered_json verify(const CacheArguments& options, std::string& text) {
  const auto entries = list_cache(options.folder);
  auto damaged = ordered_json::array();
  std::string faults;
  for (const auto& entry : entries) {
    const auto fault = fault_of(entry);
    if (!fault) continue;
    if (options.remove) fs::remove(entry.path);
    damaged.push_back({{"file", entry.path.string()}, {"fault", *fault}, {"removed", options.remove}});
    faults += "  " + entry.path.string() + ": " + *fault + (options.remove ? " (removed)" : "") + "\n";
  }
  const std::string all =
      summary(entries) + ": " + (damaged.empty() ? "all whole" : std::to_string(damaged.size()) + " damaged") + "\n";
  text += all + faults;
  if (!damaged.empty() && !options.remove) text += "a run computes them again; --remove removes them now\n";
  return {{"files", entries.size()}, {"damaged", damaged}};
}

ordered_json prune(const CacheArguments& options, uint64_t max_bytes, std::string& text) {
  auto removed = ordered_json::array();
  const auto gone = prune_cache(options.folder, max_bytes);
  for (const auto& entry : gone) removed.push_back(entry.path.string());
  const auto left = list_cache(options.folder);
  text += "removed " + summary(gone) + "; left " + summary(left) + "\n";
  return {{"removed", removed}, {"freed", total_of(gone)}, {"files", left.size()}, {"bytes", total_of(left)}};
}

uint64_t max_size(const CacheArguments& options) {
  if (options.max_size.empty()) refuse({"cache prune", "no size", "--max-size such as 5GiB", ""});
  return static_cast<uint64_t>(devices::parse_bytes(options.max_size, "--max-size"));
}

int run_cache(const CacheArguments& options, const Common& common) {
  std::error_code failure;
  if (!fs::is_directory(options.folder, failure) && options.folder != user_cache())  // that one comes by itself
    throw Error(ErrorClass::kNotFound, {options.folder, "no such folder", "a folder of caches", "check the path"});
  std::string text = options.folder + "   ";
  ordered_json document = options.action == "list"     ? list(options, text)
                          : options.action == "size"   ? size(options, text)
                          : options.action == "verify" ? verify(options, text)
                          : options.action == "clear"  ? prune(options, 0, text)
                                                       : prune(options, max_size(options), text);
  document["folder"] = options.folder;
  common.print(document, text);
  const bool damaged = options.action == "verify" && !options.remove && !document["damaged"].empty();
  return damaged ? exit_code(ErrorClass::kCorruption) : 0;
}

}  // namespace

VerbRun setup_cache(Options& o) {
  auto& options = o.arguments<CacheArguments>();
  o.add("ACTION", &options.action,
        "list (each file), size, verify (read every file and check it), prune (least recently used first), clear",
        {.choices = {"list", "size", "verify", "prune", "clear"}});
  add_cache_option(o.group(""), options.folder, "folder of caches");
  o.add("--max-size", &options.max_size, "what may stay, such as 5GiB", {.type = "SIZE", .only = {"prune"}})
      .add("--remove", &options.remove, "remove what is damaged", {.only = {"verify"}});
  o.footer =
      "Key statistics and evaluations of unedited models are kept under the hash of everything they depend on. Each "
      "file\n"
      "is checked when it is read and computed again if it is damaged. $EMEND_CACHE_GIB bounds each folder (20; 0: no "
      "bound).";
  return [&options](Common& common) { return run_cache(options, common); };
}

}  // namespace emend::tools
