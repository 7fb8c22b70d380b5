// InternLM (first version): Llama with biases on q, k, v and o.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec internlm_family() {
  FamilySpec spec = families::llama_relative("internlm");
  spec.keys.kv_heads = {};
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.qkv_bias = config.out_bias = reader.flag_or({"bias"}, true);
  };
  spec.gguf = families::llama_gguf("InternLMForCausalLM");
  spec.gguf.claims = [](const GgufConfigReader&) { return false; };  // read as Llama with biases
  spec.debug = {families::tiny(spec, "plain")};
  return spec;
}

}  // namespace emend::models
