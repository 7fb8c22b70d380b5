#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/published_shapes.h>

#include <algorithm>
#include <cstdlib>

namespace emend::models {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

fs::path hub_cache() {
  if (const auto cache = environment("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const auto home = environment("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  const auto home = environment("HOME");
  return home.empty() ? fs::path() : fs::path(home) / ".cache" / "huggingface" / "hub";
}

// ORG/NAME or NAME, of the characters that the hub allows.
bool is_hub_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.' || c == '/';
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), allowed) &&
         std::count(name.begin(), name.end(), '/') <= 1 && name.front() != '/' && name.back() != '/' &&
         name.front() != '.' && name.find("..") == std::string::npos;
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

}  // namespace

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
  return (last.extension() == ".gguf" ? last.stem() : last.filename()).string();
}

std::shared_ptr<const Checkpoint> open_checkpoint(const std::string& path_or_name) {
  if (auto shape = shape_checkpoint(path_or_name)) return shape;
  const fs::path path(path_or_name);
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return std::make_shared<detail::HfCheckpoint>(path);
  if (fs::exists(path, ignored)) {
    if (path.extension() == ".gguf") return open_gguf_checkpoint(path);
    const std::string kind = path.extension().string();
    const bool pickle = kind == ".bin" || kind == ".pt" || kind == ".pth" || kind == ".ckpt";
    throw Error(
        ErrorClass::kUnsupported,
        {path.string(),
         pickle ? "a pickle file, which can run code when opened" : "this is a single file, and not a .gguf file",
         "a model folder or a .gguf file",
         pickle ? "convert once in Python: AutoModelForCausalLM.from_pretrained(\"" + path.parent_path().string() +
                      "\").save_pretrained(\"OUT\", safe_serialization=True)"
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

}  // namespace emend::models
