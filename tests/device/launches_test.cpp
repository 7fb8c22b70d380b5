// What a step of a target, a generated token and an insertion cost a device beside arithmetic: operators that are
// started, results that the host waits for, copies from the host, memory that is not given back. Counted on simulated
// devices, which run the same code as GPUs.
#include <ATen/ATen.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/kernels.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/spread_plan.h"

namespace emend {
namespace launches_test {

using devices::detail::SimulatedCounts;
using testing::sim;

SimulatedCounts operator-(const SimulatedCounts& a, const SimulatedCounts& b) {
  return {a.launches - b.launches, a.host_reads - b.host_reads, a.uploads - b.uploads, a.waits - b.waits};
}

std::string shown(const SimulatedCounts& c) {
  return std::to_string(c.launches) + " launches, " + std::to_string(c.host_reads) + " reads, " +
         std::to_string(c.uploads) + " uploads, " + std::to_string(c.waits) + " waits";
}

SimulatedCounts count(const std::function<void()>& work) {
  const auto before = devices::detail::simulated_counts();
  work();
  return devices::detail::simulated_counts() - before;
}

auto on_devices(int n) {
  std::vector<c10::Device> all;
  for (int k = 0; k < n; ++k) all.push_back(sim(k));
  return testing::over_devices(all);
}

// A step more, all else being equal.
SimulatedCounts target_step(const models::Model& model, int64_t facts) {
  std::vector<editors::TargetProblem> problems;
  for (int64_t i = 0; i < facts; ++i)
    problems.push_back(editors::make_target_problem(editors::render_prompts(
        model.tokenizer(), testing::tiny_facts()[static_cast<size_t>(i % 4)], testing::tiny_contexts(), {})));
  editors::TargetSpec spec;
  spec.sites = {{hooks::Site::kLayerOut, 1}};
  spec.stop_loss = -1;
  editors::EditContext context;
  context.target_lanes = 1;  // as on a GPU; in host memory, simulated devices included, facts go in parts for the cores
  const auto run = [&](int steps) {
    spec.steps = steps;
    return count([&] { (void)editors::optimise_targets(model, problems, spec, context); });
  };
  return run(7) - run(6);
}

// Indices, masks and rotary tables are on the devices since the first step; what a step found is read once.
TEST(Launches, ATargetStepIsReadOnceAndBringsNothingFromTheHost) {
  for (const int devices : {1, 3}) {
    const models::Model model = testing::tiny_model({.place = on_devices(devices)});
    const auto four = target_step(model, 4), eight = target_step(model, 8);
    std::cout << devices << " devices: " << shown(four) << "\n";
    EXPECT_EQ(four.host_reads, 1) << shown(four);
    EXPECT_EQ(four.uploads, 0) << shown(four);
    EXPECT_EQ(eight.host_reads, 1) << shown(eight);
    EXPECT_EQ(eight.uploads, 0) << shown(eight);
    EXPECT_EQ(eight.launches, four.launches) << "more facts, not more launches";
    EXPECT_LT(four.launches, 2 * 110 + 200) << "two layers, the head, the losses and Adam, both ways";
  }
}

TEST(Launches, OwnKernelsStartLessInATargetStep) {
  std::string text;
  const auto* plugin = devices::open_kernel_plugin(EMEND_BINARY_DIR "/tests/libemend_kernels_stand_in.so", text);
  ASSERT_TRUE(plugin) << text;
  const models::Model model = testing::tiny_model({.place = on_devices(1)});
  const auto step = [&](const devices::KernelPlugin* kernels) {
    const devices::KernelScope scope(kernels);
    return target_step(model, 4);
  };
  const auto library = step(nullptr), own = step(plugin);
  std::cout << "library: " << shown(library) << "; own kernels beside: " << shown(own) << "\n";
  EXPECT_LT(own.launches, library.launches - 50) << "before counting the kernels themselves, some two dozen";
  EXPECT_EQ(own.host_reads, 1);
}

TEST(Launches, MemoryDoesNotGrowWithSteps) {
  const models::Model model = testing::tiny_model({.place = on_devices(1)});
  const auto peak_of = [&](int steps) {
    std::vector<editors::TargetProblem> problems = {editors::make_target_problem(
        editors::render_prompts(model.tokenizer(), testing::tiny_facts()[0], testing::tiny_contexts(), {}))};
    editors::TargetSpec spec;
    spec.sites = {{hooks::Site::kLayerOut, 1}};
    spec.stop_loss = -1;
    spec.steps = steps;
    devices::reset_peak_memory(sim(0));
    const auto before = devices::device_memory_stats(sim(0)).allocated;
    (void)editors::optimise_targets(model, problems, spec, {});
    // A thread of autograd's may still hold a gradient of δ.
    EXPECT_LE(devices::device_memory_stats(sim(0)).allocated, before + 1024) << "all is given back";
    return devices::device_memory_stats(sim(0)).peak;
  };
  (void)peak_of(3);
  EXPECT_EQ(peak_of(12), peak_of(3));
}

// A token of rows of different lengths.
SimulatedCounts generated_token(const models::Model& model, int64_t rows) {
  std::vector<std::vector<int64_t>> prompts;
  for (int64_t r = 0; r < rows; ++r) prompts.emplace_back(static_cast<size_t>(3 + r % 4), 5 + r);
  const auto run = [&](int64_t tokens) {
    return count([&] { (void)models::generate(model, prompts, {.max_new_tokens = tokens}); });
  };
  return run(7) - run(6);
}

TEST(Launches, AGeneratedTokenCostsTheSameForAllRows) {
  const models::Model model = testing::tiny_model({.place = on_devices(1)});
  const auto few = generated_token(model, 3), many = generated_token(model, 12);
  std::cout << shown(few) << "\n";
  EXPECT_EQ(few.launches, many.launches);
  EXPECT_EQ(few.uploads, many.uploads);
  EXPECT_EQ(few.host_reads, 1) << "the ids";
  EXPECT_EQ(few.waits, 0) << "from pinned memory";
  EXPECT_LE(few.uploads, 8) << "ids, places in the cache, rotary tables, mask: once, not once a layer";
  EXPECT_LT(few.launches, 4 * 45 + 20) << "four layers";
}

TEST(Launches, ATokenTakesNoMemory) {
  const models::Model model = testing::tiny_model({.place = on_devices(1)});
  models::RunningBatch batch(model);
  const auto options = std::make_shared<models::GenerateOptions>();
  options->max_new_tokens = 20;
  std::vector<models::BatchRow> rows;
  rows.push_back({{1, 2, 3}, options, 0});
  rows.push_back({{4, 5}, options, 1});
  batch.add(std::move(rows));
  batch.step();
  const auto after_one = devices::device_memory_stats(sim(0)).allocated;
  for (int i = 0; i < 10; ++i) batch.step();
  EXPECT_EQ(devices::device_memory_stats(sim(0)).allocated, after_one) << "the cache was reserved";
}

// Keys, solve and write of two layers.
SimulatedCounts insertion(int64_t facts) {
  models::Model model = testing::tiny_model({.place = on_devices(1)});
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.statistics = &statistics;
  context.contexts = testing::tiny_contexts();
  SimulatedCounts before, after;
  context.progress = [&](const ProgressUpdate& update) {
    if (update.phase == "insert") (update.done == 0 ? before : after) = devices::detail::simulated_counts();
  };
  std::vector<datasets::Fact> all;
  for (int64_t i = 0; i < facts; ++i) {
    all.push_back(testing::tiny_facts()[static_cast<size_t>(i % 4)]);
    all.back().case_id = i;
    all.back().subject += std::string(static_cast<size_t>(i / 4), 'x');
  }
  const auto editor = editors::make_editor(
      "memit",
      hparams::parse_hparams("layers: [1, 2]\nv_num_grad_steps: 2\nclamp_norm_factor: 0.75\nmom2_update_weight: 3\n",
                             "test.yaml"),
      model);
  (void)editor->edit(model, all, context);
  return after - before;
}

TEST(Launches, AnInsertionReadsTheSameForFewFactsAndMany) {
  const auto few = insertion(4), many = insertion(16);
  std::cout << shown(few) << "; " << shown(many) << "\n";
  EXPECT_EQ(few.host_reads, many.host_reads) << "nothing is read fact by fact";
  EXPECT_EQ(few.launches, many.launches);
  EXPECT_LE(few.host_reads, 2 * 16) << "figures of two layers";
}

}  // namespace launches_test
}  // namespace emend
