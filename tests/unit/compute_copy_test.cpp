// Copies of the upper layers for computing, and targets that are optimised on them in batches that fill up again.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_budget.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/compute_copy.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <set>

#include "support/editor_models.h"
#include "support/simulated.h"
#include "support/spread_plan.h"

namespace emend {
namespace compute_copy_test {

using editors::EditContext;
using editors::Target;
using editors::TargetProblem;
using editors::TargetSpec;
using hooks::Site;
using testing::relative_difference;
using testing::tiny_model;

const std::vector<std::vector<int64_t>>& rows() {
  static const std::vector<std::vector<int64_t>> ids = {{5, 9, 33, 7}, {81, 2}, {14, 15, 92, 65, 35}};
  return ids;
}

at::Tensor entering(const models::Model& model, int layer) {
  return model.forward(models::TokenBatch::from_rows(rows()), {.end_layer = layer}).hidden;
}

at::Tensor logits_from(const models::Model& model, const at::Tensor& hidden, int layer) {
  return model.forward(models::TokenBatch::from_rows(rows()), {.first_layer = layer, .hidden = hidden}).logits;
}

std::vector<TargetProblem> problems_of(const models::Model& model) {
  std::vector<TargetProblem> problems;
  for (int64_t i = 0; i < 3; ++i)
    for (const auto& fact : testing::tiny_facts()) {
      auto changed = fact;
      changed.case_id += 100 * i;
      changed.target_new += std::string(static_cast<size_t>(i), 'x');
      problems.push_back(editors::make_target_problem(
          editors::render_prompts(model.tokenizer(), changed, testing::tiny_contexts(), {})));
    }
  return problems;
}

TargetSpec spec_of(Site site, int layer, std::optional<int> loss_layer) {
  TargetSpec spec;
  spec.sites = {{site, layer}};
  spec.loss_layer = loss_layer;
  spec.steps = 6;
  return spec;
}

std::vector<Target> run(const models::Model& model, const TargetSpec& spec, int64_t batch,
                        std::optional<at::ScalarType> compute = {}) {
  EditContext context;
  context.max_facts_per_batch = batch;
  context.compute_dtype = compute;
  return editors::optimise_targets(model, problems_of(model), spec, context);
}

// A setting of the whole process: it is there during the phase and gone after it, also when the phase ends early.
TEST(ComputeCopy, Tf32IsOnWhileTargetsAreOptimised) {
  const auto precision = [] {
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  };
  const auto before = precision();
  ASSERT_NE(before, at::Float32Precision::TF32);
  const models::Model model = tiny_model();
  const auto spec = spec_of(Site::kLayerOut, 1, 3);
  const auto expected = run(model, spec, 0);
  EditContext context;
  context.tf32 = true;
  bool seen = false;
  context.progress = [&](const ProgressUpdate&) { seen = precision() == at::Float32Precision::TF32; };
  const auto targets = editors::optimise_targets(model, problems_of(model), spec, context);
  EXPECT_TRUE(seen);
  EXPECT_EQ(precision(), before);
  for (size_t i = 0; i < targets.size(); ++i)
    EXPECT_TRUE(at::equal(targets[i].target_D[0], expected[i].target_D[0])) << "the CPU has no TF32";
  context.cancel.request();
  EXPECT_THROW((void)editors::optimise_targets(model, problems_of(model), spec, context), Error);
  EXPECT_EQ(precision(), before);
}

TEST(ComputeCopy, GivesTheModelsNumbersInItsOwnDtype) {
  const at::NoGradGuard no_grad;
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family});
    const auto copy = models::compute_copy(model, at::kFloat, 2);
    const at::Tensor hidden = entering(model, 2);
    EXPECT_TRUE(at::equal(logits_from(copy, hidden, 2), logits_from(model, hidden, 2))) << family;
    const auto wide = models::compute_copy(model, at::kDouble, 2);
    EXPECT_LT(relative_difference(logits_from(wide, hidden, 2), logits_from(model, hidden, 2)), 1e-5);
    const auto narrow = models::compute_copy(model, at::kBFloat16, 2);
    const at::Tensor logits = logits_from(narrow, hidden, 2);
    EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
    const double off = relative_difference(logits, logits_from(model, hidden, 2));
    EXPECT_LT(off, 0.05) << family;
    EXPECT_GT(off, 1e-5) << "it would not be bfloat16";
  }
}

TEST(ComputeCopy, HoldsTheUpperLayersOnly) {
  const at::NoGradGuard no_grad;
  const models::Model model = tiny_model();
  const auto copy = models::compute_copy(model, at::kBFloat16, 2);
  EXPECT_THROW((void)logits_from(copy, entering(model, 1), 1), Error);
  const auto whole = models::compute_copy(model, at::kFloat, 0);
  const auto batch = models::TokenBatch::from_rows(rows());
  EXPECT_TRUE(at::equal(whole.forward(batch).logits, model.forward(batch).logits));
}

TEST(ComputeCopy, LaterWritesToTheModelDoNotReachIt) {
  const at::NoGradGuard no_grad;
  models::Model model = tiny_model();
  const auto copy = models::compute_copy(model, at::kFloat, 1);
  const at::Tensor hidden = entering(model, 1), before = logits_from(model, hidden, 1);
  const auto site = model.edit_site(2);
  model.set_weight(site.weight_name, model.weight(site.weight_name) * 3);
  EXPECT_TRUE(at::equal(logits_from(copy, hidden, 1), before));
  EXPECT_FALSE(at::equal(logits_from(model, hidden, 1), before));
}

TEST(ComputeCopy, StaysOnTheModelsDevices) {
  const at::NoGradGuard no_grad;
  const models::Model split = tiny_model({.place = testing::spread_plan});
  const auto copy = models::compute_copy(split, at::kBFloat16, 1);
  EXPECT_EQ(copy.placement().layers, split.placement().layers);
  const at::Tensor logits = logits_from(copy, entering(split, 1), 1);
  EXPECT_EQ(logits.device(), split.placement().head);
  const models::Model whole = tiny_model();
  const at::Tensor there = logits_from(models::compute_copy(whole, at::kBFloat16, 1), entering(whole, 1), 1);
  EXPECT_TRUE(at::equal(devices::to_host(logits), there));
}

TEST(ComputeCopy, FunctionsAtHookPointsAreNotPassedBy) {
  const models::Model model = tiny_model();
  EXPECT_TRUE(models::hooks_idle_above(model, 2));
  {
    const auto below = model.hooks().at({Site::kMlpOut, 1}).add([](const at::Tensor&) { return at::Tensor(); });
    EXPECT_TRUE(models::hooks_idle_above(model, 2));
  }
  for (const int layer : {0, 3}) {  // below the layers that are run at every step, and among them
    int fired = 0;
    const auto handle = model.hooks().at({Site::kMlpOut, layer}).add([&](const at::Tensor&) {
      ++fired;
      return at::Tensor();
    });
    EXPECT_EQ(models::hooks_idle_above(model, 2), layer < 2);
    const models::Model copy = models::compute_copy(model, at::kBFloat16, 0);
    TargetSpec spec = spec_of(Site::kLayerOut, 1, 3);
    spec.copy = &copy;
    (void)run(model, spec, 0, at::kBFloat16);
    EXPECT_GT(fired, 0) << layer;
  }
}

// The targets of a bfloat16 copy are those of float32 up to bfloat16's rounding; t0 comes from the model itself.
TEST(ComputeDtype, TargetsComeCloseAndStartFromTheModelsOwnValue) {
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family});
    for (const auto& spec : {spec_of(Site::kLayerOut, 1, 3), spec_of(Site::kMlpOut, 1, std::nullopt)}) {
      const auto exact = run(model, spec, 0), narrow = run(model, spec, 0, at::kBFloat16);
      ASSERT_EQ(exact.size(), narrow.size());
      for (size_t i = 0; i < exact.size(); ++i) {
        EXPECT_LT(relative_difference(narrow[i].initial_D[0], exact[i].initial_D[0]), 1e-6) << family;
        EXPECT_EQ(narrow[i].delta_D[0].scalar_type(), at::kFloat);
        EXPECT_LT(relative_difference(narrow[i].target_D[0], exact[i].target_D[0]), 0.1) << family << " " << i;
        EXPECT_NEAR(narrow[i].curve[0].nll, exact[i].curve[0].nll, 0.05 * exact[i].curve[0].nll);
      }
    }
  }
}

TEST(ComputeDtype, SplitModelsGiveTheSameTargets) {
  const TargetSpec spec = spec_of(Site::kLayerOut, 1, 3);
  const models::Model whole = tiny_model(), split = tiny_model({.place = testing::spread_plan});
  const auto one = run(whole, spec, 0, at::kBFloat16), other = run(split, spec, 0, at::kBFloat16);
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_LT(relative_difference(other[i].target_D[0], one[i].target_D[0]), 1e-6) << i;
}

// With the layers below in bfloat16 as well the losses are a little further off; t0 is still the model's own.
TEST(ComputeDtype, LayersBelowMayBeNarrowToo) {
  const models::Model model = tiny_model(), copy = models::compute_copy(model, at::kBFloat16, 0);
  for (TargetSpec spec : {spec_of(Site::kLayerOut, 1, 3), spec_of(Site::kMlpOut, 2, std::nullopt)}) {
    const auto exact = run(model, spec, 0), above = run(model, spec, 0, at::kBFloat16);
    spec.copy = &copy;
    const auto all = run(model, spec, 0, at::kBFloat16);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_LT(relative_difference(all[i].initial_D[0], exact[i].initial_D[0]), 1e-6) << i;
      EXPECT_NEAR(all[i].curve[0].nll, exact[i].curve[0].nll, 0.05 * exact[i].curve[0].nll);
      EXPECT_NE(all[i].curve[0].nll, above[i].curve[0].nll) << "nothing below would be narrow";
    }
  }
}

// Whatever the batch size, and whoever shares the batch: facts leave at different steps and others take their place.
TEST(Refilling, TargetsDoNotDependOnTheBatch) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const models::Model model = tiny_model({.dtype = dtype});
    TargetSpec spec = spec_of(Site::kLayerOut, 1, 3);
    spec.steps = 12;
    spec.clamp_norm_factor = 30;
    spec.weight_decay = 0;
    spec.stop_loss = 0;
    std::vector<double> lowest;
    for (const auto& target : run(model, spec, 0)) lowest.push_back(target.curve.back().loss);
    std::sort(lowest.begin(), lowest.end());
    spec.stop_loss = (lowest[5] + lowest[6]) / 2;
    const auto together = run(model, spec, 0);
    std::set<int64_t> steps;
    for (const auto& target : together) steps.insert(target.steps);
    EXPECT_GT(steps.size(), 2U) << "facts that leave at different steps are what this test is about";
    for (const int64_t batch : {1, 2, 3, 5, 8}) {
      const auto refilled = run(model, spec, batch);
      for (size_t i = 0; i < together.size(); ++i) {
        EXPECT_EQ(refilled[i].steps, together[i].steps) << batch;
        EXPECT_LT(relative_difference(refilled[i].target_D[0], together[i].target_D[0]), 1e-5) << batch << " " << i;
      }
    }
  }
}

TEST(Refilling, TheQueueKeepsToItsLimit) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  editors::detail::TargetQueue queue(model, problems, 2, 8);
  const auto first = queue.take({});
  EXPECT_EQ(first.size(), 8U);
  const std::vector<size_t> seven(first.begin(), first.begin() + 7), six(first.begin(), first.begin() + 6);
  EXPECT_TRUE(queue.take(seven).empty()) << "one place is less than a quarter";
  EXPECT_EQ(queue.take(six).size(), 2U);
  EXPECT_FALSE(queue.empty());
  const std::vector<size_t> five(first.begin(), first.begin() + 5);
  EXPECT_EQ(queue.take(five).size(), 2U) << "the last ones";
  EXPECT_TRUE(queue.empty());
  EXPECT_TRUE(queue.take({}).empty());
}

TEST(Refilling, LanesAreAsManyAsGpusAndTwoWhereFactsFillBoth) {
  using editors::detail::lanes_for;
  EXPECT_EQ(lanes_for(0, 10000), 1) << "the CPU";
  EXPECT_EQ(lanes_for(1, 32), 1) << "halves of a small batch cost more launches";
  EXPECT_EQ(lanes_for(1, 10000), 2) << "one works while the host reads the other";
  EXPECT_EQ(lanes_for(4, 32), 4);
}

TEST(Refilling, TheTightestDeviceOfAMixDecides) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  const at::Device host("cpu"), first("cuda:0"), second("cuda:1");
  const auto machine = [&](int64_t a, int64_t b) {
    std::vector<devices::DeviceInfo> infos;
    for (const auto& [device, free] : {std::pair(host, int64_t{64}), std::pair(first, a), std::pair(second, b)})
      infos.push_back({.device = device, .name = "", .bus = "", .total_bytes = 64 * kGiB, .free_bytes = free * kGiB});
    return infos;
  };
  const auto room = [&](int64_t a, int64_t b, const std::vector<at::Device>& layers) {
    return editors::detail::tightest_room(machine(a, b), layers, 2 * kGiB);
  };
  EXPECT_EQ(room(30, 6, {first}), 10 * kGiB);
  EXPECT_EQ(room(30, 6, {first, second}), 4 * kGiB) << "each keeps half";
  EXPECT_EQ(room(6, 30, {first, second}), 4 * kGiB) << "whichever is first";
  EXPECT_EQ(room(30, 6, {first, first, first, second}), 8 * kGiB) << "a quarter on the small one";
  EXPECT_EQ(room(30, 6, {first, host}), 2 * kGiB) << "a host takes few tokens, whatever it holds";
  EXPECT_EQ(room(30, 0, {first, second}), 0) << "what is not there is not taken";
  EXPECT_EQ(editors::detail::tightest_room(machine(30, 6), std::vector{host}, 1), kGiB / 2);
}

// As a plan counts it: where nothing more fits, facts go one at a time.
TEST(Refilling, ADeviceWithoutRoomTakesOneFactAtATime) {
  const models::Model model = tiny_model({.place = testing::spread_plan});
  const auto problems = problems_of(model);
  std::deque<testing::SimulatedLimitScope> limits;
  for (int k = 0; k < 3; ++k)
    limits.emplace_back(k, devices::device_memory_stats(testing::sim(k)).allocated + (1 << 10));
  EXPECT_LE(editors::detail::active_bytes(model, 2), 2 << 10);
  editors::detail::TargetQueue queue(model, problems, 2, 0);
  const auto first = queue.take({});
  EXPECT_EQ(first.size(), 1U);
  EXPECT_TRUE(queue.take(first).empty());
  EXPECT_EQ(queue.take({}).size(), 1U);
}

TEST(Refilling, MemoryBoundsWhatIsActive) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  const int64_t short_one = editors::detail::problem_bytes(model, problems[0], 2),
                long_one = editors::detail::problem_bytes(model, problems[8], 2);
  EXPECT_GT(long_one, short_one) << "a longer target takes more";
  const auto copy = models::compute_copy(model, at::kBFloat16, 2);
  const int64_t kl = model.vocab_size() * 4;  // stays float32
  EXPECT_EQ(2 * (editors::detail::problem_bytes(copy, problems[0], 2) - kl), short_one - kl);
  EXPECT_LE(editors::detail::active_bytes(model, 2), int64_t{512} << 20) << "on a host";
  EXPECT_GT(editors::detail::active_bytes(model, 2), 0);
}

}  // namespace compute_copy_test
}  // namespace emend
