#include <emend/core/atomic_file.h>
#include <emend/core/dtype_name.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/models/detail/model_folder.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace emend::models::detail {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

// Small text beside the weights, by extension.
bool is_companion(const fs::directory_entry& entry) {
  static const std::set<std::string> kKinds = {".json", ".txt", ".model", ".tiktoken", ".py", ".jinja"};
  const std::string name = entry.path().filename().string();
  if (!entry.is_regular_file() || name == "config.json" || is_weight_file(name) || name.ends_with(".index.json"))
    return false;
  return name.starts_with("LICENSE") || name.starts_with("NOTICE") || kKinds.count(entry.path().extension().string());
}

[[noreturn]] void io_error(const fs::path& path, const std::string& what, const std::error_code& error) {
  throw Error(ErrorClass::kIo, {path.string(), what + " (" + error.message() + ")", "",
                                "check the path, its permissions and the space"});
}

void move(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) io_error(to, "cannot move " + from.string() + " here", error);
}

}  // namespace

bool is_weight_file(const std::string& name) {
  return name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

bool is_tokenizer_file(const std::string& name) {
  static const std::set<std::string> kNames = {"vocab.json", "merges.txt", "added_tokens.json",
                                               "special_tokens_map.json"};
  return kNames.count(name) || name.starts_with("tokenizer") || name.starts_with("chat_template") ||
         name.ends_with(".tiktoken") || name.ends_with(".model");
}

bool is_model_file(const std::string& name) {
  return name == "config.json" || name == "generation_config.json" || is_weight_file(name) || is_tokenizer_file(name);
}

std::vector<fs::path> copy_companions(const fs::path& from, const fs::path& to, bool tokenizer) {
  std::vector<fs::path> written;
  if (fs::equivalent(from, to)) return written;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!is_companion(entry) || (!tokenizer && is_tokenizer_file(name))) continue;
    write_file(to / name, read_file(entry.path()));
    written.push_back(to / name);
  }
  return written;
}

std::set<std::string> write_weight_files(const fs::path& folder,
                                         const std::vector<std::pair<std::string, uint64_t>>& tensors,
                                         uint64_t shard_bytes,
                                         const std::function<at::Tensor(const std::string&)>& read) {
  std::vector<std::vector<std::string>> shards(1);
  uint64_t total = 0, in_shard = 0;
  for (const auto& [name, bytes] : tensors) {
    if (in_shard > 0 && in_shard + bytes > shard_bytes) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().push_back(name);
    in_shard += bytes;
    total += bytes;
  }
  std::set<std::string> written;
  OrderedJson index = {{"metadata", {{"total_size", total}}}, {"weight_map", OrderedJson::object()}};
  for (size_t i = 0; i < shards.size(); ++i) {
    std::array<char, 64> numbered{};
    std::snprintf(numbered.data(), numbered.size(), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    const std::string file = shards.size() == 1 ? "model.safetensors" : numbered.data();
    std::vector<std::pair<std::string, at::Tensor>> stored;
    for (const std::string& name : shards[i]) {
      stored.emplace_back(name, read(name));
      index["weight_map"][name] = file;
    }
    write_safetensors(folder / file, stored, {{"format", "pt"}});
    written.insert(file);
  }
  if (shards.size() > 1) {
    written.insert("model.safetensors.index.json");
    write_file(folder / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  return written;
}

std::string config_text(const std::string& original, std::optional<at::ScalarType> dtype) {
  if (!dtype) return original;
  OrderedJson config = OrderedJson::parse(original);
  bool named = false;
  for (const char* key : {"torch_dtype", "dtype"})
    if (config.contains(key)) config[key] = dtype_name(*dtype), named = true;
  if (!named) config["torch_dtype"] = dtype_name(*dtype);
  return config.dump(2) + "\n";
}

StagedFolder::StagedFolder(fs::path target, bool replace) : target_(std::move(target)) {
  if (!target_.has_filename()) target_ = target_.parent_path();  // "out/"
  target_ = fs::absolute(target_);
  std::error_code error;
  if (fs::exists(target_, error) && !fs::is_directory(target_, error))
    throw Error(ErrorClass::kInvalidArgument, {target_.string(), "a file", "a folder, or a name that is free", ""});
  const bool holds_model = fs::exists(target_ / "config.json", error) ||
                           fs::exists(target_ / "model.safetensors.index.json", error) ||
                           fs::exists(target_ / "model.safetensors", error);
  if (holds_model && !replace)
    throw Error(ErrorClass::kInvalidArgument,
                {target_.string(), "the folder already holds a model", "a new or empty folder",
                 "choose another target, or replace the model there (" + setting("force") + ")"});
  fs::create_directories(target_.parent_path(), error);
  staging_ = target_.parent_path() / ("." + target_.filename().string() + ".partial-" + std::to_string(::getpid()));
  fs::remove_all(staging_, error);
  if (!fs::create_directory(staging_, error)) io_error(staging_, "cannot make the folder", error);
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(staging_, ignored);
}

std::vector<fs::path> StagedFolder::commit() {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(staging_)) files.push_back(target_ / entry.path().filename());
  std::sort(files.begin(), files.end());
  std::error_code error;
  fs::rename(staging_, target_, error);  // succeeds if the target is not there, or an empty folder
  if (error) replace_files();
  committed_ = true;
  return files;
}

void StagedFolder::replace_files() const {
  std::error_code error;
  fs::remove(target_ / "config.json", error);
  if (error) io_error(target_ / "config.json", "cannot remove the older file", error);
  std::vector<fs::path> older;
  for (const auto& entry : fs::directory_iterator(target_))
    if (is_model_file(entry.path().filename().string())) older.push_back(entry.path());
  for (const auto& path : older)
    if (!fs::remove(path, error)) io_error(path, "cannot remove the older file", error);
  std::vector<fs::path> fresh;
  for (const auto& entry : fs::directory_iterator(staging_)) fresh.push_back(entry.path());
  std::sort(fresh.begin(), fresh.end(), [](const fs::path& a, const fs::path& b) {
    return std::pair(a.filename() == "config.json", a) < std::pair(b.filename() == "config.json", b);
  });
  for (const auto& path : fresh) move(path, target_ / path.filename());
  fs::remove(staging_, error);
}

}  // namespace emend::models::detail
