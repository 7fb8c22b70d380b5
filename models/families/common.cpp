#include <emend/models/families/common.h>

namespace emend::models::families {

void append(std::vector<TensorSpec>& table, std::vector<TensorSpec> more) {
  for (auto& row : more) table.push_back(std::move(row));
}

static std::string bias_shape(const std::string& shape, bool conv1d) {
  const size_t space = shape.find(' ');
  return conv1d ? shape.substr(space + 1) : shape.substr(0, space);
}

std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape, bool ModelConfig::*bias,
                               bool conv1d) {
  return {{part, name + ".weight", shape}, {part, name + ".bias", bias_shape(shape, conv1d), bias}};
}

std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape, bool bias, bool conv1d) {
  std::vector<TensorSpec> rows{{part, name + ".weight", shape}};
  if (bias) rows.push_back({part, name + ".bias", bias_shape(shape, conv1d)});
  return rows;
}

std::vector<TensorSpec> norm(Part part, const std::string& name, bool bias,
                             std::function<bool(const ModelConfig&)> when) {
  std::vector<TensorSpec> rows{{part, name + ".weight", "D", when}};
  if (bias) rows.push_back({part, name + ".bias", "D", when});
  return rows;
}

std::vector<TensorSpec> llama_tensors() {
  const std::string layer = "model.layers.{layer}.";
  std::vector<TensorSpec> table{{Part::kEmbedding, "model.embed_tokens.weight", "V D"}};
  append(table, norm(Part::kAttnNorm, layer + "input_layernorm", false));
  append(table, linear(Part::kQ, layer + "self_attn.q_proj", "Q D", &ModelConfig::qkv_bias));
  append(table, linear(Part::kK, layer + "self_attn.k_proj", "K D", &ModelConfig::qkv_bias));
  append(table, linear(Part::kV, layer + "self_attn.v_proj", "K D", &ModelConfig::qkv_bias));
  append(table, linear(Part::kAttnOut, layer + "self_attn.o_proj", "D Q", &ModelConfig::out_bias));
  append(table, norm(Part::kMlpNorm, layer + "post_attention_layernorm", false));
  append(table, linear(Part::kGate, layer + "mlp.gate_proj", "F D", &ModelConfig::mlp_bias));
  append(table, linear(Part::kUp, layer + "mlp.up_proj", "F D", &ModelConfig::mlp_bias));
  append(table, linear(Part::kDown, layer + "mlp.down_proj", "D F", &ModelConfig::mlp_bias));
  append(table, norm(Part::kFinalNorm, "model.norm", false));
  table.push_back({Part::kHead, "lm_head.weight", "V D"});
  return table;
}

std::vector<TensorSpec> head_norms(const std::string& attention) {
  return {{Part::kQNorm, attention + "q_norm.weight", "d"}, {Part::kKNorm, attention + "k_norm.weight", "d"}};
}

std::vector<TensorSpec> gemma_tensors() {
  const std::string layer = "model.layers.{layer}.";
  std::vector<TensorSpec> table;
  for (TensorSpec row : llama_tensors()) {
    if (row.part == Part::kMlpNorm) row.name = layer + "pre_feedforward_layernorm.weight";
    table.push_back(row);
  }
  append(table, norm(Part::kAttnPostNorm, layer + "post_attention_layernorm", false));
  append(table, norm(Part::kMlpPostNorm, layer + "post_feedforward_layernorm", false));
  return table;
}

std::vector<TensorSpec> glm_tensors() {
  std::vector<TensorSpec> table;
  for (const TensorSpec& row : llama_tensors()) {
    if (row.part == Part::kUp || (row.part == Part::kGate && is_bias(row))) continue;
    table.push_back(row.part == Part::kGate
                        ? TensorSpec{Part::kGateUp, "model.layers.{layer}.mlp.gate_up_proj.weight", "2F D"}
                        : row);
  }
  return table;
}

void refine_glm(const ConfigReader& reader, ModelConfig& config) {
  config.qkv_bias = reader.flag_or({"attention_bias"}, true);
  config.rotaries.front().interleaved = true;
}

void read_qwen_windows(const ConfigReader& reader, ModelConfig& config) {
  const bool used = reader.flag_or({"use_sliding_window"}, false);
  const int64_t window = used && !reader.is_null("sliding_window") ? reader.integer_or({"sliding_window"}, 4096) : 0;
  const int64_t first = reader.integer_or({"max_window_layers"}, 28, 0);
  read_windows(reader, config, window, [first](int64_t layer) { return layer >= first; });
}

void read_windows(const ConfigReader& reader, ModelConfig& config, int64_t window,
                  const std::function<bool(int64_t)>& slides) {
  config.windows.assign(config.n_layers, 0);
  const auto types = reader.texts({"layer_types"});
  if (!types.empty() && static_cast<int64_t>(types.size()) != config.n_layers)
    reader.fail("layer_types", std::to_string(types.size()) + " entries",
                std::to_string(config.n_layers) + ", one a layer");
  for (int64_t l = 0; l < config.n_layers; ++l) {
    if (!types.empty() && types[l] != "sliding_attention" && types[l] != "full_attention")
      reader.unsupported("layer_types", "\"" + types[l] + "\"", "sliding_attention or full_attention",
                         "this kind of attention is not known");
    const bool sliding = types.empty() ? slides(l) : types[l] == "sliding_attention";
    if (sliding) config.windows[l] = window;
  }
}

}  // namespace emend::models::families
