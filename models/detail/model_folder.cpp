#include <emend/core/atomic_file.h>
#include <emend/core/dtype_name.h>
#include <emend/core/safetensors.h>
#include <emend/core/text.h>
#include <emend/models/detail/model_folder.h>

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
  return name == "config.json" || name == "generation_config.json" || name == ".emend" || is_weight_file(name) ||
         is_tokenizer_file(name);
}

void copy_companions(const fs::path& from, const fs::path& to, bool tokenizer) {
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!is_companion(entry) || (!tokenizer && is_tokenizer_file(name))) continue;
    write_file(to / name, read_file(entry.path()));
  }
}

void write_weight_files(const fs::path& folder, const std::vector<std::pair<std::string, uint64_t>>& tensors,
                        uint64_t shard_bytes, const std::function<at::Tensor(const std::string&)>& read) {
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
  OrderedJson index = {{"metadata", {{"total_size", total}}}, {"weight_map", OrderedJson::object()}};
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string file =
        shards.size() == 1 ? "model.safetensors" : formatted("model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    std::vector<std::pair<std::string, at::Tensor>> stored;
    for (const std::string& name : shards[i]) {
      stored.emplace_back(name, read(name));
      index["weight_map"][name] = file;
    }
    write_safetensors(folder / file, stored, {{"format", "pt"}});
  }
  if (shards.size() > 1) write_file(folder / "model.safetensors.index.json", index.dump(2) + "\n");
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

}  // namespace emend::models::detail
