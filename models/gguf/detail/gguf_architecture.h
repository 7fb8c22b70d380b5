// What llama.cpp calls an architecture, next to our family tables: which names its tensors have and how their rows are
// ordered. Everything here is data or a pure function and serves both directions.
#pragma once

#include <emend/models/config.h>
#include <emend/models/family.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

struct GgufArchitecture {
  std::string name;                      ///< general.architecture
  std::vector<std::string> model_types;  ///< Hugging Face model types stored under it
  /// Query and key rows are stored pair by pair: row 2j + s of a head is our row j + s·d/2 (llama.cpp rotates
  /// neighbours).
  bool paired_rotary_rows = false;
  /// attn_q, attn_k, attn_v are stored apart although the Hugging Face checkpoint has one matrix.
  bool splits_qkv = false;
  /// llama.cpp has a name for it but cannot run it.
  bool not_run_by_llama_cpp = false;
};

[[nodiscard]] const std::vector<GgufArchitecture>& gguf_architectures();
/// By general.architecture. Throws Error(kUnsupported) with `where` and the list of names.
[[nodiscard]] const GgufArchitecture& gguf_architecture(const std::string& name, const std::string& where);
/// The architecture under which a model type is stored. Throws Error(kUnsupported) with `where` and the list of types.
[[nodiscard]] const GgufArchitecture& gguf_architecture_for(const std::string& model_type, const std::string& where);

/// The tensors of a GGUF file that make up one tensor of ours, without ".weight" or ".bias": one name, or three for a
/// projection that is fused on our side only. Experts share one stacked tensor.
[[nodiscard]] std::vector<std::string> gguf_names(const GgufArchitecture& architecture, const ModelConfig& config,
                                                  const ExpectedTensor& tensor);

/// For each row of our tensor, its row in the file's tensors laid one below the other (queries, keys, values).
/// Empty if the order is the same.
[[nodiscard]] std::vector<int64_t> gguf_row_order(const GgufArchitecture& architecture, const ModelConfig& config,
                                                  Part part);

/// True for the two-dimensional weights that GPT-2 stores as [in, out] and GGUF as [out, in].
[[nodiscard]] bool is_transposed(const FamilySpec& family, const ExpectedTensor& tensor);
/// True for norm weights that GGUF stores as 1 + w (Gemma).
[[nodiscard]] bool is_stored_plus_one(const ModelConfig& config, const ExpectedTensor& tensor);

/// Tensors that a file may have and that hold no weights of ours: rotary tables.
[[nodiscard]] bool is_rotary_table(std::string_view gguf_name);

}  // namespace emend::models::detail
