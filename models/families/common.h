// Pieces that several families share: tensor rows and readings of windows.
#pragma once

#include <emend/models/family.h>
#include <emend/models/model.h>

namespace emend::models::families {

/// Adds `more` to the end of `table`.
void append(std::vector<TensorSpec>& table, std::vector<TensorSpec> more);

/// A weight and, where `bias` holds, its bias: NAME.weight with `shape`, NAME.bias with the first dimension of it (the
/// last for a Conv1D, whose weight is [in, out]).
[[nodiscard]] std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape,
                                             bool ModelConfig::*bias, bool conv1d = false);
/// The same with a bias that is always or never there.
[[nodiscard]] std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape, bool bias,
                                             bool conv1d = false);
/// NAME.weight [D] and NAME.bias [D] (LayerNorm), or the weight alone (RMS).
[[nodiscard]] std::vector<TensorSpec> norm(Part part, const std::string& name, bool bias,
                                           std::function<bool(const ModelConfig&)> when = {});

/// The table of Llama and its many relatives: model.embed_tokens, separate q, k, v, gate, up, down.
[[nodiscard]] std::vector<TensorSpec> llama_tensors();

/// q_norm and k_norm [d] under `attention`, a module name ending in ".".
[[nodiscard]] std::vector<TensorSpec> head_norms(const std::string& attention);
/// Llama's table with Gemma 2's four norms a layer.
[[nodiscard]] std::vector<TensorSpec> gemma_tensors();
/// Llama's table with one gate_up_proj, as glm and glm4 have it.
[[nodiscard]] std::vector<TensorSpec> glm_tensors();
/// glm and glm4: interleaved rotary, biases on q, k and v alone.
void refine_glm(const ConfigReader& reader, ModelConfig& config);
/// Qwen2 and Qwen3: a window only if use_sliding_window, on the layers from max_window_layers on.
void read_qwen_windows(const ConfigReader& reader, ModelConfig& config);

/// The window of every layer whose `layer_types` entry is "sliding_attention"; without that list, of the layers for
/// which `slides(layer)` holds. window 0: none.
void read_windows(const ConfigReader& reader, ModelConfig& config, int64_t window,
                  const std::function<bool(int64_t)>& slides);

}  // namespace emend::models::families
