// Directions of behaviour in every family: steering adds what it says, ablation leaves nothing of the direction, baking
// does what steering does, on one device and on three; every byte comes back.
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/workflow/direct/change.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/family_suite.h"
#include "support/spread_plan.h"

namespace emend {
namespace family_directions_test {

using testing::FamilyFlavour;
using workflow::Directions;

models::Model model_of(const FamilyFlavour& flavour, bool split = false) {
  return testing::flavour_model(flavour, 5, split ? testing::spread_plan : nullptr);
}

Directions random_directions(const models::Model& model, uint64_t seed) {
  at::manual_seed(seed);
  Directions directions;
  directions.method = "mean";
  for (int l = 0; l < model.n_layers(); ++l) directions.layers.push_back(0.1 * at::randn({model.hidden_size()}));
  return directions;
}

models::TokenBatch batch() {
  return models::TokenBatch::from_rows({{72, 101, 108, 108, 111}, {65, 100, 97}, {7, 8, 9, 10}});
}

at::Tensor logits(const models::Model& model) {
  const at::NoGradGuard no_grad;
  return devices::to_host(model.forward(batch()).logits.detach());
}

// Weights that write into the stream, [D, F], by name; biases as [D, 1].
std::map<std::string, std::pair<int, at::Tensor>> writers(const models::Model& model) {
  std::map<std::string, std::pair<int, at::Tensor>> all;
  for (const auto& tensor : models::expected_tensors(model.family(), model.config())) {
    using models::Part;
    if (tensor.part != Part::kAttnOut && tensor.part != Part::kDown && tensor.part != Part::kExpertDown) continue;
    at::Tensor w = devices::to_host(model.weight(tensor.name).detach()).to(at::kDouble);
    if (!tensor.bias && model.family().orientation == models::Orientation::kInOut) w = w.t();
    all[tensor.name] = {tensor.layer, tensor.bias ? w.unsqueeze(1) : w};
  }
  return all;
}

double share_left(const at::Tensor& d, const at::Tensor& w) {
  const at::Tensor unit = d.to(at::kDouble) / d.to(at::kDouble).norm();
  return w.t().mv(unit).norm().item<double>() / w.norm().item<double>();
}

// What the layers add to the stream, along d, relative to all that they add.
double written_along(const models::Model& model, const Directions& directions) {
  const at::NoGradGuard no_grad;
  hooks::HookSession session(model.hooks());
  for (int l = 0; l < model.n_layers(); ++l)
    session.capture({hooks::Site::kLayerIn, l}).capture({hooks::Site::kLayerOut, l});
  session.attach();
  (void)model.forward(batch());
  double most = 0;
  for (int l = 0; l < model.n_layers(); ++l) {
    const at::Tensor added = devices::to_host(session.captured({hooks::Site::kLayerOut, l})) -
                             devices::to_host(session.captured({hooks::Site::kLayerIn, l}));
    most = std::max(most, share_left(directions.layers[static_cast<size_t>(l)], added.to(at::kDouble).t()));
  }
  session.finish();
  return most;
}

class FamilyDirections : public ::testing::TestWithParam<FamilyFlavour> {};

TEST_P(FamilyDirections, SteeringAddsTheVectorBehindTheBlock) {
  const at::NoGradGuard no_grad;
  const models::Model model = model_of(GetParam()), split = model_of(GetParam(), true);
  const auto directions = random_directions(model, 1);
  const int last = model.n_layers() - 1;
  const auto out = [&] { return model.forward(batch()).hidden; };
  const at::Tensor before = out(), plain = logits(model);
  {
    const auto steering =
        models::attach_steering(model, directions.control_vector(), {.strength = 2, .layers = {last, last}});
    EXPECT_LE((out() - before - 2 * directions.layers.back()).abs().max().item<double>(), 1e-5);
  }
  EXPECT_TRUE(at::equal(logits(model), plain)) << "steering outlived its scope";
  for (const char* by : {"add", "clamp"}) {
    const auto one = models::attach_steering(model, directions.control_vector(), {.by = by});
    const auto three = models::attach_steering(split, directions.control_vector(), {.by = by});
    EXPECT_GT((logits(model) - plain).abs().max().item<double>(), 1e-4) << by;
    EXPECT_LE((logits(model) - logits(split)).abs().max().item<double>(), 1e-4) << by;
  }
}

TEST_P(FamilyDirections, AblationLeavesNothingOfThem) {
  models::Model model = model_of(GetParam()), split = model_of(GetParam(), true);
  const std::vector<Directions> both = {random_directions(model, 1), random_directions(model, 2)};
  const auto before = testing::all_weights(model);
  const auto change = workflow::ablate_directions(model, both, {}),
             other = workflow::ablate_directions(split, both, {});
  EXPECT_TRUE(testing::changed_weights(model, before).empty()) << "the model is not to be changed";
  for (const auto& figures : change.figures) EXPECT_LE(figures.left, 1e-6) << figures.weight;
  {
    const auto edit = editors::apply_pack(model, change.pack), edit_split = editors::apply_pack(split, other.pack);
    const auto changed = testing::changed_weights(model, before);
    const auto all = writers(model), all_split = writers(split);
    EXPECT_EQ(changed.size(), all.size()) << "a matrix that writes into the stream is left out, or more than these";
    for (const auto& [name, one] : all) {
      for (const auto& directions : both)
        EXPECT_LE(share_left(directions.layers[static_cast<size_t>(one.first)], one.second), 1e-6) << name;
      EXPECT_LE((one.second - all_split.at(name).second).norm().item<double>(), 1e-6 * one.second.norm().item<double>())
          << name;
    }
    if (model.config().norm_order != models::NormOrder::kPost) {  // there a norm of the whole stream follows
      EXPECT_LE(written_along(model, both[0]), 1e-5);
    }
  }
  EXPECT_TRUE(testing::changed_weights(model, before).empty()) << "undo";
}

TEST_P(FamilyDirections, ColumnsKeepTheirLengthsIfAskedTo) {
  models::Model model = model_of(GetParam());
  const auto directions = random_directions(model, 1);
  const auto before = writers(model);
  const auto change = workflow::ablate_directions(model, {&directions, 1}, {.preserve_norm = true});
  const auto edit = editors::apply_pack(model, change.pack);
  for (const auto& [name, one] : writers(model)) {
    EXPECT_LE(share_left(directions.layers[static_cast<size_t>(one.first)], one.second), 1e-6) << name;
    if (one.second.size(1) == 1) continue;  // a bias
    const at::Tensor lengths = before.at(name).second.norm(2, 0);
    EXPECT_LE((one.second.norm(2, 0) - lengths).abs().max().item<double>(), 1e-5 * lengths.max().item<double>())
        << name;
  }
}

std::vector<std::vector<int64_t>> random_texts() {
  at::manual_seed(3);
  std::vector<std::vector<int64_t>> texts;
  for (int r = 0; r < 12; ++r) {
    const at::Tensor ids = at::randint(0, 256, {8}, at::kLong);
    texts.emplace_back(ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + 8);
  }
  return texts;
}

// Mean and spread of the change that a delta makes of its matrix's output, along d and in units of ‖d‖, over the keys
// of the steered model.
std::pair<double, double> gain_of(const models::Model& model, const editors::WeightDelta& delta, const at::Tensor& d,
                                  const std::vector<std::vector<int64_t>>& texts) {
  hooks::HookSession session(model.hooks());
  session.capture({hooks::Site::kMlpDownIn, delta.layer}).attach();
  (void)model.forward(models::TokenBatch::from_rows(texts));
  const at::Tensor keys = session.captured({hooks::Site::kMlpDownIn, delta.layer}).to(at::kDouble);
  const at::Tensor gain = keys.mm(delta.matrix().t()).mv(d) / d.dot(d);
  return {gain.mean().item<double>(), gain.std(/*unbiased=*/false).item<double>()};
}

TEST_P(FamilyDirections, BakingDoesWhatSteeringDoes) {
  const at::NoGradGuard no_grad;
  models::Model model = model_of(GetParam()), split = model_of(GetParam(), true);
  const auto directions = random_directions(model, 1);
  workflow::DirectChangeOptions options;
  options.strength = 0.5;
  options.texts = random_texts();
  if (!model.config().no_edit_site.empty()) {
    EXPECT_THROW((void)workflow::bake_directions(model, {&directions, 1}, options), Error);
    return;
  }
  const at::Tensor plain = logits(model);
  const auto change = workflow::bake_directions(model, {&directions, 1}, options);
  EXPECT_TRUE(at::equal(logits(model), plain));
  const auto other = workflow::bake_directions(split, {&directions, 1}, options);
  ASSERT_EQ(change.pack.deltas.size(), static_cast<size_t>(model.n_layers()));
  for (size_t i = 0; i < change.pack.deltas.size(); ++i) {
    const at::Tensor mine = change.pack.deltas[i].matrix(), theirs = devices::to_host(other.pack.deltas[i].matrix());
    EXPECT_LE((mine - theirs).norm().item<double>(), 1e-3 * mine.norm().item<double>()) << change.figures[i].weight;
  }
  at::Tensor steered;
  {
    const auto steering = models::attach_steering(model, directions.control_vector(), {.strength = options.strength});
    steered = logits(model);
    for (size_t i = 0; i < change.pack.deltas.size() && !model.config().mlp_post_norm(); ++i) {
      const auto& delta = change.pack.deltas[i];
      if (!delta.low_rank()) continue;
      const at::Tensor wanted = options.strength * directions.layers[i].to(at::kDouble);
      const auto [mean, spread] = gain_of(model, delta, wanted, options.texts);
      EXPECT_NEAR(mean, 1, 1e-4) << delta.weight;
      EXPECT_NEAR(spread, change.figures[i].left, 1e-3) << delta.weight;
      EXPECT_LT(spread, 1) << delta.weight << ": no constant at all";
    }
  }
  const auto edit = editors::apply_pack(model, change.pack);
  if (change.figures[0].weight.ends_with(".bias")) {
    EXPECT_LE((logits(model) - steered).abs().max().item<double>(), 1e-4) << "a bias is exact";
  } else {
    EXPECT_GT(((logits(model) - plain).flatten().dot((steered - plain).flatten())).item<double>(), 0);
  }
}

TEST_P(FamilyDirections, ATrialComputesWhatTheScaledChangeDoes) {
  models::Model model = model_of(GetParam());
  const auto directions = random_directions(model, 1);
  const auto before = testing::all_weights(model);
  const at::Tensor plain = logits(model);
  const auto change = workflow::ablate_directions(model, {&directions, 1}, {});
  const auto half = [](const workflow::DirectFigures& weight) { return weight.layer == 0 ? 0 : 0.5; };
  at::Tensor tried;
  {
    const workflow::TrialChange trial(model, scaled(change, half));
    tried = logits(model);
  }
  EXPECT_TRUE(testing::changed_weights(model, before).empty());
  EXPECT_TRUE(at::equal(logits(model), plain));
  const auto edit = editors::apply_pack(model, workflow::scaled(change, half).pack);
  EXPECT_GT((tried - plain).abs().max().item<double>(), 1e-4);
  EXPECT_LE((logits(model) - tried).abs().max().item<double>(), 1e-4);
}

// Least squares on keys: the direction goes from what the matrix writes for some texts and stays for others.
TEST_P(FamilyDirections, SparedTextsStayAsTheyAre) {
  const at::NoGradGuard no_grad;
  models::Model model = model_of(GetParam());
  const auto directions = random_directions(model, 1);
  workflow::DirectChangeOptions options;
  options.texts = {{72, 101, 108}, {65, 100}};
  options.spared = random_texts();
  options.layers = {0, 0};
  if (!model.config().no_edit_site.empty()) {
    EXPECT_THROW((void)workflow::ablate_directions(model, {&directions, 1}, options), Error);
    return;
  }
  for (const bool bakes : {false, true}) {
    const auto change = bakes ? workflow::bake_directions(model, {&directions, 1}, options)
                              : workflow::ablate_directions(model, {&directions, 1}, options);
    for (const auto& delta : change.pack.deltas) {
      if (delta.weight.find(".bias") != std::string::npos) ADD_FAILURE() << delta.weight << " acts on every text";
      const auto moved = [&](const std::vector<std::vector<int64_t>>& texts) {
        hooks::HookSession session(model.hooks());
        const bool attention =
            delta.weight == change.figures[0].weight && change.figures[0].part == models::Part::kAttnOut;
        const hooks::SiteRef keys{attention ? hooks::Site::kAttnZ : hooks::Site::kMlpDownIn, 0};
        session.capture(keys).attach();
        (void)model.forward(models::TokenBatch::from_rows(texts));
        return session.captured(keys)
            .flatten(1)
            .to(at::kDouble)
            .mm(delta.matrix().t())
            .norm(2, 1)
            .mean()
            .item<double>();
      };
      EXPECT_LT(moved(options.spared), 0.6 * moved(options.texts)) << delta.weight;
    }
  }
}

// Of `texts` only the last tokens get the direction, once each on average; other texts hardly any of it.
TEST_P(FamilyDirections, TheBeginningOfAnAnswerAloneGetsTheDirection) {
  const at::NoGradGuard no_grad;
  models::Model model = model_of(GetParam());
  const auto directions = random_directions(model, 1);
  workflow::DirectChangeOptions options;
  options.answer_start = true;
  options.texts = {{72, 101, 108, 10}, {65, 100, 10}, {9, 8, 7, 6, 10}};
  options.layers = {0, 0};
  EXPECT_THROW((void)workflow::bake_directions(model, {&directions, 1}, options), Error) << "nothing to spare";
  options.spared = random_texts();
  if (!model.config().no_edit_site.empty()) return;
  const auto change = workflow::bake_directions(model, {&directions, 1}, options);
  ASSERT_EQ(change.pack.deltas.size(), 1U);
  const auto& delta = change.pack.deltas[0];
  const at::Tensor d = directions.layers[0].to(at::kDouble);
  const auto gains = [&](const std::vector<std::vector<int64_t>>& texts) {  // by token
    hooks::HookSession session(model.hooks());
    session.capture({hooks::Site::kMlpDownIn, 0}).attach();
    (void)model.forward(models::TokenBatch::from_rows(texts));
    return session.captured({hooks::Site::kMlpDownIn, 0}).to(at::kDouble).mm(delta.matrix().t()).mv(d) / d.dot(d);
  };
  const at::Tensor asked = gains(options.texts), last = asked.index_select(0, at::tensor({3, 6, 11}));
  if (!model.config().mlp_post_norm()) {
    EXPECT_NEAR(last.mean().item<double>(), 1, 1e-4);
  }
  EXPECT_LT(gains(options.spared).abs().mean().item<double>(), 0.6 * last.abs().mean().item<double>());
}

INSTANTIATE_TEST_SUITE_P(All, FamilyDirections, ::testing::ValuesIn(testing::all_flavours()), testing::flavour_name);

}  // namespace family_directions_test
}  // namespace emend
