#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/family.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/spare_neurons.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::models {
namespace {

namespace fs = std::filesystem;

std::optional<at::ScalarType> folder_dtype(const std::string& type) {
  if (type.empty()) return std::nullopt;
  if (const auto dtype = plain_dtype(parse_ggml_type(type))) return dtype;
  refuse({"convert", "type " + type + " for a Hugging Face folder", "F32, F16 or BF16",
          "name a target that ends in .gguf for quantised types"});
}

std::string type_name(at::ScalarType dtype) {
  const auto type = plain_type(dtype);
  return type ? to_string(*type) : c10::toString(dtype);
}

/// Writes the weights and the small files of a checkpoint into a folder.
class FolderWriter {
 public:
  FolderWriter(const Checkpoint& checkpoint, const fs::path& folder, const ConvertOptions& options)
      : checkpoint_(checkpoint),
        dtype_(folder_dtype(options.type)),
        folder_(folder),
        options_(options),
        spare_(checkpoint, options.spare_neurons) {}

  ConvertReport write() {
    fs::create_directory(folder_);
    report_.format = ModelFormat::kHuggingFace;
    report_.tensors = static_cast<int64_t>(checkpoint_.tensors().size());
    write_weights();
    write_companions();
    write_config();
    return std::move(report_);
  }

 private:
  [[nodiscard]] at::ScalarType dtype_of(const TensorInfo& info) const {
    return dtype_ && at::isFloatingType(info.dtype) ? *dtype_ : info.dtype;
  }
  // The dtype of the largest tensor stands for the model.
  [[nodiscard]] at::ScalarType main_dtype() const {
    const auto values = [](const TensorInfo& info) { return c10::multiply_integers(info.shape); };
    return dtype_of(*std::max_element(checkpoint_.tensors().begin(), checkpoint_.tensors().end(),
                                      [&](const auto& a, const auto& b) { return values(a) < values(b); }));
  }

  void write_weights() {
    std::vector<std::pair<std::string, uint64_t>> sizes;
    std::map<std::string, at::ScalarType> dtypes;
    for (const TensorInfo& info : checkpoint_.tensors()) {
      const at::ScalarType dtype = dtypes[info.name] = dtype_of(info);
      sizes.emplace_back(info.name,
                         static_cast<uint64_t>(c10::multiply_integers(spare_.shape(info))) * c10::elementSize(dtype));
      report_.bytes += sizes.back().second;
      ++report_.types[type_name(dtype)];
    }
    if (sizes.empty())
      throw Error(ErrorClass::kCorruption, {checkpoint_.path().string(), "no tensors", "a model with weights", ""});
    double done = 0;
    detail::write_weight_files(folder_, sizes, options_.shard_bytes.value_or(detail::kShardBytes),
                               [&](const std::string& name) {
                                 at::Tensor stored = as_stored(name, dtypes.at(name));
                                 if (options_.progress)
                                   options_.progress({"convert", ++done, static_cast<double>(sizes.size()), name});
                                 return stored;
                               });
  }

  [[nodiscard]] at::Tensor as_stored(const std::string& name, at::ScalarType dtype) const {
    const at::Tensor original = spare_.widened(name, checkpoint_.read(name));
    at::Tensor stored = original.to(dtype);
    if (dtype != at::kHalf && dtype != at::kBFloat16) return stored;
    // A constant beside the weights, such as GPT-2's masked_bias of -1e9: as large as the dtype allows.
    if (dtype == at::kHalf && stored.numel() == 1) stored = at::clamp(original, -65504, 65504).to(at::kHalf);
    const at::Tensor kept = at::isfinite(stored);  // what BF16 cannot hold; F16 refuses what is infinite already, too
    if (!(dtype == at::kHalf ? kept : kept.logical_or(at::isfinite(original).logical_not())).all().item<bool>())
      throw Error(ErrorClass::kNumeric, {checkpoint_.path().string() + ": tensor " + name,
                                         std::string("values beyond the range of ") + c10::toString(dtype),
                                         dtype == at::kHalf ? "at most 65504" : "smaller ones",
                                         dtype == at::kHalf ? "convert to BF16 or F32" : "convert to F32"});
    return stored;
  }

  void write_companions() {
    if (const auto* source = dynamic_cast<const detail::HfCheckpoint*>(&checkpoint_)) {
      const auto others = detail::copy_companions(source->path(), folder_, options_.vocabulary);
      if (!others.empty()) report_.notes.push_back("not copied: " + shorten(join(others, ", "), 300));
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
    std::string text = source ? source->config_text() : checkpoint_.config().dump(2);
    if (options_.spare_neurons > 0) text = spare_.widened(nlohmann::ordered_json::parse(text)).dump(2);
    write_file(folder_ / "config.json",
               detail::config_text(text, source && !dtype_ ? std::nullopt : std::optional(main_dtype())));
  }

  const Checkpoint& checkpoint_;
  std::optional<at::ScalarType> dtype_;
  fs::path folder_;
  const ConvertOptions& options_;
  SpareNeurons spare_;
  ConvertReport report_;
};

ConvertReport to_folder(const Checkpoint& checkpoint, const fs::path& target, const ConvertOptions& options) {
  std::error_code error;
  if (fs::exists(target, error) && !fs::is_directory(target, error))
    refuse({target.string(), "a file", "a folder, or a name that is free", ""});
  if (!options.overwrite && fs::exists(target, error) && !fs::is_empty(target, error))
    throw Error(
        ErrorClass::kInvalidArgument,
        {target.string(),
         fs::exists(target / "config.json", error) ? "the folder already holds a model" : "the folder is not empty",
         "a new or empty folder",
         "choose another target, or replace the model's files there (" + setting("force") + ")"});
  ConvertReport report;
  const auto write = [&](const fs::path& folder) {
    report = FolderWriter(checkpoint, folder, options).write();
    for (const auto& entry : fs::directory_iterator(folder)) report.files.push_back(target / entry.path().filename());
  };
  write_whole(target, write, is_model_file);
  std::ranges::sort(report.files);
  return report;
}

ConvertReport to_gguf(const Checkpoint& checkpoint, const fs::path& target, const ConvertOptions& options) {
  std::error_code error;
  if (fs::is_directory(target, error))
    refuse({target.string(), "a folder", "the name of a GGUF file", "name a file in it, such as model.gguf"});
  if (fs::exists(target, error) && !options.overwrite)
    refuse({target.string(), "the file is already there", "a name that is free",
            "choose another target, or replace the file (" + setting("force") + ")"});
  GgufWriteOptions writing;
  if (!options.type.empty()) writing.type = parse_ggml_type(options.type);
  writing.vocabulary = options.vocabulary;
  writing.edits = options.edits;
  writing.log = options.log;
  writing.progress = options.progress;
  GgufWriteReport written;
  write_whole(target, [&](const fs::path& file) { written = write_gguf(checkpoint, file, writing); });
  ConvertReport report;
  report.files = {target};
  report.bytes = written.bytes;
  report.tensors = std::ssize(written.tensors);
  report.notes = written.notes;
  for (const auto& tensor : written.tensors) ++report.types[std::string(to_string(tensor.type))];
  return report;
}

}  // namespace

ModelFormat parse_model_format(std::string_view name) {
  if (name == "auto") return ModelFormat::kAuto;
  if (name == "huggingface" || name == "hf") return ModelFormat::kHuggingFace;
  if (name == "gguf") return ModelFormat::kGguf;
  refuse({"model format", "\"" + std::string(name) + "\"", "auto, huggingface or gguf", ""});
}

ConvertReport convert_model(const std::string& source, const fs::path& target, const ConvertOptions& options) {
  const at::NoGradGuard no_grad;
  const auto checkpoint = open_checkpoint(source);
  std::error_code ignored;
  if (fs::equivalent(checkpoint->path(), target, ignored))
    refuse({target.string(), "the target is the source", "another path", ""});
  const bool gguf = options.format == ModelFormat::kGguf ||
                    (options.format == ModelFormat::kAuto && lower(target.extension().string()) == ".gguf");
  if (options.spare_neurons < 0)
    refuse({setting("spare_neurons"), std::to_string(options.spare_neurons), "0 or more", ""});
  if (gguf && options.spare_neurons > 0)
    refuse(
        {target.string(), "spare neurons in a GGUF file", "a folder", "convert to a folder first, and that to GGUF"});
  if (gguf && options.shard_bytes)
    refuse({setting("shard_size"), "with a GGUF file, which is one", "a folder", "leave it out"});
  return (gguf ? to_gguf : to_folder)(*checkpoint, target, options);
}

}  // namespace emend::models
