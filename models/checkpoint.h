// Where a model's configuration, weights and vocabulary come from: a Hugging Face folder or a GGUF file.
#pragma once

#include <emend/core/safetensors.h>
#include <emend/devices/placement.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

namespace emend {
class Log;
}

namespace emend::models {

class Model;
class Tokenizer;
struct FamilySpec;
struct ModelConfig;

/// An opened checkpoint; no weight has been read yet. See HfCheckpoint, GgufCheckpoint, with_spare_neurons.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }  ///< folder or file
  [[nodiscard]] const std::string& format() const noexcept { return format_; }        ///< "huggingface" or "gguf"
  /// config.json; a GGUF file's metadata appear under the names that config.json has.
  [[nodiscard]] const nlohmann::json& config() const noexcept { return config_; }
  /// Names (Hugging Face names also for GGUF), dtypes as `read` gives them, and shapes; offset and bytes
  /// are 0 of GGUF.
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  /// One tensor on the CPU: a view of the mapped file where possible, else dequantised. Throws Error(kNotFound).
  [[nodiscard]] virtual at::Tensor read(const std::string& name) const = 0;
  /// The vocabulary, or null if the checkpoint has none.
  [[nodiscard]] virtual std::unique_ptr<Tokenizer> load_tokenizer() const;
  /// sha256 of names, shapes and stored bytes (not of the path). Computed on first use.
  [[nodiscard]] const std::string& fingerprint() const;
  /// How many neurons of zeros every MLP has beyond the file's (spare_neurons.h).
  [[nodiscard]] int64_t spare_neurons() const noexcept { return spare_neurons_; }

 protected:
  Checkpoint(std::filesystem::path path, std::string format, nlohmann::json config = {},
             std::vector<TensorInfo> tensors = {});
  [[nodiscard]] virtual std::string hash() const = 0;  ///< fingerprint(), computed

  std::filesystem::path path_;
  std::string format_;
  nlohmann::json config_;
  std::vector<TensorInfo> tensors_;
  int64_t spare_neurons_ = 0;

 private:
  mutable std::once_flag hashed_;
  mutable std::string hash_;
};

/// The checkpoint with another tokenizer, which `make` makes.
[[nodiscard]] std::shared_ptr<const Checkpoint> with_tokenizer(std::shared_ptr<const Checkpoint> checkpoint,
                                                               std::function<std::unique_ptr<Tokenizer>()> make);

/// Opens a folder, a .gguf file, or ORG/NAME in the cache of huggingface_hub (HF_HUB_CACHE, HF_HOME, …). Throws
/// Error(kNotFound) saying what was looked for and where; Error(kUnsupported) for .bin/.pt (pickle) checkpoints with
/// the conversion to use; Error(kCorruption) for damaged files.
[[nodiscard]] std::shared_ptr<const Checkpoint> open_checkpoint(const std::string& path_or_name);

/// What Model::fingerprint() would be, without loading: the checkpoint's, and what its config.json says of arithmetic.
[[nodiscard]] std::string model_fingerprint(const Checkpoint& checkpoint);

/// "ORG/NAME" of a snapshot in a Hugging Face cache (models--ORG--NAME/snapshots/REVISION); empty for other paths.
[[nodiscard]] std::string hub_name(const std::filesystem::path& folder);
/// What people call a model: ORG/NAME, the name of its folder, or that of its file without ".gguf".
[[nodiscard]] std::string model_name(const std::filesystem::path& path);

/// The file that each tensor of a Hugging Face folder is read from; others (copies, other precisions) may lie beside.
/// Throws as open_checkpoint does.
[[nodiscard]] std::map<std::string, std::filesystem::path> weight_files(const std::filesystem::path& folder);
/// The folder, inside a Hugging Face one, of chat templates beside the default one.
inline constexpr const char* kMoreTemplates = "additional_chat_templates";
/// Whether a name in a Hugging Face folder is that of something which belongs to one model: weights
/// ("model*.safetensors" and their index), config.json, tokenizer, chat templates, generation settings, ledger.
[[nodiscard]] bool is_model_file(const std::string& name);

/// Whether `path` is `folder` or lies in it; both canonical.
[[nodiscard]] bool is_within(const std::filesystem::path& path, const std::filesystem::path& folder);

/// Throws Error(kInvalidArgument) if `out` is `source`, the file or folder that a model was loaded from, or lies in it:
/// everything that saves a loaded model, or an edit of it, asks this first.
void require_apart(const std::filesystem::path& out, const std::filesystem::path& source);

struct LoadOptions {
  /// float32 (default), bfloat16, or float64 for tests.
  at::ScalarType dtype = at::kFloat;
  /// Chooses the placement once the configuration is known; default: everything on the CPU.
  std::function<devices::PlacementPlan(const ModelConfig&, const Checkpoint&)> place = {};
  bool tokenizer = true;  ///< load it if the checkpoint has one
  /// A family of the program's own, used instead of looking model_type up in families.def; must outlive the model.
  const FamilySpec* family = nullptr;
  const Log* log = nullptr;
};

/// Loads the weights, each straight to its device. Throws Error with file, tensor or key, got and expected: unknown
/// model_type, missing or malformed configuration keys, missing, extra, misshaped or non-finite (sampled) tensors.
[[nodiscard]] Model load_model(std::shared_ptr<const Checkpoint> checkpoint, const LoadOptions& options = {});
[[nodiscard]] Model load_model(const std::string& path_or_name, const LoadOptions& options = {});

/// Writes a Hugging Face folder (config.json, model*.safetensors with index when sharded, tokenizer files) that
/// transformers loads, whole or not at all; the folder's older model goes. Weights keep the dtype of the checkpoint's
/// file where that is float32, float16 or bfloat16 (GGUF: `dtype`, default float32); files without a changed tensor are
/// copied. Returns the names of the tensors whose bytes differ from the checkpoint's.
std::vector<std::string> save_model(const Model& model, const std::filesystem::path& folder,
                                    std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace emend::models
