#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/published_shapes.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::models {
namespace {

namespace fs = std::filesystem;

// As huggingface_hub looks for it.
fs::path hub_cache() {
  const auto home = environment("HOME");
  const auto full = [&](const std::string& path) {
    return path.starts_with("~/") && !home.empty() ? fs::path(home) / path.substr(2) : fs::path(path);
  };
  if (const auto cache = environment("HF_HUB_CACHE"); !cache.empty()) return full(cache);
  if (const auto own = environment("HF_HOME"); !own.empty()) return full(own) / "hub";
  if (const auto caches = environment("XDG_CACHE_HOME"); !caches.empty()) return full(caches) / "huggingface" / "hub";
  return home.empty() ? fs::path() : fs::path(home) / ".cache" / "huggingface" / "hub";
}

// ORG/NAME or NAME, of the characters that the hub allows.
bool is_hub_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.' || c == '/';
  };
  return !name.empty() && std::ranges::all_of(name, allowed) && std::ranges::count(name, '/') <= 1 &&
         name.front() != '/' && name.back() != '/' && name.front() != '.' && name.find("..") == std::string::npos;
}

std::string hub_folder_name(const std::string& name) {
  std::string folder = "models--" + name;
  if (const size_t slash = folder.find('/'); slash != std::string::npos) folder.replace(slash, 1, "--");
  return folder;
}

// The snapshot that refs/main names, or the only one there is; empty if none.
fs::path find_snapshot(const fs::path& repository) {
  const fs::path snapshots = repository / "snapshots";
  std::error_code ignored;
  if (!fs::is_directory(snapshots, ignored)) return {};
  if (fs::exists(repository / "refs" / "main", ignored)) {
    std::string revision = read_file(repository / "refs" / "main");
    std::erase_if(revision, [](unsigned char c) { return std::isspace(c); });
    if (!revision.empty() && revision.find('/') == std::string::npos && revision[0] != '.' &&
        fs::is_directory(snapshots / revision, ignored))
      return snapshots / revision;
  }
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(snapshots))
    if (entry.is_directory()) found.push_back(entry.path());
  return found.size() == 1 ? found.front() : fs::path();
}

class WithTokenizer final : public Checkpoint {
 public:
  WithTokenizer(std::shared_ptr<const Checkpoint> inner, std::function<std::unique_ptr<Tokenizer>()> make)
      : Checkpoint(inner->path(), inner->format(), inner->config(), inner->tensors()),
        inner_(std::move(inner)),
        make_(std::move(make)) {
    spare_neurons_ = inner_->spare_neurons();
  }
  [[nodiscard]] at::Tensor read(const std::string& name) const override { return inner_->read(name); }
  [[nodiscard]] std::unique_ptr<Tokenizer> load_tokenizer() const override { return make_(); }

 private:
  [[nodiscard]] std::string hash() const override { return inner_->fingerprint(); }

  std::shared_ptr<const Checkpoint> inner_;
  std::function<std::unique_ptr<Tokenizer>()> make_;
};

}  // namespace

Checkpoint::Checkpoint(fs::path path, std::string format, nlohmann::json config, std::vector<TensorInfo> tensors)
    : path_(std::move(path)), format_(std::move(format)), config_(std::move(config)), tensors_(std::move(tensors)) {}

std::unique_ptr<Tokenizer> Checkpoint::load_tokenizer() const {
  return nullptr;
}

const std::string& Checkpoint::fingerprint() const {
  std::call_once(hashed_, [&] { hash_ = hash(); });
  return hash_;
}

std::shared_ptr<const Checkpoint> with_tokenizer(std::shared_ptr<const Checkpoint> checkpoint,
                                                 std::function<std::unique_ptr<Tokenizer>()> make) {
  return std::make_shared<WithTokenizer>(std::move(checkpoint), std::move(make));
}

std::string hub_name(const fs::path& folder) {
  std::error_code error;
  fs::path path = fs::canonical(folder, error);
  constexpr std::string_view kPrefix = "models--";
  std::string name = path.parent_path().parent_path().filename().string();
  if (error || path.parent_path().filename() != "snapshots" || !name.starts_with(kPrefix)) return "";
  name.erase(0, kPrefix.size());
  if (const size_t dashes = name.find("--"); dashes != std::string::npos) name.replace(dashes, 2, "/");
  return name;
}

std::string model_name(const fs::path& path) {
  if (const auto hub = hub_name(path); !hub.empty()) return hub;
  const fs::path last = path.has_filename() ? path : path.parent_path();
  return (lower(last.extension().string()) == ".gguf" ? last.stem() : last.filename()).string();
}

std::shared_ptr<const Checkpoint> open_checkpoint(const std::string& path_or_name) {
  if (auto shape = shape_checkpoint(path_or_name)) return shape;
  const fs::path path(path_or_name);
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return std::make_shared<detail::HfCheckpoint>(path);
  if (fs::exists(path, ignored)) {
    if (lower(path.extension().string()) == ".gguf") return open_gguf_checkpoint(path);
    const bool pickle = detail::is_pickle(path);
    throw Error(
        ErrorClass::kUnsupported,
        {path.string(),
         pickle ? "a pickle file, which can run code when opened" : "this is a single file, and not a .gguf file",
         "a model folder or a .gguf file",
         pickle ? detail::pickle_advice(path.has_parent_path() ? path.parent_path() : ".")
                : "name the folder that holds config.json"});
  }
  std::string looked = "\"" + path_or_name + "\"", advice = "check the path";
  if (is_hub_name(path_or_name)) {
    const fs::path cache = hub_cache(), repository = cache / hub_folder_name(path_or_name);
    const fs::path snapshot = find_snapshot(repository);
    if (!snapshot.empty()) return std::make_shared<detail::HfCheckpoint>(snapshot);
    looked += " and " + repository.string();
    if (path_or_name.find('/') != std::string::npos)
      advice +=
          ", or fetch it first: hf download " + path_or_name +
          " (of Hugging Face's tool, pip install huggingface_hub; HF_HUB_CACHE and HF_HOME say where its cache is)";
  }
  throw Error(ErrorClass::kNotFound, {"model \"" + path_or_name + "\"", "nothing at " + looked,
                                      "a model folder, a .gguf file, or ORG/NAME in the Hugging Face cache", advice});
}

std::map<std::string, std::filesystem::path> weight_files(const std::filesystem::path& folder) {
  return detail::HfCheckpoint(folder).files();
}

static bool is_weight_file(const std::string& name) {
  return name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

bool is_model_file(const std::string& name) {
  return name == "config.json" || name == "generation_config.json" || name == ".emend" || name == kMoreTemplates ||
         is_weight_file(name) || detail::is_tokenizer_file(name);
}

namespace detail {
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

bool is_tokenizer_file(const std::string& name) {
  static const std::set<std::string> kNames = {"vocab.json", "merges.txt", "added_tokens.json",
                                               "special_tokens_map.json"};
  return kNames.count(name) || name.starts_with("tokenizer") || name.starts_with("chat_template") ||
         name.ends_with(".tiktoken") || name.ends_with(".model") ||
         (name.starts_with("tokenization_") && name.ends_with(".py"));
}

std::vector<std::string> copy_companions(const fs::path& from, const fs::path& to, bool tokenizer) {
  std::vector<std::string> others;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (is_companion(entry) && (tokenizer || !is_tokenizer_file(name)))
      write_file(to / name, read_file(entry.path()));
    else if (!is_model_file(name) && !name.ends_with(".index.json"))
      others.push_back(name);
  }
  std::ranges::sort(others);
  if (!tokenizer || !fs::is_directory(from / kMoreTemplates)) return others;
  fs::create_directories(to / kMoreTemplates);
  for (const auto& entry : fs::directory_iterator(from / kMoreTemplates))
    if (is_companion(entry)) write_file(to / kMoreTemplates / entry.path().filename(), read_file(entry.path()));
  return others;
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
}  // namespace detail

}  // namespace emend::models
