// Pieces that several families share: tensor rows and readings of windows.
#pragma once

#include <emend/models/family.h>
#include <emend/models/model.h>

#include <variant>

namespace emend::models::families {

/// Adds `more` to the end of `table`.
void append(std::vector<TensorSpec>& table, std::vector<TensorSpec> more);

/// Whether there is one: always, never, or where a flag of the configuration holds.
using Bias = std::variant<bool, bool ModelConfig::*>;
/// NAME.weight with `shape`, NAME.bias with its first dimension (the last for a Conv1D, whose weight is [in, out]).
[[nodiscard]] std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape, Bias bias,
                                             bool conv1d = false);
/// q_proj, k_proj, v_proj and the output's matrix `out` under `module`, a name ending in ".".
[[nodiscard]] std::vector<TensorSpec> attention(const std::string& module, const std::string& out, Bias qkv,
                                                Bias out_bias);
/// Puts `row` in the place of the first row of these parts, and takes their others away.
void fuse(std::vector<TensorSpec>& table, const std::vector<Part>& parts, const TensorSpec& row);
/// NAME.weight [D] and NAME.bias [D] (LayerNorm), or the weight alone (RMS).
[[nodiscard]] std::vector<TensorSpec> norm(Part part, const std::string& name, bool bias,
                                           std::function<bool(const ModelConfig&)> when = {});

/// q_norm and k_norm [d] under `attention`, a module name ending in ".".
[[nodiscard]] std::vector<TensorSpec> head_norms(const std::string& attention);
/// Names of modules as a table has them: a block's rewritten matrix, and what it and the attention lie in.
[[nodiscard]] ModuleNames modules_of(const std::vector<TensorSpec>& table);

/// A debug flavour: JSON `changes` (null takes a key away) of a model with 3 layers, 4 heads, width 32, MLP width 56
/// (unless it follows from the width), 101 tokens and 64 positions, under the family's keys.
[[nodiscard]] DebugFlavour tiny(const FamilySpec& spec, const std::string& name, const std::string& changes = "{}");
/// Gemma's biases, and its scale of the embedding.
void read_gemma(const ConfigReader& reader, ModelConfig& config);

/// A family of that name and model_type, all else as the defaults have it.
[[nodiscard]] FamilySpec named(const std::string& name, const std::string& base_prefix);
/// A family of that name and model_type with Llama's keys, block and tensors.
[[nodiscard]] FamilySpec llama_relative(const std::string& name);
/// The same with what all of Gemma share; from Gemma 2 on, four norms a layer (`sandwich`).
[[nodiscard]] FamilySpec gemma_relative(const std::string& name, bool sandwich = false);
/// What glm and glm4 share: one gate_up_proj, interleaved rotary on half of each head, biases on q, k and v alone.
[[nodiscard]] FamilySpec glm_relative(const std::string& name);
/// Qwen2 and Qwen3: a window only if use_sliding_window, on the layers from max_window_layers on.
void read_qwen_windows(const ConfigReader& reader, ModelConfig& config);

/// The GGUF form of Llama and those of its relatives that llama.cpp stores as "llama".
[[nodiscard]] GgufForm llama_gguf(const std::string& class_name);
/// A GGUF form of which nothing but its names is special.
[[nodiscard]] GgufForm plain_gguf(const std::string& architecture, const std::string& class_name);
/// Windows of Qwen2 and Qwen3: llama.cpp's converter leaves them out; emend writes them.
void read_qwen_gguf_windows(const GgufConfigReader& reader, nlohmann::json& config);
/// The scale of attention of Gemma 2 and 3, as llama.cpp has it: with `layers_of_largest` layers, hidden / heads.
void read_gemma_gguf_scale(const GgufConfigReader& reader, int64_t layers_of_largest, nlohmann::json& config);

/// The window of every layer whose `layer_types` entry is "sliding_attention"; without that list, of the layers for
/// which `slides(layer)` holds. window 0: none.
void read_windows(const ConfigReader& reader, ModelConfig& config, int64_t window,
                  const std::function<bool(int64_t)>& slides);

}  // namespace emend::models::families
