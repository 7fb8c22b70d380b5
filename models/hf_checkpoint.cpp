#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace emend::models::detail {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// [offset, offset + bytes) of an open file as a tensor that owns its private mapping.
at::Tensor map_tensor(const fs::path& path, int fd, const TensorInfo& info) {
  const auto options = at::TensorOptions().dtype(info.dtype);
  if (info.bytes == 0) return at::empty(info.shape, options);
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t begin = info.offset / page * page, shift = info.offset - begin;
  const size_t size = info.bytes + shift;
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, static_cast<off_t>(begin));
  if (base == MAP_FAILED)
    throw Error(class_of_errno(errno),
                {path.string(), std::string("cannot map a tensor (") + std::strerror(errno) + ")", "",
                 "check the free memory and the limits on address space"});
  void* data = static_cast<char*>(base) + shift;
  if (shift % c10::elementSize(info.dtype) == 0)
    return at::from_blob(
        data, info.shape, [base, size](void*) { ::munmap(base, size); }, options);
  at::Tensor aligned = at::empty(info.shape, options);  // a file may put tensors at odd offsets
  std::memcpy(aligned.mutable_data_ptr(), data, info.bytes);
  ::munmap(base, size);
  return aligned;
}

// False also for links that lead nowhere or in circles.
bool is_there(const fs::path& path) {
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (error == std::errc::permission_denied)
    throw Error(ErrorClass::kIo, {path.string(), "cannot be looked at (" + error.message() + ")",
                                  "a folder that may be read", "change its permissions"});
  return there;
}

// A folder from somewhere else must not make us read, and then copy into what is saved, files that are not its own. The
// Hugging Face cache keeps its files in <repository>/blobs and links to them from <repository>/snapshots/<revision>.
void refuse_links_that_leave(const fs::path& folder) {
  if (const char* follow = std::getenv("EMEND_FOLLOW_LINKS"); follow && std::string_view(follow) == "1") return;
  std::error_code ignored;
  fs::path home = fs::canonical(folder, ignored);
  if (home.parent_path().filename() == "snapshots") home = home.parent_path().parent_path();
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_symlink(ignored)) continue;
    const fs::path target = fs::canonical(entry.path(), ignored);
    if (ignored) continue;  // it leads nowhere: whoever needs the file says so
    const fs::path way = target.lexically_relative(home);
    if (!way.empty() && *way.begin() != "..") continue;
    refuse({entry.path().string(), "a symbolic link that leads out of the model folder", "files of its own",
            "copy the file into the folder, or set EMEND_FOLLOW_LINKS=1 if the link is yours"});
  }
}

[[noreturn]] void no_weights(const fs::path& folder) {
  bool pickle = false, gguf = false;
  for (const auto& entry : fs::directory_iterator(folder)) {
    pickle = pickle || is_pickle(entry.path());
    gguf = gguf || entry.path().extension() == ".gguf";
  }
  const std::string expected = std::string(kSingle) + " or " + kIndex;
  if (pickle)
    throw Error(ErrorClass::kUnsupported,
                {folder.string(), "only pickle weight files (.bin, .pt), which can run code when opened", expected,
                 pickle_advice(folder)});
  throw Error(ErrorClass::kNotFound, {folder.string(), "no weight files", expected,
                                      gguf ? "name the .gguf file itself" : "fetch the whole model folder"});
}

}  // namespace

bool is_pickle(const fs::path& path) {
  constexpr std::array kKinds = {".bin", ".pt", ".pth", ".ckpt"};
  return std::ranges::count(kKinds, path.extension()) > 0;
}

std::string pickle_advice(const fs::path& folder) {
  const std::string from = "from_pretrained(\"" + folder.string() + "\").save_pretrained(\"OUT\"";
  return "convert once in Python: AutoModelForCausalLM." + from + ", safe_serialization=True) and AutoTokenizer." +
         from + ")";
}

HfCheckpoint::HfCheckpoint(fs::path folder, const std::string& config_name)
    : Checkpoint(std::move(folder), "huggingface") {
  const fs::path config_path = path_ / config_name;
  if (!is_there(config_path))
    throw Error(ErrorClass::kNotFound,
                {path_.string(), "no " + config_name, "a model folder with config.json and safetensors files",
                 "name the folder that holds config.json"});
  refuse_links_that_leave(path_);
  config_text_ = read_file(config_path);
  config_ = parse_json(config_text_, config_path.string());
  try {
    if (is_there(path_ / kSingle)) {
      open_shards({kSingle});
    } else if (is_there(path_ / kIndex)) {
      read_index(path_ / kIndex);
    } else {
      no_weights(path_);
    }
  } catch (const Error& error) {
    if (error.error_class() == ErrorClass::kUnsupported) refuse_quantised(config_, config_path.string());
    throw;
  }
}

std::map<std::string, fs::path> HfCheckpoint::files() const {
  std::map<std::string, fs::path> files;
  for (const auto& [tensor, shard] : shard_of_) files.emplace(tensor, shards_[shard].path);
  return files;
}

void HfCheckpoint::open_shards(const std::vector<std::string>& files) {
  for (const std::string& name : files) {
    Shard shard;
    shard.path = path_ / name;
    shard.file = std::make_unique<SafetensorsFile>(shard.path);
    shard.descriptor = Descriptor(::open(shard.path.c_str(), O_RDONLY | O_CLOEXEC));
    if (shard.descriptor.fd < 0)
      throw Error(class_of_errno(errno),
                  {shard.path.string(), std::string("cannot open (") + std::strerror(errno) + ")", "",
                   "check the path and its permissions"});
    for (const auto& [tensor, info] : shard.file->tensors()) {
      const auto [other, fresh] = shard_of_.emplace(tensor, shards_.size());
      if (!fresh)
        throw Error(ErrorClass::kCorruption,
                    {shard.path.string(),
                     "tensor \"" + tensor + "\" is also in " + shards_[other->second].path.filename().string(),
                     "each tensor in one file", "the folder mixes two checkpoints: fetch it again"});
      tensors_.push_back(info);
    }
    shards_.push_back(std::move(shard));
  }
}

void HfCheckpoint::read_index(const fs::path& path) {
  index_ = read_json(path);
  const auto corrupt = [&](const std::string& got, const std::string& expected) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), got, expected, "fetch the index and the files it names again"});
  };
  if (!index_->is_object() || !index_->contains("weight_map") || !(*index_)["weight_map"].is_object())
    corrupt("no weight_map", "an object \"weight_map\" from tensor to file");
  std::map<std::string, std::string> file_of;
  std::vector<std::string> files;
  for (const auto& [tensor, file] : (*index_)["weight_map"].items()) {
    if (!file.is_string()) corrupt("tensor \"" + tensor + "\" maps to " + file.dump(), "a file name");
    const std::string name = file.get<std::string>();
    if (name.empty() || name.find('/') != std::string::npos || name.find('\\') != std::string::npos || name[0] == '.' ||
        !name.ends_with(".safetensors"))
      corrupt("tensor \"" + tensor + "\" maps to " + file.dump(), "the name of a .safetensors file in the same folder");
    file_of[tensor] = name;
    files.push_back(name);
  }
  std::ranges::sort(files);
  files.erase(std::unique(files.begin(), files.end()), files.end());
  if (files.empty()) corrupt("an empty weight_map", "at least one tensor");
  std::string missing;
  for (const std::string& file : files)
    if (!is_there(path_ / file)) append_item(missing, file);
  if (!missing.empty())
    throw Error(ErrorClass::kNotFound,
                {path.string(), "it names files that are not there: " + missing,
                 std::to_string(files.size()) + " weight files beside the index", "fetch the missing files"});
  open_shards(files);
  for (const auto& [tensor, file] : file_of) {
    const auto it = shard_of_.find(tensor);
    if (it == shard_of_.end() || shards_[it->second].path.filename() != file)
      corrupt("tensor \"" + tensor + "\" is said to be in " + file + " and is not", "files that match the index");
  }
  for (const auto& [tensor, shard] : shard_of_)
    if (!file_of.count(tensor))
      corrupt("tensor \"" + tensor + "\" of " + shards_[shard].path.filename().string() + " is not listed",
              "every tensor in weight_map");
}

at::Tensor HfCheckpoint::read(const std::string& name) const {
  const auto it = shard_of_.find(name);
  if (it == shard_of_.end())
    throw Error(ErrorClass::kNotFound, {path_.string(), "no tensor \"" + name + "\"", "one of the checkpoint's tensors",
                                        did_you_mean(name, shard_of_, "", key_of)});
  const Shard& shard = shards_[it->second];
  return map_tensor(shard.path, shard.descriptor.fd, shard.file->tensors().at(name));
}

std::string HfCheckpoint::file_of(const std::string& tensor) const {
  const auto it = shard_of_.find(tensor);
  if (it != shard_of_.end()) return shards_[it->second].path.string();
  return (index_ ? path_ / kIndex : shards_.front().path).string();
}

std::unique_ptr<Tokenizer> HfCheckpoint::load_tokenizer() const {
  try {
    return models::load_tokenizer(path_);
  } catch (const Error& error) {
    if (error.error_class() == ErrorClass::kNotFound) return nullptr;  // a checkpoint without a vocabulary
    throw;
  }
}

std::string HfCheckpoint::hash() const {
  const auto read = [&](const std::string& name) { return shards_[shard_of_.at(name)].file->tensor(name); };
  return hash_tensors(mapped(shard_of_, key_of), read).hex();
}

}  // namespace emend::models::detail
