// Targets of the small facts, and how two runs of the optimisation are compared.
#pragma once

#include <emend/editors/steps/targets.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/editor_models.h"

namespace emend::testing {

/// One a fact of tiny_facts().
inline std::vector<editors::TargetProblem> problems_of(const models::Model& model,
                                                       const editors::RenderOptions& options = {}) {
  std::vector<editors::TargetProblem> problems;
  for (const auto& fact : tiny_facts())
    problems.push_back(
        editors::make_target_problem(editors::render_prompts(model.tokenizer(), fact, tiny_contexts(), options)));
  return problems;
}

inline editors::TargetSpec spec_of(std::vector<hooks::SiteRef> sites, std::optional<int> loss_layer) {
  editors::TargetSpec spec;
  spec.sites = std::move(sites);
  spec.loss_layer = loss_layer;
  spec.steps = 6;
  spec.clamp_norm_factor = 0.75;
  spec.weight_decay = 0.5;
  return spec;
}

/// With a trace, which expect_equal_targets compares.
inline std::vector<editors::Target> optimised(const models::Model& model,
                                              const std::vector<editors::TargetProblem>& problems,
                                              const editors::TargetSpec& spec, editors::Engine engine,
                                              int64_t batch = 0, int lanes = 0) {
  editors::EditContext context;
  editors::Trace trace;
  context.engine = engine;
  context.trace = &trace;
  context.max_facts_per_batch = batch;
  context.target_lanes = lanes;
  return editors::optimise_targets(model, problems, spec, context);
}

inline void expect_equal_targets(const std::vector<editors::Target>& got, const std::vector<editors::Target>& expected,
                                 double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].steps, expected[i].steps) << what << ", problem " << i;
    EXPECT_EQ(got[i].status, expected[i].status) << what << ", problem " << i;
    ASSERT_EQ(got[i].target_D.size(), expected[i].target_D.size());
    ASSERT_EQ(got[i].curve.size(), expected[i].curve.size()) << what;
    for (size_t s = 0; s < got[i].target_D.size(); ++s) {
      EXPECT_LT(relative_difference(got[i].initial_D[s], expected[i].initial_D[s]), tolerance)
          << what << ", problem " << i;
      EXPECT_LT(relative_difference(got[i].trace->delta_steps[s], expected[i].trace->delta_steps[s]), tolerance)
          << what << ", problem " << i << ", site " << s;
      EXPECT_LT(relative_difference(got[i].trace->grad_steps[s], expected[i].trace->grad_steps[s]), tolerance)
          << what << ", problem " << i << ", site " << s;
    }
    EXPECT_LT(relative_difference(got[i].trace->nll_each, expected[i].trace->nll_each), tolerance) << what;
    for (size_t t = 0; t < got[i].curve.size(); ++t) {
      EXPECT_NEAR(got[i].curve[t].loss, expected[i].curve[t].loss, tolerance * 10) << what;
      EXPECT_NEAR(got[i].curve[t].kl, expected[i].curve[t].kl, tolerance * 10) << what;
      EXPECT_NEAR(got[i].curve[t].weight_decay, expected[i].curve[t].weight_decay, tolerance * 10) << what;
      EXPECT_NEAR(got[i].curve[t].probability, expected[i].curve[t].probability, tolerance * 10) << what;
    }
  }
}

/// Of all problems at once and in batches of so many. Returns the reference's.
inline std::vector<editors::Target> expect_engines_agree(const models::Model& model,
                                                         const std::vector<editors::TargetProblem>& problems,
                                                         const editors::TargetSpec& spec, double tolerance,
                                                         const std::string& what,
                                                         const std::vector<int64_t>& batches = {0}) {
  const auto reference = optimised(model, problems, spec, editors::Engine::kReference);
  for (const int64_t batch : batches)
    expect_equal_targets(optimised(model, problems, spec, editors::Engine::kFast, batch), reference, tolerance,
                         what + ", at once: " + std::to_string(batch));
  return reference;
}

}  // namespace emend::testing
