// The executor's edges: errors, pieces of a pass, gradients, dtypes, devices' bookkeeping.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/debug_models.h"
#include "support/error_of.h"

namespace emend::models {
namespace model_forward_test {

using hooks::HookSession;
using hooks::Site;

std::string message_of(const std::function<void()>& action) {
  return testing::error_of(action, ErrorClass::kInvalidArgument);
}

TEST(Forward, NamesRowTokenAndIdOfAnIdOutsideTheVocabulary) {
  const Model model = testing::debug_model("llama");
  const std::string text = message_of([&] { (void)model.forward(TokenBatch::from_rows({{1, 2}, {3, 4, 101}})); });
  for (const char* part : {"row 1", "token 2", "id 101", "0 to 100"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_NE(message_of([&] { (void)model.forward(TokenBatch::from_rows({{-1}})); }).find("id -1"), std::string::npos);
  EXPECT_NE(message_of([&] { (void)model.forward(TokenBatch()); }).find("empty"), std::string::npos);
}

TEST(Forward, RefusesPositionsPastALearnedTable) {
  for (const char* family : {"gpt2", "opt"}) {
    const Model model = testing::debug_model(family);
    const std::vector<int64_t> fits(64, 1), too_long(65, 1);
    EXPECT_TRUE(model.forward(TokenBatch::from_rows({fits})).logits.defined());
    EXPECT_NE(message_of([&] { (void)model.forward(TokenBatch::from_rows({too_long})); }).find("position 64"),
              std::string::npos);
    EXPECT_NE(message_of([&] { (void)model.forward(TokenBatch::continuing({{1}}, {64})); }).find("position 64"),
              std::string::npos);
  }
}

TEST(Forward, ChecksOptions) {
  const Model model = testing::debug_model("llama");
  const auto batch = TokenBatch::from_rows({{1, 2, 3}});
  const auto with = [&](const std::function<void(ForwardOptions&)>& set) {
    ForwardOptions options;
    set(options);
    return message_of([&] { (void)model.forward(batch, options); });
  };
  EXPECT_NE(with([](auto& o) { o.first_layer = 1; }).find("without hidden"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.end_layer = 4; }).find("range"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.first_layer = 2, o.end_layer = 1; }).find("range"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.hidden = at::zeros({2, 32}); }).find("[3, 32]"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.logit_tokens = std::vector<int64_t>{3}; }).find("token 3"), std::string::npos);
}

TEST(Forward, ProjectsOnlyWhatIsAskedFor) {
  const Model model = testing::debug_model("llama");
  const auto batch = TokenBatch::from_rows({{1, 2, 3}, {4, 5}});
  const at::NoGradGuard no_grad;
  const auto all = model.forward(batch);
  EXPECT_EQ(all.logits.sizes(), (std::vector<int64_t>{5, 101}));
  ForwardOptions options;
  options.logit_tokens.emplace();
  const auto none = model.forward(batch, options);
  EXPECT_FALSE(none.logits.defined());
  EXPECT_TRUE(at::equal(none.hidden, all.hidden));
  EXPECT_TRUE(at::allclose(model.project(all.hidden), all.logits, 0, 1e-6));
}

TEST(Forward, StoppingRunsNothingFurther) {
  const Model model = testing::debug_model("gpt2");
  int later = 0;
  HookSession session(model.hooks());
  session.capture({Site::kMlpDownIn, 1}).stop_after({Site::kMlpDownIn, 1}).attach();
  const auto count = model.hooks().at({Site::kMlpDownOut, 1}).add([&](const at::Tensor&) {
    ++later;
    return at::Tensor();
  });
  const auto result = model.forward(TokenBatch::from_rows({{1, 2, 3}}));
  EXPECT_TRUE(result.stopped);
  EXPECT_FALSE(result.hidden.defined());
  EXPECT_EQ(later, 0);
  session.finish();
}

TEST(Forward, AStoppedPassLeavesTheCacheOfUpperLayersIncomplete) {
  const Model model = testing::debug_model("llama");
  KvCache cache(model.n_layers());
  const at::NoGradGuard no_grad;
  {
    HookSession session(model.hooks());
    session.stop_after({Site::kLayerOut, 1}).attach();
    (void)model.forward(TokenBatch::from_rows({{1, 2}}), {.cache = &cache});
    session.finish();
  }
  EXPECT_TRUE(cache.complete(0));
  EXPECT_FALSE(cache.complete(2));
}

TEST(Forward, RawHeadLeavesOutCapsAndNormalisation) {
  const at::NoGradGuard no_grad;
  const at::Tensor hidden = at::randn({3, 32}) * 5;
  const Model capped = testing::debug_model("gemma2");
  const at::Tensor raw = capped.project(hidden, true), cap = capped.project(hidden);
  EXPECT_LE(cap.abs().max().item<double>(), 8.0);
  EXPECT_TRUE(at::allclose(8 * at::tanh(raw / 8), cap, 0, 1e-5));
  const Model normalised = testing::debug_model("baichuan", 1, "version2");
  const at::Tensor rows = normalised.weight("lm_head.weight");
  const at::Tensor small = at::randn({3, 24});
  EXPECT_TRUE(at::allclose(normalised.project(small, true) / rows.norm(2, 1), normalised.project(small), 0, 1e-5));
}

TEST(Forward, GradientsAgreeWithFiniteDifferences) {
  const LoadOptions twice{.dtype = at::kDouble};
  for (const char* family : {"llama", "gpt2", "gpt_neox", "gemma2", "falcon", "chatglm"}) {
    const Model model = testing::debug_model(family, 5, "", twice);
    const auto batch = TokenBatch::from_rows({{1, 2, 3, 4}, {5, 6}});
    const at::Tensor base = model.forward(batch, {.end_layer = 1}).hidden.detach();
    const auto loss_at = [&](const at::Tensor& hidden) {
      const at::Tensor logits = model.forward(batch, {.first_layer = 1, .hidden = hidden}).logits;
      return -at::log_softmax(logits, -1).select(1, 7).sum();
    };
    const at::Tensor hidden = base.clone().requires_grad_(true);
    const at::Tensor gradient = torch::autograd::grad({loss_at(hidden)}, {hidden})[0];
    const at::NoGradGuard no_grad;
    for (const int64_t i : {0, 17, 40, 100, 150}) {
      const double step = 1e-5;
      at::Tensor up = base.clone(), down = base.clone();
      up.view(-1)[i] += step;
      down.view(-1)[i] -= step;
      const double slope = (loss_at(up) - loss_at(down)).item<double>() / (2 * step);
      EXPECT_NEAR(gradient.view(-1)[i].item<double>(), slope, 1e-6 + 1e-5 * std::abs(slope)) << family << " " << i;
    }
  }
}

TEST(Forward, BFloat16FollowsFloat32) {
  const LoadOptions half{.dtype = at::kBFloat16};
  for (const auto& flavour : testing::all_flavours()) {
    const Model narrow = testing::debug_model(flavour.family, 3, flavour.flavour, half);
    const Model wide = testing::debug_model(flavour.family, 3, flavour.flavour);
    const auto batch = TokenBatch::from_rows({{1, 2, 3, 4, 5, 6}, {7, 8, 9}});
    const at::NoGradGuard no_grad;
    const at::Tensor a = narrow.forward(batch).logits, b = wide.forward(batch).logits;
    EXPECT_EQ(a.scalar_type(), at::kBFloat16);
    // bfloat16 has 8 bits: a few layers of sums of 30 to 60 terms keep about two digits.
    const double relative = ((a.to(at::kFloat) - b).norm() / b.norm()).item<double>();
    EXPECT_LT(relative, 0.06) << flavour.family << " " << flavour.flavour;
  }
}

TEST(Forward, OneDeviceMeansNoTransfer) {
  const Model model = testing::debug_model("gpt2");
  const at::NoGradGuard no_grad;
  const devices::TransferScope transfers;
  (void)model.forward(TokenBatch::from_rows({{1, 2, 3}, {4}}));
  EXPECT_EQ(transfers.total().count, 0);
}

TEST(Model, TwoModelsDoNotMeet) {
  const auto checkpoint = random_checkpoint(testing::debug_config("llama"), 1);
  Model first = load_model(checkpoint);
  const Model second = load_model(checkpoint);
  const auto batch = TokenBatch::from_rows({{1, 2, 3}});
  const at::NoGradGuard no_grad;
  const at::Tensor before = second.forward(batch).logits;
  const std::string name = first.edit_site(1).weight_name;
  first.set_weight(name, at::zeros_like(first.weight(name)));
  HookSession session(first.hooks());
  session.edit({Site::kLayerOut, 0}, [](const at::Tensor& x) { return x * 0; }).attach();
  EXPECT_TRUE(at::equal(second.forward(batch).logits, before));
  EXPECT_EQ(first.fingerprint(), second.fingerprint());
  EXPECT_NE(first.current_fingerprint(), second.current_fingerprint());
}

TEST(Model, SetWeightChecksAndCasts) {
  Model model = testing::debug_model("llama");
  const std::string name = model.edit_site(0).weight_name;
  const at::Tensor held = model.weight(name);
  model.set_weight(name, at::ones_like(held, at::kDouble));
  EXPECT_TRUE(at::equal(held, at::ones_like(held)));  // shares storage
  EXPECT_THROW(model.set_weight(name, at::ones({2, 2})), Error);
  EXPECT_THROW(model.set_weight(name, at::ones_like(held, at::kLong)), Error);
  EXPECT_THROW(model.set_weight("model.layers.0.mlp.down_prj.weight", held), Error);
  EXPECT_THROW((void)model.edit_site(3), Error);
  EXPECT_THROW((void)model.tokenizer(), Error);
}

TEST(Model, ATiedHeadIsTheEmbeddingUnderAllItsNames) {
  const Model model = testing::debug_model("gpt2");
  EXPECT_EQ(model.weight("lm_head.weight").data_ptr(), model.weight("transformer.wte.weight").data_ptr());
  EXPECT_EQ(model.weight_copies("lm_head.weight").size(), 1u);
}

}  // namespace model_forward_test
}  // namespace emend::models
