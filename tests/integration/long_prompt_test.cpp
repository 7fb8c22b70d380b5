// Prompts of tens of thousands of tokens: memory grows with the prompt's length, not with its square.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/models/detail/attention.h>
#include <emend/models/generation.h>

#include <iostream>

#include "support/debug_models.h"
#include "support/program_fixture.h"
#include "support/simulated.h"

namespace emend::testing {
namespace long_prompt_test {

constexpr double kDoubling = 2.2;  // what a doubled prompt may cost; a [T,T] matrix would cost 4

// Two layers of width 32 and room for 131,072 tokens.
nlohmann::json long_config(const std::string& family, const std::string& flavour = "") {
  nlohmann::json config = debug_config(family, flavour);
  for (const char* key : {"num_hidden_layers", "n_layer"})
    if (config.contains(key)) config[key] = 2;
  for (const char* key : {"max_position_embeddings", "model_max_length"})
    if (config.contains(key)) config[key] = 131072;
  return config;
}

models::Model long_model(const std::string& family, int devices, const std::string& flavour = "") {
  models::LoadOptions options;
  options.place = [devices](const models::ModelConfig& config, const models::Checkpoint&) {
    auto plan = devices::PlacementPlan::single(sim(0), config.n_layers);
    for (int l = 0; l < config.n_layers; ++l) plan.layers[static_cast<size_t>(l)] = sim(l * devices / config.n_layers);
    plan.final_norm = plan.layers.back();
    return plan;
  };
  return models::load_model(models::random_checkpoint(long_config(family, flavour), 3), options);
}

std::vector<int64_t> long_text(int64_t length, int64_t vocab) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < length; ++i) ids.push_back((i * 7919 + i / 13) % (vocab - 3) + 2);
  return ids;
}

// Peaks of the devices while a prompt is read and one token is chosen.
std::vector<int64_t> peaks(const models::Model& model, int devices, int64_t length) {
  for (int k = 0; k < devices; ++k) devices::reset_peak_memory(sim(k));
  EXPECT_EQ(models::generate(model, {long_text(length, model.vocab_size())}, {.max_new_tokens = 1})[0].size(), 1U);
  std::vector<int64_t> bytes;
  for (int k = 0; k < devices; ++k) bytes.push_back(devices::device_memory_stats(sim(k)).peak);
  return bytes;
}

void expect_linear(const std::string& family, int devices, const std::vector<int64_t>& lengths,
                   const std::string& flavour = "") {
  const models::Model model = long_model(family, devices, flavour);
  std::vector<int64_t> before;
  for (const int64_t length : lengths) {
    const auto now = peaks(model, devices, length);
    for (int k = 0; k < devices; ++k) {
      const auto i = static_cast<size_t>(k);
      std::cout << family << ", sim:" << k << " of " << devices << ": " << length << " tokens take at most "
                << now[i] / (1 << 20) << " MiB\n";
      if (length >= 16384) {
        EXPECT_LT(now[i], length * length) << "less than one byte an entry of a [T,T] matrix";
      }
      if (before.empty()) continue;
      EXPECT_LE(static_cast<double>(now[i]), kDoubling * static_cast<double>(before[i])) << length;
    }
    before = now;
  }
}

// 32,768 tokens are read by the program below.
TEST(LongPrompt, MemoryIsLinearOnOneDeviceAndOnTwo) {
  expect_linear("llama", 1, {8192, 16384});
  expect_linear("llama", 2, {4096, 8192});
}

// Score soft-caps with windows, and positions by ALiBi, take other ways through the attention.
TEST(LongPrompt, MemoryIsLinearInOtherKindsOfAttention) {
  expect_linear("gemma2", 2, {2048, 4096});
  expect_linear("baichuan", 2, {2048, 4096}, "alibi");
}

TEST(LongPrompt, ReadingInChunksGivesTheTokensOfReadingAtOnce) {
  const models::Model split = long_model("llama", 2);
  const models::Model whole = models::load_model(models::random_checkpoint(long_config("llama"), 3), {});
  const auto text = long_text(3000, whole.vocab_size());
  models::GenerateOptions options{.max_new_tokens = 8};
  const auto chunked = models::generate(split, {text}, options);
  options.prefill_chunk = 3000;
  EXPECT_EQ(models::generate(whole, {text}, options), chunked);
}

TEST(LongPrompt, RunsOfQueriesGiveTheAttentionOfAll) {
  at::manual_seed(5);
  const at::Tensor q = at::randn({2, 4, 7, 8}), k = at::randn({2, 2, 9, 8}), v = at::randn({2, 2, 9, 8});
  const models::detail::AttentionTables::Mask mask{
      at::full({1, 1, 7, 9}, -std::numeric_limits<float>::infinity()).triu(3), false};
  for (const double softcap : {0.0, 30.0}) {
    const at::Tensor whole = models::detail::attend(q, k, v, mask, 0.3, softcap);
    for (const int64_t scores : {1, 100, 200, 500}) {
      const at::Tensor parts = models::detail::attend(q, k, v, mask, 0.3, softcap, scores);
      EXPECT_LT((parts - whole).abs().max().item<double>(), 1e-6) << softcap << " " << scores;
    }
  }
}

// Causal text has no mask, and in float64 a GPU has no kernel that spares the scores.
TEST(LongPrompt, RunsOfCausalQueriesGiveTheAttentionOfAll) {
  at::manual_seed(6);
  const auto run = [](const at::Tensor& x, c10::Device device) {
    return devices::route_to(x, device, devices::Purpose::kOther);
  };
  const at::Tensor q = at::randn({2, 4, 9, 8}), k = at::randn({2, 2, 9, 8}), v = at::randn({2, 2, 9, 8});
  const models::detail::AttentionTables::Mask causal{{}, true};
  const at::Tensor whole = models::detail::attend(q, k, v, causal, 0.3, 0);
  const auto there = [&](int64_t scores) {
    const c10::Device device = testing::sim(7);
    return devices::to_host(
        models::detail::attend(run(q, device), run(k, device), run(v, device), causal, 0.3, 0, scores));
  };
  for (const int64_t scores : {1, 100, 300})
    EXPECT_LT((there(scores) - whole).abs().max().item<double>(), 1e-6) << scores;
  // 2048 queries: whole, the scores alone are 33 MB.
  const at::Tensor text = run(at::randn({1, 2, 2048, 8}), testing::sim(7));
  devices::reset_peak_memory(testing::sim(7));
  const int64_t before = devices::device_memory_stats(testing::sim(7)).allocated;
  (void)models::detail::attend(text, text, text, causal, 0.3, 0, 1 << 18);
  EXPECT_LT(devices::device_memory_stats(testing::sim(7)).peak - before, 12 << 20);
}

// What CUDA's kernels cannot take must not fall to the one that makes all scores from repeated keys.
TEST(LongPrompt, GroupedHeadsTakeAWayThatHoldsNoScores) {
  using models::detail::attention_way, models::detail::AttentionWay;
  const models::detail::AttentionTables::Mask none, masked{at::zeros({1}), false}, causal{{}, true};
  const auto grouped = [](at::ScalarType dtype, const auto& mask, int64_t queries) {
    return attention_way({.dtype = dtype, .repeat = 3, .queries = queries}, mask);
  };
  EXPECT_EQ(grouped(at::kBFloat16, causal, 4096), AttentionWay::kLibrary);
  EXPECT_EQ(grouped(at::kBFloat16, masked, 8), AttentionWay::kProducts);
  EXPECT_EQ(grouped(at::kBFloat16, masked, 512), AttentionWay::kRepeated);
  EXPECT_EQ(grouped(at::kFloat, none, 1), AttentionWay::kProducts);
  EXPECT_EQ(grouped(at::kFloat, causal, 32768), AttentionWay::kRepeated);
  EXPECT_EQ(attention_way({.queries = 8}, masked), AttentionWay::kLibrary);
  EXPECT_EQ(attention_way({.cuda = false, .repeat = 3, .queries = 8}, masked), AttentionWay::kLibrary);
}

// The fused kernels' gradient for a few masked queries of wide heads is slower than products.
TEST(LongPrompt, GradientsOfWideHeadsGoThroughProducts) {
  using models::detail::attention_way, models::detail::AttentionWay;
  const models::detail::AttentionTables::Mask masked{at::zeros({1}), false}, causal{{}, true};
  EXPECT_EQ(attention_way({.queries = 8, .width = 256, .gradient = true}, masked), AttentionWay::kProducts);
  EXPECT_EQ(attention_way({.queries = 8, .width = 256}, masked), AttentionWay::kLibrary);
  EXPECT_EQ(attention_way({.queries = 8, .width = 64, .gradient = true}, masked), AttentionWay::kLibrary);
  EXPECT_EQ(attention_way({.queries = 65, .width = 256, .gradient = true}, masked), AttentionWay::kLibrary);
  EXPECT_EQ(attention_way({.queries = 8, .width = 256, .gradient = true}, causal), AttentionWay::kLibrary);
}

class LongPromptProgram : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_tiny_model(folder_ / "model", 1,
                     {{"max_position_embeddings", 131072},
                      {"num_hidden_layers", 2},
                      {"num_attention_heads", 2},
                      {"num_key_value_heads", 1}});
  }
  // Peak resident size of `emend generate` on a prompt of as many tokens: a byte is a token.
  [[nodiscard]] int64_t peak(int64_t length, const std::string& map) const {
    std::string text;
    for (int64_t i = 0; static_cast<int64_t>(text.size()) < length; ++i) text += "word " + std::to_string(i * 37) + " ";
    text.resize(static_cast<size_t>(length));
    text.back() = '.';
    write_file(folder_ / "prompt.txt", text);
    // Freed blocks go back to the system at once: what is resident is what is in use, not what the heap keeps.
    ProgramOptions options;
    options.environment["MALLOC_MMAP_THRESHOLD_"] = "65536";
    const auto result = run_program("emend",
                                    {"generate", "--model", path("model"), "--prompt-file", path("prompt.txt"),
                                     "--max-new-tokens", "2", "--ignore-eos", "--device-map", map, "--json"},
                                    options);
    EXPECT_EQ(result.status, 0) << result.err;
    std::cout << map << ": " << length << " tokens, resident at most " << result.peak_bytes / (1 << 20) << " MiB\n";
    return result.peak_bytes;
  }
};

// Growth over a prompt of 16 tokens, by token. The first megabytes of a long prompt fit into what the program held
// while it started, so growths of two lengths are not compared with each other: every length has the same bound.
// Pages of the libraries count as well, and how many of them are mapped at once depends on what the system has read
// before: the same program took 128 MiB more for 32k tokens on one day and 136 MiB on another.
TEST_F(LongPromptProgram, GeneratesFrom32kTokensInLinearMemory) {
  const int64_t whole = 5120, split = 8192;  // bytes a token; one [T,T] matrix of floats has 128 KiB a token at 32k
  const int64_t base = peak(16, "cpu");
  for (const int64_t length : {8192, 32768}) EXPECT_LE((peak(length, "cpu") - base) / length, whole) << length;
  const int64_t split_base = peak(16, "sim:2");
  for (const int64_t length : {8192, 16384}) EXPECT_LE((peak(length, "sim:2") - split_base) / length, split) << length;
}

}  // namespace long_prompt_test
}  // namespace emend::testing
