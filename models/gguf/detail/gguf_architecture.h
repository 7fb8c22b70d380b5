// What the families declare about GGUF (gguf_form.h), applied: whose file it is, the configuration in both directions,
// names of tensors and orders of rows. Everything here is a pure function.
#pragma once

#include <emend/models/family.h>
#include <emend/models/gguf/gguf_file.h>

#include <nlohmann/json.hpp>

namespace emend::models::detail {

/// Key under which emend keeps the original config.json (as text), because GGUF has no place for some of its entries.
inline constexpr const char* kConfigKey = "emend.config";
/// "emend.norm.<name>": a norm as the checkpoint had it, where the file's 1 + w lost bits of w.
inline constexpr const char* kNormKey = "emend.norm.";

/// A tensor and the file it lies in; null pointers if there is none.
struct LocatedTensor {
  const GgufFile* file = nullptr;
  const GgufTensor* tensor = nullptr;
  explicit operator bool() const noexcept { return tensor != nullptr; }
};

/// All parts of a model. Metadata are those of the first part.
class GgufFiles {
 public:
  /// Opens `path`, and the other parts if its metadata name some. Throws Error(kInvalidArgument) if it is not the
  /// first, Error(kNotFound) naming a missing part, Error(kCorruption) if a tensor is in two.
  explicit GgufFiles(const std::filesystem::path& path);

  [[nodiscard]] const GgufFile& metadata() const noexcept { return *parts_.front(); }
  [[nodiscard]] const std::vector<std::shared_ptr<const GgufFile>>& parts() const noexcept { return parts_; }
  [[nodiscard]] LocatedTensor find(std::string_view name) const;

 private:
  std::vector<std::shared_ptr<const GgufFile>> parts_;
};

/// float32 values of a whole small tensor (rotary tables).
[[nodiscard]] std::vector<double> small_tensor(const LocatedTensor& located);

/// `own`, a family that is not in families.def (or null), and those that are, as far as GGUF has a form for them.
[[nodiscard]] std::vector<const FamilySpec*> gguf_families(const FamilySpec* own);
/// The form of a general.architecture, from the first family that has it. Throws
/// Error(kUnsupported) with `where` and the list of names.
[[nodiscard]] const GgufForm& gguf_architecture(const std::string& name, const std::string& where,
                                                const FamilySpec* own = nullptr);
/// The form in which a model type is stored. Throws Error(kUnsupported) with `where` and the list of types.
[[nodiscard]] const GgufForm& gguf_architecture_for(const std::string& model_type, const std::string& where,
                                                    const FamilySpec* own = nullptr);

/// A config.json in the spelling of transformers 4, which version 5 reads too. Throws Error(kCorruption) naming file
/// and key for missing or impossible values.
[[nodiscard]] nlohmann::json config_from_gguf(const GgufFiles& files, const std::string& architecture,
                                              const FamilySpec* own = nullptr);
[[nodiscard]] GgufConfig config_to_gguf(const ModelConfig& config, const GgufForm& form);

/// The tensors of a GGUF file that make up one tensor of ours, without ".weight" or ".bias": one name, or three for a
/// projection that is fused on our side only. Experts share one stacked tensor.
[[nodiscard]] std::vector<std::string> gguf_names(const GgufForm& form, const ModelConfig& config,
                                                  const ExpectedTensor& tensor);
/// The rows of each of those tensors, of a projection of `rows` rows: all, or queries, keys and values.
[[nodiscard]] std::vector<int64_t> gguf_rows(const ModelConfig& config, size_t names, int64_t rows);

/// For each row of our tensor, its row in the file's tensors laid one below the other (queries, keys, values).
/// Empty if the order is the same.
[[nodiscard]] std::vector<int64_t> gguf_row_order(const GgufForm& form, const ModelConfig& config, Part part);

/// True for the two-dimensional weights that GPT-2 stores as [in, out] and GGUF as [out, in].
[[nodiscard]] bool is_transposed(const FamilySpec& family, const ExpectedTensor& tensor);
/// True for norm weights that GGUF stores as 1 + w (Gemma).
[[nodiscard]] bool is_stored_plus_one(const ModelConfig& config, const ExpectedTensor& tensor);

/// Tensors that a file may have and that hold no weights of ours: rotary tables.
[[nodiscard]] bool is_rotary_table(std::string_view gguf_name);

}  // namespace emend::models::detail
