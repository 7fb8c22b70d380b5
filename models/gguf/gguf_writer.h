// Writes a model as a GGUF file that llama.cpp runs, or a changed copy of one.
//
// Goals: a file of a Hugging Face checkpoint has the bytes that llama.cpp's own converter gives its tensors; a file of
// an edited GGUF model differs from the original only in the edited tensors; the target appears complete or not at all;
// one tensor at a time is in memory. Non-goals: importance matrices, splitting, llama.cpp's mixed presets (Q4_K_M, …).
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/core/log.h>
#include <emend/models/gguf/ggml_type.h>

#include <filesystem>
#include <functional>
#include <optional>

namespace emend::models {

class Checkpoint;
class Model;
struct FamilySpec;

struct GgufWriteOptions {
  /// Type of the matrices. Vectors, norms, position tables and routers are always F32, and below Q6_K the head (or the
  /// embedding that serves as one) is Q6_K or Q8_0, as llama.cpp does it. Absent: each tensor keeps the type it has in
  /// the GGUF file, or the dtype that it has in the Hugging Face checkpoint.
  std::optional<GgmlType> type = {};
  /// A GGUF file of the same model before editing: tensors whose values the editing left alone, metadata and vocabulary
  /// are copied from it. Empty: the file that the model came from, if it was one.
  std::filesystem::path base = {};
  /// Type of tensors whose values changed, where `type` is absent and there is a base. Absent: the base's type if that
  /// is Q8_0 or wider, else Q8_0, because the steps of a 4-bit grid are larger than most edits.
  std::optional<GgmlType> changed_type = {};
  /// Keep the original config.json under the key "emend.config" and the tokenizer's files under "emend.tokenizer": GGUF
  /// has no place for some of what they say.
  bool keep_config = true;
  /// The edited value of a weight, from the original in the file's dtype: asked of weights that the model holds in a
  /// narrower dtype, so that the file loses nothing by it. Absent, or nothing: as the model holds it.
  std::function<std::optional<at::Tensor>(const std::string& name, const at::Tensor& original)> exact = {};
  /// Leave the vocabulary out (key tokenizer.ggml.model = "none"): for tokenizers that GGUF has no form for.
  bool vocabulary = true;
  /// Of a checkpoint that is not loaded as a model, if its family is not in families.def. A model brings its own.
  const FamilySpec* family = nullptr;
  /// What the weights were edited with, a JSON text an edit: kept under kGgufEdits, after those that a base has
  /// there; with any, "general.base_model" names the model.
  std::vector<std::string> edits = {};
  const Log* log = nullptr;  ///< notes and fall-backs, as warnings
  ProgressFn progress = {};  ///< phase "convert", in tensors
};

/// The key of GgufWriteOptions::edits.
constexpr const char* kGgufEdits = "emend.edits";

struct GgufWrittenTensor {
  std::string name;  ///< in the GGUF file
  GgmlType type = GgmlType::kF32;
  bool fell_back = false;  ///< the rows are not whole blocks of the type asked for
  bool changed = false;    ///< the model's values differ from its checkpoint's
  /// Root mean square of what quantisation took away, relative to the change that editing made; 0 if not changed.
  /// Above 1 the edit drowns in the rounding.
  double error_of_change = 0;
};

struct GgufWriteReport {
  std::vector<GgufWrittenTensor> tensors;
  std::vector<std::string> notes;  ///< what llama.cpp will not compute as the model does
  uint64_t bytes = 0;              ///< of the file
};

/// Throws Error(kUnsupported) naming `where` if GGUF has no architecture for the model type.
void require_gguf_architecture(const std::string& model_type, const std::string& where);

/// Writes the model's weights as they are now, with configuration and vocabulary of its checkpoint.
/// Throws Error(kUnsupported) for a family that GGUF has no architecture for or a tokenizer that it has no form for;
/// Error(kNumeric) naming the tensor if a value is not finite in the type asked for; Error(kInvalidArgument) if `base`
/// is another model; Error(kIo). Nothing is left under the final name on failure.
GgufWriteReport write_gguf(const Model& model, const std::filesystem::path& path, const GgufWriteOptions& options = {});

/// The same for a checkpoint that is not loaded as a model. `base` must be empty.
GgufWriteReport write_gguf(const Checkpoint& checkpoint, const std::filesystem::path& path,
                           const GgufWriteOptions& options = {});

}  // namespace emend::models
