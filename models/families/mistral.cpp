// Mistral 7B and its successors: Llama with an optional sliding window on all layers.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec mistral_family() {
  FamilySpec spec;
  spec.name = "mistral";
  spec.model_types = {"mistral"};
  spec.base_prefix = "model.";
  spec.tensors = families::llama_tensors();
  spec.ignored = {"*.rotary_emb.inv_freq"};
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    // null turns the window off (v0.2 and later); the library that wrote the files takes 4096 where the key is absent.
    const int64_t window = reader.is_null("sliding_window") ? 0 : reader.integer_or({"sliding_window"}, 4096);
    families::read_windows(reader, config, window, [](int64_t) { return true; });
  };
  spec.debug = {
      {"window", R"({"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                               "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 56, "vocab_size": 101,
                               "max_position_embeddings": 64, "sliding_window": 4})"}};
  return spec;
}

}  // namespace emend::models
