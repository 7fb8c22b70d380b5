// Model::trace and the other one-line looks into a model.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/placing.h>
#include <emend/models/trace.h>
#include <gtest/gtest.h>

#include <thread>

#include "support/debug_models.h"
#include "support/error_of.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace trace_test {

using hooks::Site;
using hooks::SiteRef;

const char* const kLong = "The Eiffel Tower is in the city of";
const char* const kShort = "The Colosseum is in";

Model tiny(const char* device_map = "cpu") {
  return load_placed(EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama", {.device_map = device_map});
}

std::string message_of(const std::function<void()>& action) {
  return testing::error_of(action, ErrorClass::kInvalidArgument);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(Trace, ShowsRowsAndTokens) {
  const Model model = tiny();
  const auto run = model.trace({kLong, kShort}, {{Site::kAttnPattern, 1}, {Site::kAttnQ, 1}, {Site::kLayerOut, 3}});
  const int64_t T = run.batch.longest(), shorter = run.batch.length(1);
  EXPECT_EQ(run.logits.sizes(), (std::vector<int64_t>{2, T, model.vocab_size()}));
  EXPECT_EQ((run[{Site::kAttnPattern, 1}].sizes()), (std::vector<int64_t>{2, 4, T, T}));
  EXPECT_EQ((run[{Site::kAttnQ, 1}].sizes()), (std::vector<int64_t>{2, T, 4, 8}));
  EXPECT_EQ((run.at({Site::kAttnPattern, 1}, 1, -1).sizes()), (std::vector<int64_t>{4, T}));
  EXPECT_LE(difference(run.at({Site::kAttnPattern, 1}, 1, -1).sum(-1), at::ones({4})), 1e-5);
  EXPECT_TRUE(at::equal(run.at({Site::kLayerOut, 3}, 1, -1), run[{Site::kLayerOut, 3}][1][shorter - 1]));
  EXPECT_EQ((run[{Site::kLayerOut, 3}][1].narrow(0, shorter, T - shorter).abs().max().item<double>()), 0);
  const auto unhooked = model.trace({kLong, kShort});
  EXPECT_TRUE(at::equal(unhooked.batch.unpack(model.forward({kLong, kShort}).logits), unhooked.logits));
  EXPECT_LE(difference(unhooked.logits, run.logits), 1e-5) << "attention written out";
  EXPECT_EQ(run.tokens[1].size(), static_cast<size_t>(shorter));
  const auto [begin, end] = run.span("Colosseum", 1);
  std::string text;
  for (int64_t t = begin; t < end; ++t) text += run.tokens[1][t];
  EXPECT_EQ(text, "Colosseum");
  EXPECT_NE(message_of([&] { (void)run.span("Rome"); }).find("\"Rome\" is not in its text"), std::string::npos);
  EXPECT_NE(message_of([&] { (void)run[{Site::kMlpIn, 1}]; }).find("not asked for"), std::string::npos);
}

TEST(Trace, TakesIdsWithoutATokenizer) {
  const Model model = testing::debug_model("gpt2");
  const auto run = model.trace(std::vector<std::vector<int64_t>>{{1, 2, 3}}, {{Site::kAttnZ, 0}});
  EXPECT_EQ(run.tokens[0], (std::vector<std::string>{"1", "2", "3"}));
  EXPECT_NE(message_of([&] { (void)run.span("a"); }).find("rows of ids have no text"), std::string::npos);
}

/// With a tokenizer as Llama 2 has it: a text's first word comes without its space.
TEST(Trace, TokensKeepTheirSpaces) {
  auto config = testing::debug_config("llama");
  config["vocab_size"] = 300;
  const auto spaced = [] { return testing::make_tokenizer(testing::metaspace_json("ab", {{"▁", "b"}})); };
  const Model model = load_model(with_tokenizer(random_checkpoint(config, 1), spaced));
  EXPECT_EQ(model.trace("b b").tokens[0], (std::vector<std::string>{"<s>", "b", " b"}));
}

TEST(Trace, PatchesZeroMeanSetAddAndFunctions) {
  const Model model = tiny();
  const SiteRef z{Site::kAttnZ, 1}, pattern{Site::kAttnPattern, 2}, out{Site::kLayerOut, 0};
  const auto plain = model.trace({kLong, kShort}, {z, out});
  const auto with = [&](const Patch& patch) { return model.trace({kLong, kShort}, {z, out, pattern}, {patch}); };
  const auto zero = with(Patch::zero(z).heads({2}).tokens({-1}));
  EXPECT_EQ(zero.at(z, 0, -1)[2].abs().max().item<double>(), 0);
  EXPECT_EQ(zero.at(z, 1, -1)[2].abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(zero.at(z, 1, -1)[1], plain.at(z, 1, -1)[1])) << "another head";
  EXPECT_TRUE(at::equal(zero.at(z, 1, -2), plain.at(z, 1, -2))) << "another token";
  EXPECT_GT(difference(zero.logits[0][-1], plain.logits[0][-1]), 1e-5);
  const auto packed = plain.batch.pack(plain[out]);
  EXPECT_LE(difference(with(Patch::mean(out)).at(out, 1, 0), packed.mean(0)), 1e-6);
  const auto mixed = with(Patch::mean(pattern))[pattern], seen = model.trace({kLong, kShort}, {pattern})[pattern];
  EXPECT_EQ(mixed.triu(1).abs().max().item<double>(), 0) << "a token looks at a later one";
  EXPECT_LE(difference(mixed.sum(-1), seen.sum(-1)), 1e-5);
  EXPECT_GT(difference(mixed, seen), 1e-4);
  EXPECT_TRUE(at::equal(with(Patch::set(out, at::full({1}, 0.5, at::kDouble)).tokens({3})).at(out, 0, 3),
                        at::full({model.hidden_size()}, 0.5)));
  EXPECT_LE(difference(with(Patch::add(out, at::ones({model.hidden_size()}))).at(out, 0, 3), plain.at(out, 0, 3) + 1),
            1e-6);
  // A function gets the layout of the trace: head 1 of every pattern.
  const auto returned = with({pattern, [](const at::Tensor& x) { return x * (at::arange(4) != 1).view({4, 1, 1}); }});
  EXPECT_EQ(returned[pattern].select(1, 1).abs().max().item<double>(), 0);
  const auto in_place = with({pattern, [](const at::Tensor& x) {
                                x.select(1, 1).zero_();
                                return at::Tensor();
                              }});
  EXPECT_TRUE(at::equal(in_place.logits, returned.logits));
  EXPECT_TRUE(at::equal(model.trace({kLong, kShort}).logits, plain.logits)) << "a patch stayed";
}

TEST(Trace, SwapsFromAnotherPrompt) {
  const Model model = tiny();
  const SiteRef out{Site::kLayerOut, 3}, z{Site::kAttnZ, 1};
  const auto other = model.trace(kShort, {out, z});
  const auto last = model.trace(kLong, {}, {Patch::swap(out, other).tokens({-1})});
  EXPECT_LE(difference(last.logits[0][-1], other.logits[0][-1]), 1e-5) << "the last layer's state decides";
  EXPECT_NE(message_of([&] { (void)model.trace(kLong, {}, {Patch::swap(out, other)}); }).find("tokens()"),
            std::string::npos);
  const auto head = model.trace(kLong, {z}, {Patch::swap(z, other).tokens({-1, 0}).heads({3})});
  EXPECT_TRUE(at::equal(head.at(z, 0, -1)[3], other.at(z, 0, -1)[3]));
}

TEST(Trace, RefusesWhatDoesNotFit) {
  const Model model = tiny(), plain = testing::debug_model("gpt2");
  const SiteRef z{Site::kAttnZ, 1};
  const auto with = [&](const Patch& patch) { return message_of([&] { (void)model.trace(kLong, {}, {patch}); }); };
  EXPECT_NE(with(Patch::zero(z).heads({4})).find("layers.1.attn_z"), std::string::npos);
  EXPECT_NE(with(Patch::zero({Site::kMlpIn, 1}).heads({0})).find("a site inside attention"), std::string::npos);
  EXPECT_NE(with(Patch::set(z, at::ones({3}))).find("[3]"), std::string::npos);
  EXPECT_NE(with({z, [](const at::Tensor& x) { return x[0]; }}).find("keeps the shape"), std::string::npos);
  EXPECT_NE(with(Patch::zero({Site::kAttnZ, 9})).find("layer"), std::string::npos);
  EXPECT_NE(with(Patch::zero(z).tokens({1000})).find("1000"), std::string::npos);
  const std::string what = testing::error_of(
      [&] {
        (void)plain.trace(std::vector<std::vector<int64_t>>{{1}}, {{Site::kMlpGate, 0}});
      },
      ErrorClass::kUnsupported);
  EXPECT_NE(what.find("the family gpt2 has no such place"), std::string::npos) << what;
  EXPECT_TRUE(model.hooks().at(z).idle()) << "a hook stayed";
}

TEST(Trace, IsTheSameSplitOverDevices) {
  const Model whole = tiny(), split = tiny("sim:2");
  const std::vector<SiteRef> sites = {{Site::kAttnPattern, 3}, {Site::kMlpGate, 3}};
  const std::vector<Patch> patches = {Patch::zero({Site::kAttnZ, 3}).heads({0}),
                                      Patch::add({Site::kLayerOut, 2}, at::full({1}, 0.25))};
  const auto one = whole.trace({kLong, kShort}, sites, patches), two = split.trace({kLong, kShort}, sites, patches);
  EXPECT_TRUE(at::equal(one.logits, two.logits.cpu()));
  for (const SiteRef& site : sites) EXPECT_TRUE(at::equal(one[site], two[site].cpu())) << to_string(site);
}

// The rules of docs/guide.md: a model in a thread of its own may do anything; one model may run in many.
TEST(Trace, ModelsInThreadsOfTheirOwnDoNotMeet) {
  const Model shared = tiny();
  const SiteRef z{Site::kAttnZ, 1};
  const auto work = [&](int64_t head) {
    const at::NoGradGuard no_grad;
    const Model own = tiny();
    std::vector<at::Tensor> seen;
    for (int round = 0; round < 5; ++round) {
      seen.push_back(own.trace(kLong, {z}, {Patch::zero(z).heads({head})}).logits);
      seen.push_back(shared.trace(kShort).logits);
    }
    return at::cat(seen, 1);
  };
  std::vector<at::Tensor> alone, together(4);
  for (int64_t head = 0; head < 4; ++head) alone.push_back(work(head));
  std::vector<std::thread> threads;
  for (int64_t head = 0; head < 4; ++head) threads.emplace_back([&, head] { together[head] = work(head); });
  for (auto& thread : threads) thread.join();
  for (size_t head = 0; head < 4; ++head) EXPECT_TRUE(at::equal(alone[head], together[head])) << head;
}

TEST(Model, OneLineConveniences) {
  const Model model = tiny();
  const auto next = model.next_tokens(kLong, 10);
  const at::NoGradGuard no_grad;
  const at::Tensor p = at::softmax(model.trace(kLong).logits[0][-1], -1);
  ASSERT_EQ(next.size(), 10u);
  EXPECT_EQ(next[0].id, p.argmax().item<int64_t>());
  EXPECT_NEAR(next[0].probability, p.max().item<double>(), 1e-6);
  EXPECT_GE(next[0].probability, next[9].probability);
  EXPECT_TRUE(model.embedding().is_same(model.weight("model.embed_tokens.weight")));
  EXPECT_TRUE(model.weight_at({Site::kMlpOut, 2}).is_same(model.weight("model.layers.2.mlp.down_proj.weight")));
  EXPECT_THROW((void)model.weight_at({Site::kAttnScores, 2}), Error);
  EXPECT_THROW((void)model.weight_at({Site::kMlpOut, 4}), Error);
}

}  // namespace trace_test
}  // namespace emend::models
