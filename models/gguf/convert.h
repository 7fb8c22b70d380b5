// Converting a model between a Hugging Face folder and a GGUF file, without loading it as a model.
#pragma once

#include <emend/models/gguf/gguf_writer.h>

#include <map>

namespace emend::models {

enum class ModelFormat {
  kAuto,  ///< GGUF if the target's name ends in ".gguf", else a Hugging Face folder
  kHuggingFace,
  kGguf,
};
/// "auto", "huggingface" (or "hf"), "gguf". Throws Error(kInvalidArgument).
[[nodiscard]] ModelFormat parse_model_format(std::string_view name);

struct ConvertOptions {
  ModelFormat format = ModelFormat::kAuto;
  /// Type of the matrices: F32, F16 or BF16 for a folder; any that parse_ggml_type() takes for GGUF. Empty: as in the
  /// source, where a folder gets F32 for what is quantised.
  std::string type = {};
  bool vocabulary = true;  ///< false: leave the tokenizer out
  /// Largest weight file of a folder; nothing: 5 GB. Refused for GGUF, which is one file.
  std::optional<uint64_t> shard_bytes = {};
  bool overwrite = false;  ///< replace a model that is already at the target
  /// Neurons that are added to every MLP, all zero: the model computes what it did, and LATCH has free places (folders
  /// only; not for mixtures of experts).
  int64_t spare_neurons = 0;
  std::vector<std::string> edits = {};  ///< GgufWriteOptions::edits
  const Log* log = nullptr;
  ProgressFn progress = {};  ///< phase "convert", in tensors
};

struct ConvertReport {
  ModelFormat format = ModelFormat::kGguf;
  std::vector<std::filesystem::path> files;  ///< written, weights and small ones
  uint64_t bytes = 0;                        ///< of weight files
  int64_t tensors = 0;
  std::map<std::string, int64_t> types;  ///< how many tensors have which type ("F16", "Q8_0", …)
  std::vector<std::string> notes;        ///< what the target cannot express
};

/// Converts `source` (a folder, a .gguf file, or ORG/NAME in the cache) to `target`. One weight file is in memory at a
/// time. The target appears complete or not at all: a folder is filled beside its final place and moved there. From a
/// folder to a folder, tokenizer, generation settings and remote code are copied as they are. Throws as open_checkpoint
/// and write_gguf do; Error(kInvalidArgument) for a type that the target's format cannot hold, a target that is the
/// source, or one that is taken and not to be overwritten, and for spare neurons in a GGUF file; Error(kUnsupported)
/// where the MLPs of a family cannot be widened.
ConvertReport convert_model(const std::string& source, const std::filesystem::path& target,
                            const ConvertOptions& options = {});

}  // namespace emend::models
