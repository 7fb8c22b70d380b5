// Tiny models with a byte-level tokenizer, facts and statistics, for tests of editors. Nothing is written to disk but
// the tokenizer.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/core/atomic_file.h>
#include <emend/datasets/fact.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/statistics.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "support/debug_models.h"
#include "support/memory_checkpoint.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend::testing {

/// Tiny tensors gain nothing from threads, and on a busy machine waiting for them takes most of the time.
inline const bool kSingleThread = (at::set_num_threads(1), true);

/// A checkpoint with the byte-level tokenizer; with `bos`, every text begins with "<|end|>".
inline std::shared_ptr<const models::Checkpoint> byte_checkpoint(std::shared_ptr<const models::Checkpoint> inner,
                                                                 bool bos = false) {
  const auto make = [bos] {
    const TemporaryFolder folder(bos ? "tokenizer-bos" : "tokenizer");
    nlohmann::json tokenizer = byte_tokenizer();
    if (bos) {
      tokenizer["post_processor"] = {
          {"type", "TemplateProcessing"},
          {"single",
           {{{"SpecialToken", {{"id", "<|end|>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
          {"pair", nlohmann::json::array()},
          {"special_tokens", {{"<|end|>", {{"id", "<|end|>"}, {"ids", {256}}, {"tokens", {"<|end|>"}}}}}}};
    }
    write_file(folder.path() / "tokenizer.json", tokenizer.dump());
    write_file(folder.path() / "tokenizer_config.json",
               R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"})");
    return models::load_tokenizer(folder.path());
  };
  return models::with_tokenizer(std::move(inner), make);
}

struct TinyOptions {
  std::string family = "llama";  ///< "llama" or "gpt2"
  uint64_t seed = 1;
  at::ScalarType dtype = at::kFloat;
  bool bos = false;
  std::function<devices::PlacementPlan(const models::ModelConfig&, const models::Checkpoint&)> place = {};
};

/// Four layers, hidden 32, keys 48 wide, 257 tokens.
inline models::Model tiny_model(const TinyOptions& options = {}) {
  nlohmann::json config = {{"model_type", "llama"},       {"hidden_size", 32},
                           {"num_hidden_layers", 4},      {"num_attention_heads", 4},
                           {"num_key_value_heads", 2},    {"intermediate_size", 48},
                           {"vocab_size", 257},           {"max_position_embeddings", 256},
                           {"tie_word_embeddings", true}, {"rms_norm_eps", 1e-5},
                           {"eos_token_id", 256},         {"bos_token_id", 256}};
  if (options.family == "gpt2")
    config = {{"model_type", "gpt2"}, {"n_embd", 32},       {"n_layer", 4},       {"n_head", 4},
              {"n_inner", 48},        {"vocab_size", 257},  {"n_positions", 256}, {"n_ctx", 256},
              {"eos_token_id", 256},  {"bos_token_id", 256}};
  return models::load_model(byte_checkpoint(models::random_checkpoint(config, options.seed), options.bos),
                            {.dtype = options.dtype, .place = options.place});
}

/// A debug flavour of a family with the byte-level tokenizer's 257 tokens.
inline models::Model flavour_model(
    const FamilyFlavour& flavour, uint64_t seed,
    const std::function<devices::PlacementPlan(const models::ModelConfig&, const models::Checkpoint&)>& place = {}) {
  nlohmann::json config = debug_config(flavour.family, flavour.flavour);
  for (const auto& key : models::family_named(flavour.family).keys.vocab)
    if (config.contains(key)) config[key] = 257;
  config["eos_token_id"] = 256;
  return models::load_model(byte_checkpoint(models::random_checkpoint(config, seed)), {.place = place});
}

inline datasets::Fact make_fact(int64_t case_id, const std::string& prompt, const std::string& subject,
                                const std::string& target) {
  datasets::Fact fact;
  fact.case_id = case_id;
  fact.prompt = prompt;
  fact.subject = subject;
  fact.target_new = target;
  return fact;
}

/// Four facts of different lengths: subject first, in the middle, followed directly by a comma, and a repeated subject.
inline std::vector<datasets::Fact> tiny_facts() {
  return {make_fact(3, "{} is in", "Oslo", "Rome"), make_fact(7, "The home of {} is", "Ada", "Po"),
          make_fact(8, "In {}, one speaks", "Ur", "Latin"), make_fact(9, "{} was built in", "Oslo", "Ulm")};
}

inline editors::ContextTemplates tiny_contexts() {
  return {{{"{}"}, {"So it is. {}", "We go. {}"}}, false, 0};
}

/// A well-conditioned symmetric matrix.
inline at::Tensor random_spd(int64_t n, uint64_t seed, double smallest = 0.1) {
  const at::Tensor x =
      at::randn({n, 2 * n}, at::make_generator<at::CPUGeneratorImpl>(seed), at::TensorOptions().dtype(at::kDouble));
  at::Tensor spd = x.mm(x.t()) / static_cast<double>(2 * n);
  spd.diagonal().add_(smallest);
  return spd;
}

inline at::Tensor random_matrix(int64_t rows, int64_t columns, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return at::randn({rows, columns}, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::TensorOptions().dtype(at::kDouble))
      .to(dtype);
}

/// Moments for all layers of a tiny model.
inline editors::FixedStatistics tiny_statistics(const models::Model& model) {
  std::map<int, editors::SecondMoment> moments;
  for (int layer = 0; layer < model.n_layers(); ++layer)
    moments.emplace(
        layer, editors::SecondMoment(random_spd(model.edit_site(layer).in_features, 100 + static_cast<uint64_t>(layer)),
                                     1000));
  return editors::FixedStatistics(std::move(moments));
}

/// A tiny model with what its edits are given.
struct TinyEdit {
  explicit TinyEdit(const TinyOptions& options = {}) : model(tiny_model(options)), statistics(tiny_statistics(model)) {
    context.contexts = tiny_contexts();
    context.statistics = &statistics;
  }
  TinyEdit(const TinyEdit&) = delete;
  TinyEdit& operator=(const TinyEdit&) = delete;

  models::Model model;
  editors::FixedStatistics statistics;
  editors::EditContext context;
};

/// An editor with hyper-parameters as a file has them.
inline std::unique_ptr<editors::Editor> tiny_editor(const std::string& name, const std::string& yaml,
                                                    const models::Model& model) {
  return editors::make_editor(name, hparams::parse_hparams(yaml, "test.yaml"), model);
}

/// All bytes of all weights.
inline std::map<std::string, at::Tensor> all_weights(const models::Model& model) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& name : model.weight_names()) weights.emplace(name, model.weight(name).detach().clone());
  return weights;
}

/// Names of the weights that differ in any byte.
inline std::vector<std::string> changed_weights(const models::Model& model,
                                                const std::map<std::string, at::Tensor>& before) {
  std::vector<std::string> names;
  for (const auto& [name, weight] : before)
    if (!at::equal(model.weight(name).detach(), weight)) names.push_back(name);
  return names;
}

inline double relative_difference(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor want = expected.to(at::kDouble);
  const double norm = want.norm().item<double>();
  const double difference = (got.to(at::kDouble) - want).norm().item<double>();
  return norm > 0 ? difference / norm : difference;
}

}  // namespace emend::testing
