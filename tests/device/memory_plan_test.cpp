// The planner's figures against the peaks that simulated devices measure: models of several kinds, splits, batch sizes
// and pieces of work. Planned and measured bytes of every device in use agree within a tenth.
#include <emend/devices/kernels.h>
#include <emend/devices/memory_model.h>
#include <emend/devices/runtime.h>
#include <emend/models/config.h>
#include <emend/models/kv_cache.h>
#include <emend/models/placing.h>
#include <gtest/gtest.h>

#include <iomanip>
#include <iostream>

#include "support/placements.h"

namespace emend {
namespace memory_plan_test {

using devices::Purpose;
using testing::sim;

struct Kind {
  const char* name;
  const char* config;
};

const std::vector<Kind> kKinds = {
    {"llama", R"({"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "intermediate_size": 384, "vocab_size": 1000,
                  "max_position_embeddings": 512})"},
    {"qwen2, tied", R"({"model_type": "qwen2", "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
                        "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1500,
                        "max_position_embeddings": 512, "tie_word_embeddings": true})"},
    {"gpt2", R"({"model_type": "gpt2", "n_embd": 128, "n_layer": 6, "n_head": 8, "n_positions": 512,
                 "vocab_size": 1000})"},
    {"gpt_neox", R"({"model_type": "gpt_neox", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
                     "intermediate_size": 512, "vocab_size": 800, "max_position_embeddings": 512})"},
    {"gemma", R"({"model_type": "gemma", "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
                  "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1200,
                  "max_position_embeddings": 512})"},
    {"qwen3, wide heads",
     R"({"model_type": "qwen3", "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
                              "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 288, "vocab_size": 1000,
                              "max_position_embeddings": 512})"},
};

struct Batch {
  int64_t rows, tokens;
};

models::TokenBatch batch_of(const Batch& batch) {
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(batch.rows));
  for (size_t r = 0; r < rows.size(); ++r)
    for (int64_t t = 0; t < batch.tokens; ++t) rows[r].push_back((static_cast<int64_t>(r) * 37 + t * 11 + 5) % 700);
  return models::TokenBatch::from_rows(rows);
}

std::vector<testing::NamedPlan> splits(const models::ModelConfig& config) {
  const testing::PlacedShape shape{config.n_layers, config.tied_head, config.positions == models::Positions::kLearned};
  auto half = devices::PlacementPlan::single(sim(0), config.n_layers);
  for (int64_t l = config.n_layers / 2; l < config.n_layers; ++l) half.layers[static_cast<size_t>(l)] = sim(1);
  half.final_norm = half.head = sim(1);
  auto thirds = half;
  for (int64_t l = 0; l < config.n_layers; ++l)
    thirds.layers[static_cast<size_t>(l)] = sim(static_cast<int>(3 * l / config.n_layers));
  thirds.final_norm = thirds.head = sim(3);
  return {testing::finish_plan("one", devices::PlacementPlan::single(sim(0), config.n_layers), shape),
          testing::finish_plan("halves", half, shape), testing::finish_plan("thirds, head apart", thirds, shape)};
}

enum class Work { kScore, kNextToken, kGradients };
const char* name_of(Work work) {
  return work == Work::kScore ? "score" : work == Work::kNextToken ? "next token" : "gradients";
}

devices::WorkShape shape_of(Work work, const Batch& batch, int64_t n_layers) {
  devices::WorkShape shape;
  shape.rows = batch.rows;
  shape.tokens = batch.tokens;
  if (work == Work::kNextToken) {
    shape.scored_tokens = 1;
    shape.cached_tokens = batch.rows * batch.tokens;
  }
  if (work == Work::kGradients) {
    shape.gradients = true;
    shape.first_gradient_layer = n_layers / 3;
    shape.scored_tokens = 4;
  }
  return shape;
}

/// Does the work once.
void run(const models::Model& model, Work work, const Batch& batch) {
  const auto tokens = batch_of(batch);
  if (work == Work::kGradients) {
    const int first = static_cast<int>(model.n_layers() / 3);
    models::ForwardOptions below, above;
    {
      const at::NoGradGuard no_grad;
      below.end_layer = first;
      above.hidden = model.forward(tokens, below).hidden;
    }
    at::Tensor delta = at::zeros_like(above.hidden[0]).requires_grad_(true);
    const at::Tensor entering = std::exchange(above.hidden, {});
    above.first_layer = first;
    above.hidden = entering + delta;
    above.logit_tokens.emplace();
    for (int64_t r = 0; r < batch.rows; ++r)
      for (int64_t k = 1; k <= 4; ++k) above.logit_tokens->push_back(tokens.token(r, -k));
    const at::Tensor log_p = at::log_softmax(model.forward(tokens, above).logits, -1);
    (void)torch::autograd::grad({-log_p.select(1, 5).sum()}, {delta});
    return;
  }
  const at::NoGradGuard no_grad;
  models::KvCache cache(model.n_layers(), batch.tokens);
  models::ForwardOptions options;
  if (work == Work::kNextToken) {
    options.cache = &cache;
    options.logit_tokens = tokens.last_tokens();
  }
  (void)at::log_softmax(model.forward(tokens, options).logits, -1);
}

// The plan is of LibTorch's operators, which a GPU works with. Kernels of our own, which a CPU has, need less.
class MemoryPlan : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kernels, MemoryPlan, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Own" : "LibTorchs"; });

TEST_P(MemoryPlan, IsWithinATenthOfThePeak) {
  const bool own = GetParam();
  const devices::PlainOperators plain(!own);
  const double most = own ? 1.25 : 1.1;
  double lowest = 1e9, highest = 0;
  int cases = 0;
  for (const auto& kind : kKinds) {
    const auto json = nlohmann::json::parse(kind.config);
    const auto config = models::parse_config(json, kind.name);
    for (const auto& placed : splits(config)) {
      const models::Model model = testing::placed_model(json, &placed.plan);
      for (const Work work : {Work::kScore, Work::kNextToken, Work::kGradients})
        for (const Batch batch : {Batch{1, 24}, Batch{4, 32}, Batch{16, 24}, Batch{12, 64}, Batch{2, 256}}) {
          const auto planned =
              devices::MemoryModel(models::model_shape(config, at::kFloat), shape_of(work, batch, config.n_layers))
                  .account(placed.plan);
          for (const auto& [device, figures] : planned) devices::reset_peak_memory(device);
          run(model, work, batch);
          for (const auto& [device, figures] : planned) {
            const auto measured = static_cast<double>(devices::device_memory_stats(device).peak);
            const double ratio = static_cast<double>(figures.total()) / measured;
            lowest = std::min(lowest, ratio);
            highest = std::max(highest, ratio);
            ++cases;
            const auto text = std::string(kind.name) + ", " + placed.name + ", " + name_of(work) + ", " +
                              std::to_string(batch.rows) + " x " + std::to_string(batch.tokens) + ", " +
                              devices::to_string(device);
            EXPECT_GT(ratio, 0.9) << text;
            EXPECT_LT(ratio, most) << text;
            if (ratio < 0.9 || ratio > most || std::getenv("EMEND_SHOW_PLANS"))
              std::cout << std::fixed << std::setprecision(3) << ratio << "  " << text << ": planned "
                        << figures.total() << " (weights " << figures.weights << "), measured "
                        << static_cast<int64_t>(measured) << "\n";
          }
        }
    }
  }
  std::cout << cases << " peaks; planned / measured from " << lowest << " to " << highest << "\n";
}

}  // namespace memory_plan_test
}  // namespace emend
