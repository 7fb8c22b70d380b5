#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/cores.h>
#include <emend/devices/kernels.h>
#include <emend/editors/steps/continuations.h>
#include <emend/editors/steps/targets.h>
#include <emend/evaluation/scoring.h>
#include <emend/models/generation.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "support/editor_models.h"

namespace emend {
namespace cores_test {

using testing::tiny_model;

// LibTorch's number of threads while it lives.
class Threads {
 public:
  explicit Threads(int n) : before_(at::get_num_threads()) { at::set_num_threads(n); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

TEST(Cores, EveryPartRunsOnceByASingleThread) {
  const Threads threads(3);
  const at::NoGradGuard no_grad;
  const devices::PlainOperators plain;
  std::vector<std::atomic<int>> runs(20);
  std::atomic<int> alone = 0, as_caller = 0;
  std::mutex mutex;
  std::set<std::thread::id> seen;
  devices::each_on_a_core(20, [&](int64_t i) {
    ++runs[static_cast<size_t>(i)];
    alone += at::in_parallel_region();
    as_caller += !at::GradMode::is_enabled() && devices::PlainOperators::on();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  for (const auto& n : runs) EXPECT_EQ(n, 1);
  EXPECT_EQ(alone, 20);
  EXPECT_EQ(as_caller, 20);
  EXPECT_EQ(seen.size(), 3u);
}

TEST(Cores, FewerPartsThanThreadsHaveAllThreads) {
  const Threads threads(3);
  int split = 0;
  devices::each_on_a_core(2, [&](int64_t) { split += !at::in_parallel_region(); });
  EXPECT_EQ(split, 2);
}

TEST(Cores, TheFirstExceptionEndsIt) {
  const Threads threads(2);
  std::atomic<int> begun = 0;
  EXPECT_THROW(devices::each_on_a_core(1000,
                                       [&](int64_t i) {
                                         ++begun;
                                         if (i == 3) throw std::runtime_error("part 3");
                                         std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                       }),
               std::runtime_error);
  EXPECT_LT(begun, 100);
}

TEST(Cores, PartsAreOneOrAnEvenNumber) {
  EXPECT_EQ(devices::parts_for_cores(7, 8, 8), 1);
  EXPECT_EQ(devices::parts_for_cores(8, 8, 8), 2);
  EXPECT_EQ(devices::parts_for_cores(17, 8, 8), 4);
  EXPECT_EQ(devices::parts_for_cores(33, 8, 8), 8);
  EXPECT_EQ(devices::parts_for_cores(47, 64, 48), 1);
  EXPECT_EQ(devices::parts_for_cores(128, 64, 48), 2);
}

// Without OpenMP at::parallel_for is an ordinary loop: so it was for all kernels of our own.
TEST(Cores, ParallelForOfThisBuildIsParallel) {
  const Threads threads(2);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 2u);
}

TEST(Cores, TargetsAreTheSameBitsOnAnyNumberOfThem) {
  const models::Model model = tiny_model();
  std::vector<editors::TargetProblem> problems;
  for (size_t i = 0; problems.size() < 60; ++i) {
    const auto facts = testing::tiny_facts();
    problems.push_back(editors::make_target_problem(
        editors::render_prompts(model.tokenizer(), facts[i % facts.size()], testing::tiny_contexts(), {})));
  }
  editors::TargetSpec spec;
  spec.sites = {{hooks::Site::kLayerOut, 1}};
  spec.steps = 6;
  spec.clamp_norm_factor = 0.75;
  std::vector<editors::Target> one;
  for (const int n : {1, 2, 3, 8}) {
    const Threads threads(n);
    std::atomic<size_t> told = 0;
    editors::EditContext context;
    context.progress = [&](const ProgressUpdate&) { ++told; };
    const auto targets = editors::optimise_targets(model, problems, spec, context);
    EXPECT_GE(told, problems.size());
    if (n == 1) one = targets;
    ASSERT_EQ(targets.size(), problems.size());
    for (size_t i = 0; i < targets.size(); ++i)
      EXPECT_TRUE(at::equal(targets[i].target_D[0], one[i].target_D[0])) << n << " threads, problem " << i;
  }
  // One run of all facts together, as on a GPU.
  editors::EditContext together;
  together.target_lanes = 1;
  const auto joined = editors::optimise_targets(model, problems, spec, together);
  for (size_t i = 0; i < joined.size(); ++i)
    EXPECT_LT(testing::relative_difference(joined[i].target_D[0], one[i].target_D[0]), 1e-4) << "problem " << i;
}

TEST(Cores, ScoresAndTextsAreTheSameOnAnyNumberOfThem) {
  const models::Model model = tiny_model();
  std::vector<evaluation::ScoreRequest> requests;
  std::vector<std::vector<int64_t>> prompts;
  for (int64_t i = 0; i < 100; ++i) {
    const std::string number = std::to_string(i * i % 101);
    requests.push_back({"A sentence about " + number + " that others begin with too, " + std::to_string(i), number});
    prompts.push_back({1 + i % 7, 2 + i % 5, 3 + i % 11});
  }
  evaluation::ScoreOptions options;
  options.batch_tokens = 128;
  std::vector<double> scores;
  std::vector<std::vector<int64_t>> texts;
  for (const int n : {1, 3}) {
    const Threads threads(n);
    std::vector<double> now;
    for (const auto& score : evaluation::score_requests(model, requests, options))
      now.insert(now.end(), score.log_probs.begin(), score.log_probs.end());
    std::vector<std::vector<int64_t>> written;
    for (auto& text : editors::continue_greedily(model, prompts, 5, {})) written.push_back(std::move(text.ids));
    models::GenerateOptions sampling;
    sampling.temperature = 1, sampling.max_new_tokens = 6;
    for (auto& ids : models::generate(model, prompts, sampling)) written.push_back(std::move(ids));
    if (n == 1) scores = now, texts = written;
    EXPECT_EQ(now, scores);
    EXPECT_EQ(written, texts);
  }
  EXPECT_GE(scores.size(), 100u);
}

}  // namespace cores_test
}  // namespace emend
