// Gemma 1: norms multiply by 1 + w, the embedding is scaled by sqrt(hidden), the head is tied.
#include <emend/models/families/common.h>

#include <cmath>

namespace emend::models {

// Files written by transformers 4 say "gelu" where that version computed the tanh form; version 5 means what it says.
static bool means_tanh(const ConfigReader& reader) {
  return reader.text_or({"hidden_activation", "hidden_act"}, "") == "gelu" && !reader.has("hidden_activation") &&
         !reader.text_or({"transformers_version"}, "").starts_with("5");
}

FamilySpec gemma_family() {
  FamilySpec spec = families::gemma_relative("gemma");
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    if (means_tanh(reader)) config.activation = Activation::kGeluTanh;
    config.qkv_bias = config.out_bias = reader.flag_or({"attention_bias"}, false);
    config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  };
  spec.gguf = families::plain_gguf("gemma", "GemmaForCausalLM");
  spec.debug = {
      {"plain", R"({"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                              "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 56, "vocab_size": 101,
                              "max_position_embeddings": 64})"}};
  return spec;
}

}  // namespace emend::models
