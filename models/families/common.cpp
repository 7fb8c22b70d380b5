#include <emend/models/families/common.h>

#include <algorithm>
#include <cmath>

namespace emend::models::families {

void append(std::vector<TensorSpec>& table, std::vector<TensorSpec> more) {
  for (auto& row : more) table.push_back(std::move(row));
}

std::vector<TensorSpec> linear(Part part, const std::string& name, const std::string& shape, Bias bias, bool conv1d) {
  const size_t space = shape.find(' ');
  std::vector<TensorSpec> rows{{part, name + ".weight", shape},
                               {part, name + ".bias", conv1d ? shape.substr(space + 1) : shape.substr(0, space)}};
  if (const auto* flag = std::get_if<bool ModelConfig::*>(&bias))
    rows.back().when = *flag;
  else if (!std::get<bool>(bias))
    rows.pop_back();
  return rows;
}

std::vector<TensorSpec> attention(const std::string& module, const std::string& out, Bias qkv, Bias out_bias) {
  std::vector<TensorSpec> rows = linear(Part::kQ, module + "q_proj", "Q D", qkv);
  append(rows, linear(Part::kK, module + "k_proj", "K D", qkv));
  append(rows, linear(Part::kV, module + "v_proj", "K D", qkv));
  append(rows, linear(Part::kAttnOut, module + out, "D Q", out_bias));
  return rows;
}

void fuse(std::vector<TensorSpec>& table, const std::vector<Part>& parts, const TensorSpec& row) {
  *std::ranges::find(table, parts.front(), &TensorSpec::part) = row;
  std::erase_if(table, [&](const TensorSpec& old) { return std::ranges::count(parts, old.part) > 0; });
}

std::vector<TensorSpec> norm(Part part, const std::string& name, bool bias,
                             std::function<bool(const ModelConfig&)> when) {
  std::vector<TensorSpec> rows{{part, name + ".weight", "D", when}};
  if (bias) rows.push_back({part, name + ".bias", "D", when});
  return rows;
}

// Of Llama and its many relatives: model.embed_tokens, separate q, k, v, gate, up, down.
static std::vector<TensorSpec> llama_tensors() {
  const std::string layer = "model.layers.{layer}.";
  std::vector<TensorSpec> table{{Part::kEmbedding, "model.embed_tokens.weight", "V D"}};
  append(table, norm(Part::kAttnNorm, layer + "input_layernorm", false));
  append(table, attention(layer + "self_attn.", "o_proj", &ModelConfig::qkv_bias, &ModelConfig::out_bias));
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

ModuleNames modules_of(const std::vector<TensorSpec>& table) {
  const auto module = [&](Part part) -> std::string {
    std::string name = name_of(table, part);
    name.erase(std::min(name.rfind('.'), name.size()));
    if (const size_t layer = name.find("{layer}"); layer != std::string::npos) name.replace(layer, 7, "{}");
    return name;
  };
  const auto parent = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  const std::string rewrite = module(Part::kDown), layer = rewrite.substr(0, rewrite.find("{}") + 2);
  return {.layer = layer,
          .attn = parent(module(Part::kAttnOut)),
          .mlp = parent(rewrite) == layer ? "" : parent(rewrite),
          .rewrite = rewrite,
          .ln_f = module(Part::kFinalNorm),
          .lm_head = module(Part::kHead),
          .embedding = module(Part::kEmbedding),
          .position = module(Part::kPositions)};
}

DebugFlavour tiny(const FamilySpec& spec, const std::string& name, const std::string& changes) {
  const ConfigKeys& keys = spec.keys;
  nlohmann::json config = {{"model_type", spec.model_types.front()},
                           {keys.hidden.front(), 32},
                           {keys.layers.front(), 3},
                           {keys.heads.front(), 4},
                           {keys.vocab.front(), 101},
                           {keys.max_positions.front(), 64}};
  if (keys.mlp_width_factor == 0) config[keys.mlp_width.front()] = 56;
  config.merge_patch(nlohmann::json::parse(changes));
  return {name, config.dump()};
}

void read_gemma(const ConfigReader& reader, ModelConfig& config) {
  config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, false);
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
}

FamilySpec named(const std::string& name, const std::string& base_prefix) {
  FamilySpec spec;
  spec.name = name;
  spec.model_types = {name};
  spec.base_prefix = base_prefix;
  return spec;
}

FamilySpec llama_relative(const std::string& name) {
  FamilySpec spec = named(name, "model.");
  spec.tensors = llama_tensors();
  spec.ignored = {"*.rotary_emb.inv_freq"};
  return spec;
}

FamilySpec gemma_relative(const std::string& name, bool sandwich) {
  FamilySpec spec = llama_relative(name);
  spec.keys.activation = {"hidden_activation", "hidden_act"};
  spec.keys.default_activation = "gelu_pytorch_tanh";
  spec.keys.default_head_dim = 256;
  spec.keys.default_tied = true;
  spec.block.norm_one_plus = true;
  if (!sandwich) return spec;
  spec.block.norm_order = NormOrder::kSandwich;
  const std::string layer = "model.layers.{layer}.";
  for (TensorSpec& row : spec.tensors)
    if (row.part == Part::kMlpNorm) row.name = layer + "pre_feedforward_layernorm.weight";
  append(spec.tensors, norm(Part::kAttnPostNorm, layer + "post_attention_layernorm", false));
  append(spec.tensors, norm(Part::kMlpPostNorm, layer + "post_feedforward_layernorm", false));
  return spec;
}

FamilySpec glm_relative(const std::string& name) {
  FamilySpec spec = llama_relative(name);
  spec.keys.default_norm_eps = 1.5625e-07;
  spec.keys.default_head_dim = 128;
  spec.keys.rotary_fraction = 0.5;
  spec.block.mlp = Mlp::kGatedFused;
  fuse(spec.tensors, {Part::kGate, Part::kUp}, {Part::kGateUp, "model.layers.{layer}.mlp.gate_up_proj.weight", "2F D"});
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = reader.flag_or({"attention_bias"}, true);
    config.rotaries.front().interleaved = true;
  };
  spec.gguf.read = [](const GgufConfigReader& reader, nlohmann::json& config) {
    config["attention_bias"] = reader.has("blk.0.attn_q.bias");
    config["partial_rotary_factor"] = reader.rotary_fraction();
  };
  return spec;
}

void read_qwen_windows(const ConfigReader& reader, ModelConfig& config) {
  const bool used = reader.flag_or({"use_sliding_window"}, false);
  const int64_t window = used && !reader.is_null("sliding_window") ? reader.integer_or({"sliding_window"}, 4096) : 0;
  const int64_t first = reader.integer_or({"max_window_layers"}, 28, 0);
  read_windows(reader, config, window, [first](int64_t layer) { return layer >= first; });
}

GgufForm plain_gguf(const std::string& architecture, const std::string& class_name) {
  GgufForm form;
  form.architecture = architecture;
  form.class_name = class_name;
  return form;
}

GgufForm llama_gguf(const std::string& class_name) {
  GgufForm form = plain_gguf("llama", class_name);
  form.paired_rotary_rows = true;
  return form;
}

void read_qwen_gguf_windows(const GgufConfigReader& reader, nlohmann::json& config) {
  config["use_sliding_window"] = reader.window() > 0;
  if (reader.window() == 0) return;
  config["sliding_window"] = reader.window();
  config["layer_types"] = reader.layer_types(0);
}

void read_gemma_gguf_scale(const GgufConfigReader& reader, int64_t layers_of_largest, nlohmann::json& config) {
  const double scale = reader.number("attention.scale").value_or(0);
  config["query_pre_attn_scalar"] = reader.layers == layers_of_largest ? reader.hidden / reader.heads : reader.head_dim;
  if (scale > 0) config["query_pre_attn_scalar"] = 1.0 / (scale * scale);
}

void read_windows(const ConfigReader& reader, ModelConfig& config, int64_t window,
                  const std::function<bool(int64_t)>& slides) {
  config.windows.assign(config.n_layers, 0);
  const auto types = reader.texts({"layer_types"});
  if (!types.empty() && std::ssize(types) != config.n_layers)
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
