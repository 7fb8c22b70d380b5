// Gemma 1: norms multiply by 1 + w, the embedding is scaled by sqrt(hidden), the head is tied.
#include <emend/models/families/common.h>

namespace emend::models {

// The first files say "gelu" and mean the tanh form, as Google's code computes it; those of transformers 5 mean what
// they say.
static bool means_tanh(const ConfigReader& reader) {
  return reader.text_or({"hidden_activation", "hidden_act"}, "") == "gelu" && !reader.has("hidden_activation") &&
         !reader.text_or({"transformers_version"}, "").starts_with("5");
}

FamilySpec gemma_family() {
  FamilySpec spec = families::gemma_relative("gemma");
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    if (means_tanh(reader)) config.activation = Activation::kGeluTanh;
    families::read_gemma(reader, config);
  };
  spec.gguf = families::plain_gguf("gemma", "GemmaForCausalLM");
  spec.debug = {families::tiny(spec, "plain", R"({"num_key_value_heads": 1, "head_dim": 12})")};
  return spec;
}

}  // namespace emend::models
