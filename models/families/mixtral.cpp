// Mixtral: Mistral's attention, and a router that sends each token to the best k of several MLPs.
#include <emend/models/families/common.h>

namespace emend::models {

FamilySpec mixtral_family() {
  using families::append, families::linear, families::norm;
  FamilySpec spec = families::llama_relative("mixtral");
  spec.keys.default_norm_eps = 1e-5;
  spec.keys.default_theta = 1e6;
  spec.block.mlp = Mlp::kExperts;
  spec.block.no_edit_site =
      "each token's keys enter the matrices of two of several experts, so no single matrix of a layer holds a fact";
  spec.refine = [](const ConfigReader& reader, ModelConfig& config) {
    config.n_experts = reader.integer_or({"num_local_experts"}, 8);
    if (config.n_experts > 4096)
      reader.fail("num_local_experts", std::to_string(config.n_experts), "at most 4096 experts");
    if (constexpr int64_t kMost = 100000; config.n_layers * config.n_experts > kMost)
      reader.fail("num_local_experts",
                  std::to_string(config.n_experts) + " in each of " + std::to_string(config.n_layers) + " layers",
                  "at most " + std::to_string(kMost) + " in all");
    config.experts_per_token = reader.integer_or({"num_experts_per_tok"}, 2);
    if (config.experts_per_token > config.n_experts)
      reader.fail("num_experts_per_tok", std::to_string(config.experts_per_token),
                  "at most num_local_experts, " + std::to_string(config.n_experts));
    families::read_windows(reader, config, reader.integer_or({"sliding_window"}, 0), [](int64_t) { return true; });
  };
  std::erase_if(spec.tensors, [](const TensorSpec& row) {
    return row.part == Part::kGate || row.part == Part::kUp || row.part == Part::kDown;
  });
  const std::string moe = "model.layers.{layer}.block_sparse_moe.";
  append(spec.tensors, linear(Part::kRouter, moe + "gate", "X D", false));
  append(spec.tensors, linear(Part::kExpertGate, moe + "experts.{expert}.w1", "F D", false));
  append(spec.tensors, linear(Part::kExpertDown, moe + "experts.{expert}.w2", "D F", false));
  append(spec.tensors, linear(Part::kExpertUp, moe + "experts.{expert}.w3", "F D", false));
  spec.gguf = families::llama_gguf("MixtralForCausalLM");
  spec.gguf.claims = [](const GgufConfigReader& r) { return r.integer("expert_count").value_or(0) > 0; };
  spec.gguf.read = [](const GgufConfigReader& r, nlohmann::json& config) {
    config["num_local_experts"] = *r.integer("expert_count");
    config["num_experts_per_tok"] = r.size("expert_used_count");
    config["sliding_window"] = nullptr;
  };
  spec.debug = {families::tiny(spec, "plain", R"({"hidden_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2,
                      "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2})")};
  return spec;
}

}  // namespace emend::models
