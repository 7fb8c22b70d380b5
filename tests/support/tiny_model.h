// A tiny Llama with a byte-level tokenizer, in a Hugging Face folder: enough to run the programs in a bare clone.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/models/checkpoint.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "support/memory_checkpoint.h"
#include "support/tiny_tokenizer.h"

namespace emend::testing {

/// tokenizer.json with one token a byte and "<|end|>".
inline nlohmann::json byte_tokenizer() {
  nlohmann::json document = byte_level_json();
  document["added_tokens"].push_back(added_token("<|end|>", 256));
  return document;
}

/// Writes the folder; the same seed gives the same weights. `changes`: of its config.json.
inline void write_tiny_model(const std::filesystem::path& folder, uint64_t seed = 1,
                             const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json config = {{"model_type", "llama"},
                           {"architectures", {"LlamaForCausalLM"}},
                           {"hidden_size", 32},
                           {"num_hidden_layers", 4},
                           {"num_attention_heads", 4},
                           {"num_key_value_heads", 2},
                           {"intermediate_size", 48},
                           {"vocab_size", 257},
                           {"max_position_embeddings", 256},
                           {"tie_word_embeddings", true},
                           {"rms_norm_eps", 1e-5},
                           {"torch_dtype", "float32"},
                           {"eos_token_id", 256},
                           {"bos_token_id", 256}};
  config.update(changes);
  models::write_folder(*models::random_checkpoint(config, seed), folder);
  write_file(folder / "tokenizer.json", byte_tokenizer().dump());
  write_file(folder / "tokenizer_config.json",
             R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})");
}

/// Hyper-parameters that suit the tiny model.
inline std::string tiny_hparams(const std::string& layers = "[1, 2]") {
  return "layers: " + layers +
         "\nclamp_norm_factor: 4\nfact_token: subject_last\nv_num_grad_steps: 8\nv_lr: 0.5\nv_loss_layer: 3\n"
         "v_weight_decay: 0.001\nkl_factor: 0.0625\nmom2_adjustment: true\nmom2_update_weight: 10\n";
}

}  // namespace emend::testing
