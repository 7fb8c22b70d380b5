#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/dtype_name.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/detail/model_folder.h>
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

std::string type_name(at::ScalarType dtype) {
  return dtype == at::kFloat      ? "F32"
         : dtype == at::kHalf     ? "F16"
         : dtype == at::kBFloat16 ? "BF16"
                                  : c10::toString(dtype);
}

/// Writes the weights and the small files of a checkpoint into a folder.
class FolderWriter {
 public:
  FolderWriter(const Checkpoint& checkpoint, const fs::path& folder, const ConvertOptions& options)
      : checkpoint_(checkpoint),
        dtype_(folder_dtype(options.type)),
        staged_(folder, options.overwrite),
        folder_(staged_.path()),
        options_(options) {}

  ConvertReport write() {
    report_.format = ModelFormat::kHuggingFace;
    report_.tensors = static_cast<int64_t>(checkpoint_.tensors().size());
    plan_shards();
    for (size_t i = 0; i < shards_.size(); ++i) write_shard(i);
    if (shards_.size() > 1) write_index();
    write_companions();
    write_config();
    report_.files = staged_.commit();
    return std::move(report_);
  }

 private:
  [[nodiscard]] at::ScalarType dtype_of(const TensorInfo& info) const {
    return dtype_ && at::isFloatingType(info.dtype) ? *dtype_ : info.dtype;
  }
  // The dtype of the largest tensor stands for the model.
  [[nodiscard]] std::string main_dtype() const {
    const TensorInfo* largest = &checkpoint_.tensors().front();
    const auto values = [](const TensorInfo& info) { return c10::multiply_integers(info.shape); };
    for (const TensorInfo& info : checkpoint_.tensors())
      if (values(info) > values(*largest)) largest = &info;
    return dtype_name(dtype_of(*largest));
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
      ++report_.types[type_name(dtype_of(info))];
    }
    if (shards_.empty())
      throw Error(ErrorClass::kCorruption, {checkpoint_.path().string(), "no tensors", "a model with weights", ""});
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
      const at::Tensor original = checkpoint_.read(info->name);
      at::Tensor stored = original.to(dtype_of(*info));
      // A constant beside the weights, such as GPT-2's masked_bias of -1e9: as large as the dtype allows.
      if (dtype_of(*info) == at::kHalf && stored.numel() == 1)
        stored = at::clamp(original, -65504, 65504).to(at::kHalf);
      if (dtype_of(*info) == at::kHalf && !at::isfinite(stored).all().item<bool>())
        throw Error(ErrorClass::kNumeric, {checkpoint_.path().string() + ": tensor " + info->name,
                                           "values beyond float16's range", "at most 65504", "convert to BF16 or F32"});
      tensors.emplace_back(info->name, stored);
      if (options_.progress)
        options_.progress({"convert", static_cast<double>(++done_), static_cast<double>(report_.tensors), info->name});
    }
    write_safetensors(folder_ / shard_name(index), tensors, {{"format", "pt"}});
  }

  void write_index() {
    Json index = {{"metadata", {{"total_size", report_.bytes}}}, {"weight_map", Json::object()}};
    for (size_t i = 0; i < shards_.size(); ++i)
      for (const TensorInfo* info : shards_[i]) index["weight_map"][info->name] = shard_name(i);
    write_file(folder_ / "model.safetensors.index.json", index.dump(2) + "\n");
  }

  void write_companions() {
    if (const auto* source = dynamic_cast<const detail::HfCheckpoint*>(&checkpoint_)) {
      (void)detail::copy_companions(source->path(), folder_, options_.vocabulary);
      return;
    }
    if (checkpoint_.config().contains("auto_map"))
      report_.notes.emplace_back(
          "config.json names Python files (auto_map) that the source does not hold; emend does not need them");
    if (!options_.vocabulary) return;
    if (const auto tokenizer = checkpoint_.load_tokenizer())
      save_tokenizer(*tokenizer, folder_);
    else
      report_.notes.emplace_back("the source has no tokenizer");
  }

  // The source's own text with another dtype; unchanged if the dtype stays.
  void write_config() {
    const auto* source = dynamic_cast<const detail::HfCheckpoint*>(&checkpoint_);
    if (source && !dtype_) {
      write_file(folder_ / "config.json", source->config_text());
      return;
    }
    Json config = source ? Json::parse(source->config_text()) : Json(checkpoint_.config());
    bool named = false;
    for (const char* key : {"torch_dtype", "dtype"})
      if (config.contains(key)) config[key] = main_dtype(), named = true;
    if (!named) config["torch_dtype"] = main_dtype();
    write_file(folder_ / "config.json", config.dump(2) + "\n");
  }

  const Checkpoint& checkpoint_;
  std::optional<at::ScalarType> dtype_;
  detail::StagedFolder staged_;
  fs::path folder_;
  const ConvertOptions& options_;
  std::vector<std::vector<const TensorInfo*>> shards_;
  int64_t done_ = 0;
  ConvertReport report_;
};

ConvertReport to_gguf(const Checkpoint& checkpoint, const fs::path& target, const ConvertOptions& options) {
  std::error_code error;
  if (fs::is_directory(target, error))
    throw Error(ErrorClass::kInvalidArgument,
                {target.string(), "a folder", "the name of a GGUF file", "name a file in it, such as model.gguf"});
  if (fs::exists(target, error) && !options.overwrite)
    throw Error(ErrorClass::kInvalidArgument, {target.string(), "the file is already there", "a name that is free",
                                               "choose another target, or replace the file with --force (overwrite)"});
  GgufWriteOptions writing;
  if (!options.type.empty()) writing.type = parse_ggml_type(options.type);
  writing.vocabulary = options.vocabulary;
  writing.log = options.log;
  writing.progress = options.progress;
  if (target.has_parent_path()) fs::create_directories(target.parent_path(), error);
  const GgufWriteReport written = write_gguf(checkpoint, target, writing);
  ConvertReport report;
  report.files = {target};
  report.bytes = written.bytes;
  report.tensors = static_cast<int64_t>(written.tensors.size());
  report.notes = written.notes;
  for (const auto& tensor : written.tensors) ++report.types[std::string(to_string(tensor.type))];
  return report;
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
