#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>

namespace emend::models {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::optional<at::ScalarType> folder_dtype(const std::string& type) {
  if (type.empty()) return std::nullopt;
  switch (parse_ggml_type(type)) {
    case GgmlType::kF32:
      return at::kFloat;
    case GgmlType::kF16:
      return at::kHalf;
    case GgmlType::kBF16:
      return at::kBFloat16;
    default:
      throw Error(ErrorClass::kInvalidArgument,
                  {"convert", "type " + type + " for a Hugging Face folder", "F32, F16 or BF16",
                   "name a target that ends in .gguf for quantised types"});
  }
}

/// Writes the weights and the small files of a checkpoint into a folder.
class FolderWriter {
 public:
  FolderWriter(const Checkpoint& checkpoint, const fs::path& folder, const ConvertOptions& options)
      : checkpoint_(checkpoint), folder_(folder), options_(options), dtype_(folder_dtype(options.type)) {}

  ConvertReport write() {
    report_.format = ModelFormat::kHuggingFace;
    report_.tensors = static_cast<int64_t>(checkpoint_.tensors().size());
    plan_shards();
    make_folder();
    for (size_t i = 0; i < shards_.size(); ++i) write_shard(i);
    if (shards_.size() > 1) write_index();
    if (options_.vocabulary) write_tokenizer();
    Json config = checkpoint_.config();
    config["torch_dtype"] = dtype_name();
    config.erase("dtype");
    add_file("config.json", config.dump(2) + "\n");
    return std::move(report_);
  }

 private:
  [[nodiscard]] at::ScalarType dtype_of(const TensorInfo& info) const {
    return dtype_ && at::isFloatingType(info.dtype) ? *dtype_ : info.dtype;
  }
  // The dtype of the largest tensor stands for the model.
  [[nodiscard]] std::string dtype_name() const {
    const TensorInfo* largest = &checkpoint_.tensors().front();
    const auto values = [](const TensorInfo& info) { return c10::multiply_integers(info.shape); };
    for (const TensorInfo& info : checkpoint_.tensors())
      if (values(info) > values(*largest)) largest = &info;
    const at::ScalarType dtype = dtype_of(*largest);
    return dtype == at::kHalf ? "float16" : dtype == at::kBFloat16 ? "bfloat16" : "float32";
  }

  void plan_shards() {
    uint64_t size = 0;
    for (const TensorInfo& info : checkpoint_.tensors()) {
      const uint64_t bytes =
          static_cast<uint64_t>(c10::multiply_integers(info.shape)) * c10::elementSize(dtype_of(info));
      if (shards_.empty() || (size > 0 && size + bytes > options_.shard_bytes)) {
        shards_.emplace_back();
        size = 0;
      }
      shards_.back().push_back(&info);
      size += bytes;
      report_.bytes += bytes;
    }
    if (shards_.empty())
      throw Error(ErrorClass::kCorruption, {checkpoint_.path().string(), "no tensors", "a model with weights", ""});
  }

  void make_folder() const {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error || !fs::is_directory(folder_))
      throw Error(ErrorClass::kIo, {folder_.string(), "cannot create the folder (" + error.message() + ")", "",
                                    "check the path and its permissions"});
    if (fs::exists(folder_ / "config.json") || fs::exists(folder_ / "model.safetensors.index.json"))
      throw Error(ErrorClass::kInvalidArgument, {folder_.string(), "the folder already holds a model",
                                                 "a new or empty folder", "choose another target or remove it first"});
  }

  [[nodiscard]] std::string shard_name(size_t index) const {
    if (shards_.size() == 1) return "model.safetensors";
    std::array<char, 64> name{};
    std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", index + 1, shards_.size());
    return name.data();
  }

  void write_shard(size_t index) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const TensorInfo* info : shards_[index]) {
      const at::Tensor stored = checkpoint_.read(info->name).to(dtype_of(*info));
      if (dtype_of(*info) == at::kHalf && !at::isfinite(stored).all().item<bool>())
        throw Error(ErrorClass::kNumeric, {checkpoint_.path().string() + ": tensor " + info->name,
                                           "values beyond float16's range", "at most 65504", "convert to BF16 or F32"});
      tensors.emplace_back(info->name, stored);
      if (options_.progress)
        options_.progress({"convert", static_cast<double>(++done_), static_cast<double>(report_.tensors), info->name});
    }
    write_safetensors(folder_ / shard_name(index), tensors, {{"format", "pt"}});
    report_.files.push_back(folder_ / shard_name(index));
  }

  void write_index() {
    Json index = {{"metadata", {{"total_size", report_.bytes}}}, {"weight_map", Json::object()}};
    for (size_t i = 0; i < shards_.size(); ++i)
      for (const TensorInfo* info : shards_[i]) index["weight_map"][info->name] = shard_name(i);
    add_file("model.safetensors.index.json", index.dump(2) + "\n");
  }

  void write_tokenizer() {
    const auto tokenizer = checkpoint_.load_tokenizer();
    if (!tokenizer) {
      report_.notes.emplace_back("the source has no tokenizer");
      return;
    }
    save_tokenizer(*tokenizer, folder_);
    for (const auto& entry : fs::directory_iterator(folder_))
      if (std::find(report_.files.begin(), report_.files.end(), entry.path()) == report_.files.end())
        report_.files.push_back(entry.path());
  }

  void add_file(const std::string& name, const std::string& text) {
    write_file(folder_ / name, text);
    report_.files.push_back(folder_ / name);
  }

  const Checkpoint& checkpoint_;
  fs::path folder_;
  const ConvertOptions& options_;
  std::optional<at::ScalarType> dtype_;
  std::vector<std::vector<const TensorInfo*>> shards_;
  int64_t done_ = 0;
  ConvertReport report_;
};

ConvertReport to_gguf(const Checkpoint& checkpoint, const fs::path& target, const ConvertOptions& options) {
  GgufWriteOptions writing;
  if (!options.type.empty()) writing.type = parse_ggml_type(options.type);
  writing.vocabulary = options.vocabulary;
  writing.log = options.log;
  writing.progress = options.progress;
  const GgufWriteReport written = write_gguf(checkpoint, target, writing);
  return {ModelFormat::kGguf, {target}, written.bytes, static_cast<int64_t>(written.tensors.size()), written.notes};
}

}  // namespace

ModelFormat parse_model_format(std::string_view name) {
  if (name == "auto") return ModelFormat::kAuto;
  if (name == "huggingface" || name == "hf") return ModelFormat::kHuggingFace;
  if (name == "gguf") return ModelFormat::kGguf;
  throw Error(ErrorClass::kInvalidArgument,
              {"model format", "\"" + std::string(name) + "\"", "auto, huggingface or gguf", ""});
}

ConvertReport convert_model(const std::string& source, const fs::path& target, const ConvertOptions& options) {
  const at::NoGradGuard no_grad;
  const auto checkpoint = open_checkpoint(source);
  std::error_code ignored;
  if (fs::equivalent(checkpoint->path(), target, ignored))
    throw Error(ErrorClass::kInvalidArgument, {target.string(), "the target is the source", "another path", ""});
  const bool gguf =
      options.format == ModelFormat::kGguf || (options.format == ModelFormat::kAuto && target.extension() == ".gguf");
  return gguf ? to_gguf(*checkpoint, target, options) : FolderWriter(*checkpoint, target, options).write();
}

}  // namespace emend::models
