#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/editors/steps/targets.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "support/editor_models.h"
#include "support/spread_plan.h"

namespace emend {
namespace targets_test {

using editors::EditContext;
using editors::Engine;
using editors::StopRule;
using editors::Target;
using editors::TargetProblem;
using editors::TargetSpec;
using hooks::Site;
using testing::relative_difference;
using testing::tiny_model;

std::vector<TargetProblem> problems_of(const models::Model& model, const editors::RenderOptions& options = {}) {
  std::vector<TargetProblem> problems;
  for (const auto& fact : testing::tiny_facts())
    problems.push_back(editors::make_target_problem(
        editors::render_prompts(model.tokenizer(), fact, testing::tiny_contexts(), options)));
  return problems;
}

TargetSpec spec_of(std::vector<hooks::SiteRef> sites, std::optional<int> loss_layer) {
  TargetSpec spec;
  spec.sites = std::move(sites);
  spec.loss_layer = loss_layer;
  spec.steps = 6;
  spec.clamp_norm_factor = 0.75;
  spec.weight_decay = 0.5;
  return spec;
}

std::vector<Target> run(const models::Model& model, const std::vector<TargetProblem>& problems, const TargetSpec& spec,
                        Engine engine, int64_t batch = 0, int lanes = 0) {
  EditContext context;
  editors::Trace trace;
  context.engine = engine;
  context.trace = &trace;
  context.max_facts_per_batch = batch;
  context.target_lanes = lanes;
  return editors::optimise_targets(model, problems, spec, context);
}

void expect_equal_targets(const std::vector<Target>& got, const std::vector<Target>& expected, double tolerance,
                          const std::string& what) {
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

// The loss written down once more, one unpadded row after the other, for any δ. A third opinion beside the two engines.
class PlainLoss {
 public:
  PlainLoss(const models::Model& model, const TargetProblem& problem, const TargetSpec& spec)
      : model_(model), problem_(problem), spec_(spec) {
    for (size_t s = 0; s < spec.sites.size(); ++s) {
      hooks::HookSession session(model.hooks());
      session.capture(spec.sites[s]).attach();
      (void)model.forward(models::TokenBatch::from_rows({problem.rows[0].ids}));
      initial.push_back(session.captured(spec.sites[s])[problem.rows[0].lookup].clone());
    }
    const std::vector<at::Tensor> zero(spec.sites.size(), at::zeros_like(initial[0]));
    for (const auto& row : problem.kl_rows) first_.push_back(next_token(row, zero));
  }

  double operator()(const std::vector<at::Tensor>& delta) const {
    double nll = 0, kl = 0, decay = 0;
    for (const auto& row : problem_.rows) {
      const at::Tensor log_p = log_probabilities(row, delta, spec_.loss_layer);
      double sum = 0;
      for (const auto& [token, id] : row.labels) sum -= log_p[token][id].item<double>();
      nll += row.weight * sum / static_cast<double>(row.labels.size());
    }
    for (size_t k = 0; k < problem_.kl_rows.size(); ++k) {
      const at::Tensor now = next_token(problem_.kl_rows[k], delta);
      kl += (now.exp() * (now - first_[k])).sum().item<double>() / static_cast<double>(problem_.kl_rows.size());
    }
    for (size_t s = 0; s < delta.size(); ++s)
      decay += delta[s].norm().item<double>() / initial[s].norm().square().item<double>();
    return spec_.nll_factor * nll + spec_.kl_factor * kl + spec_.weight_decay * decay;
  }

  std::vector<at::Tensor> initial;

 private:
  at::Tensor log_probabilities(const editors::TargetRow& row, const std::vector<at::Tensor>& delta,
                               std::optional<int> loss_layer) const {
    hooks::HookSession session(model_.hooks());
    for (size_t s = 0; s < delta.size(); ++s)
      session.edit(spec_.sites[s], [&, s](const at::Tensor& x) {
        at::Tensor changed = x.clone();
        changed[row.lookup] += delta[s];
        return changed;
      });
    if (loss_layer) session.capture({Site::kLayerOut, *loss_layer});
    session.attach();
    const at::Tensor logits = model_.forward(models::TokenBatch::from_rows({row.ids})).logits;
    return at::log_softmax(loss_layer ? model_.project(session.captured({Site::kLayerOut, *loss_layer}), true) : logits,
                           1);
  }
  at::Tensor next_token(const editors::TargetRow& row, const std::vector<at::Tensor>& delta) const {
    return log_probabilities(row, delta, std::nullopt)[row.lookup];
  }

  const models::Model& model_;
  const TargetProblem& problem_;
  const TargetSpec& spec_;
  std::vector<at::Tensor> first_;
};

struct Variant {
  const char* name;
  TargetSpec spec;
};

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"memit", spec_of({{Site::kLayerOut, 1}}, 3)},
                              {"memit, early loss layer", spec_of({{Site::kLayerOut, 1}}, 2)},
                              {"memit, first layer", spec_of({{Site::kLayerOut, 0}}, 3)},
                              {"rome", spec_of({{Site::kMlpOut, 1}}, std::nullopt)},
                              {"rome, first layer", spec_of({{Site::kMlpOut, 0}}, std::nullopt)},
                              {"two sites", spec_of({{Site::kMlpDownOut, 2}, {Site::kAttnOut, 2}}, 3)}};
  TargetSpec plain = spec_of({{Site::kLayerOut, 1}}, 3);
  plain.weight_decay = 0;
  plain.kl_factor = 0;
  plain.nll_factor = 2;
  all.push_back({"no divergence, no decay", plain});
  return all;
}

TEST(Targets, EnginesAgreeInDoublePrecision) {
  for (const char* family : {"llama", "gpt2"}) {
    for (const bool bos : {false, true}) {
      const models::Model model = tiny_model({.family = family, .dtype = at::kDouble, .bos = bos});
      const auto problems = problems_of(model);
      for (const auto& [name, spec] : variants()) {
        const auto reference = run(model, problems, spec, Engine::kReference);
        expect_equal_targets(run(model, problems, spec, Engine::kFast), reference, 1e-8,
                             std::string(family) + ", " + name + ", all at once");
        if (!bos)
          expect_equal_targets(run(model, problems, spec, Engine::kFast, 3), reference, 1e-8,
                               std::string(family) + ", " + name + ", in batches");
      }
    }
  }
}

// A few steps on some of the rows, then the rest of the way on all: from the sketch's δ, with the divergence from the
// model as it is.
TEST(Targets, ASketchComesFirst) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.sketch_steps = 4;
  const auto reference = run(model, problems, spec, Engine::kReference);
  expect_equal_targets(run(model, problems, spec, Engine::kFast), reference, 1e-8, "all at once");
  expect_equal_targets(run(model, problems, spec, Engine::kFast, 3), reference, 1e-8, "in batches");
  for (size_t i = 0; i < problems.size(); ++i) {
    TargetProblem sketch = problems[i];
    sketch.rows = {sketch.rows[0], sketch.rows[2]};
    for (auto& row : sketch.rows) row.weight = 0.5;
    TargetSpec alone = spec;
    alone.sketch_steps = 0;
    alone.steps = 4;
    alone.lr *= 1.5;
    const Target first = run(model, {sketch}, alone, Engine::kReference)[0];
    const at::Tensor begins = reference[i].trace->delta_steps[0][0];
    EXPECT_LT(relative_difference(begins, first.delta_D[0]), 1e-8) << "problem " << i;
    ASSERT_GE(reference[i].curve.size(), first.curve.size() + 1);
    EXPECT_NEAR(reference[i].curve[first.curve.size()].loss, PlainLoss(model, problems[i], spec)({begins}), 1e-8)
        << "problem " << i;
  }
}

// Lanes take facts from one queue; more lanes than facts leave some empty.
TEST(Targets, LanesOverDevicesDoNotChangeThem) {
  const models::Model model = tiny_model({.dtype = at::kDouble, .place = testing::spread_plan});
  const auto problems = problems_of(model);
  for (const auto& [name, spec] : variants()) {
    const auto one = run(model, problems, spec, Engine::kFast);
    for (const int lanes : {2, 3, 20})
      for (const int64_t batch : {0, 1, 4})
        expect_equal_targets(run(model, problems, spec, Engine::kFast, batch, lanes), one, 1e-10,
                             std::string(name) + ", " + std::to_string(lanes) + " lanes");
  }
}

TEST(Targets, EnginesAgreeInSinglePrecision) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  for (const auto& [name, spec] : variants())
    expect_equal_targets(run(model, problems, spec, Engine::kFast), run(model, problems, spec, Engine::kReference),
                         2e-3, name);
}

// The fast engine runs the longer row for both; what each of them reads stays its own.
TEST(Targets, RowsThatBeginWithAnotherAreReadFromOnePass) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  auto problems = problems_of(model);
  for (auto& problem : problems) {
    for (size_t r = 0; r < 2; ++r) {
      editors::TargetRow longer = problem.rows[r];
      const auto first = static_cast<int64_t>(longer.ids.size());
      longer.ids.insert(longer.ids.end(), {5, 9, 3});
      longer.labels = {{first, 9}, {first + 1, 3}, {first + 2, 11}};
      longer.floors = {0, 1.5, 6};
      longer.weight = 0.2;
      longer.sampled_context = true;
      problem.rows.push_back(std::move(longer));
    }
    problem.rows.insert(problem.rows.begin() + 1, problem.rows.back());  // the longer one may come first
    problem.rows.pop_back();
  }
  for (const auto rule : {StopRule::kLoss, StopRule::kArgmax}) {
    auto spec = spec_of({{Site::kLayerOut, 1}}, std::nullopt);
    spec.stop_rule = rule;
    expect_equal_targets(run(model, problems, spec, Engine::kFast), run(model, problems, spec, Engine::kReference),
                         1e-8, "joint rows");
  }
}

TEST(Targets, EveryLookupTokenWorks) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  for (const auto token :
       {editors::FactToken::kSubjectFirst, editors::FactToken::kSubjectFirstAfterLast, editors::FactToken::kLast}) {
    const auto problems = problems_of(model, {token, {"{} is a"}});
    expect_equal_targets(run(model, problems, spec, Engine::kFast), run(model, problems, spec, Engine::kReference),
                         1e-8, std::to_string(static_cast<int>(token)));
  }
}

// No layer between the edited place and the loss: only the looked-up token itself can feel the change.
TEST(Targets, TheLastLayersWorkToo) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model, {editors::FactToken::kLast, {"{} is a"}});
  for (const auto& spec : {spec_of({{Site::kLayerOut, 1}}, 1), spec_of({{Site::kLayerOut, 3}}, 3),
                           spec_of({{Site::kMlpOut, 3}}, std::nullopt)})
    expect_equal_targets(run(model, problems, spec, Engine::kFast), run(model, problems, spec, Engine::kReference),
                         1e-8, hooks::to_string(spec.sites[0]));
}

TEST(Targets, LossAndGradientAgreeWithFiniteDifferences) {
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family, .dtype = at::kDouble});
    const auto problems = problems_of(model);
    for (const auto& [name, spec] : variants()) {
      const auto targets = run(model, problems, spec, Engine::kFast);
      for (const size_t i : {size_t{0}, size_t{2}}) {
        const PlainLoss loss(model, problems[i], spec);
        const auto& trace = *targets[i].trace;
        for (const int64_t step : {int64_t{0}, int64_t{3}}) {
          std::vector<at::Tensor> delta;
          for (const auto& steps : trace.delta_steps) delta.push_back(steps[step].clone());
          EXPECT_NEAR(loss(delta), targets[i].curve[static_cast<size_t>(step)].loss, 1e-9)
              << family << ", " << name << ", step " << step;
          if (step == 0) continue;  // ‖δ‖ has no derivative at zero
          for (size_t s = 0; s < delta.size(); ++s) {
            const double h = 1e-5;
            at::Tensor numeric = at::zeros_like(delta[s]);
            for (int64_t d = 0; d < delta[s].size(0); d += 9) {
              auto up = delta, down = delta;
              up[s] = delta[s].clone();
              up[s][d] += h;
              down[s] = delta[s].clone();
              down[s][d] -= h;
              EXPECT_NEAR((loss(up) - loss(down)) / (2 * h), trace.grad_steps[s][step][d].item<double>(), 1e-6)
                  << family << ", " << name << ", site " << s << ", component " << d;
            }
          }
        }
      }
    }
  }
}

TEST(Targets, FollowsAdamTheNormLimitAndTheStepCount) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.steps = 7;
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    for (const auto& target : run(model, problems, spec, engine)) {
      EXPECT_EQ(target.steps, 6) << "one update fewer than iterations";
      EXPECT_EQ(target.curve.size(), 7U);
      const at::Tensor& steps = target.trace->delta_steps[0];
      const at::Tensor& grads = target.trace->grad_steps[0];
      EXPECT_EQ(steps[0].abs().max().item<double>(), 0);
      const double limit = spec.clamp_norm_factor * target.initial_D[0].norm().item<double>();
      at::Tensor first = at::zeros_like(steps[0]), second = at::zeros_like(steps[0]), delta = at::zeros_like(steps[0]);
      for (int64_t t = 1; t <= 6; ++t) {
        first = 0.9 * first + 0.1 * grads[t - 1];
        second = 0.999 * second + 0.001 * grads[t - 1].square();
        delta =
            delta - spec.lr * (first / (1 - std::pow(0.9, t))) / ((second / (1 - std::pow(0.999, t))).sqrt() + 1e-8);
        if (const double norm = delta.norm().item<double>(); norm > limit) delta = delta * (limit / norm);
        EXPECT_LT(relative_difference(steps[t], delta), 1e-9) << "update " << t;
      }
      EXPECT_LE(target.delta_D[0].norm().item<double>(), limit * (1 + 1e-9));
      EXPECT_TRUE(at::equal(target.target_D[0], target.initial_D[0] + target.delta_D[0]));
    }
  }
}

TEST(Targets, StopsBeforeTheUpdateOnceTheLossIsLow) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.steps = 12;
  spec.clamp_norm_factor = 30;
  spec.weight_decay = 0;
  spec.stop_loss = 0;
  // A limit that some facts reach and others do not.
  std::vector<double> lowest;
  for (const auto& target : run(model, problems, spec, Engine::kReference)) lowest.push_back(target.curve.back().loss);
  std::sort(lowest.begin(), lowest.end());
  spec.stop_loss = (lowest[1] + lowest[2]) / 2;
  const auto reference = run(model, problems, spec, Engine::kReference);
  std::set<int64_t> lengths;
  for (const auto& target : reference) {
    EXPECT_EQ(target.status == editors::FactStatus::kConverged, target.curve.back().loss < spec.stop_loss);
    for (size_t t = 0; t + 1 < target.curve.size(); ++t) EXPECT_GE(target.curve[t].loss, spec.stop_loss);
    EXPECT_EQ(static_cast<size_t>(target.steps) + 1, target.curve.size()) << "no update after the rule is met";
    lengths.insert(target.steps);
  }
  EXPECT_GT(lengths.size(), 1U) << "facts that leave at different steps are what this test is about";
  expect_equal_targets(run(model, problems, spec, Engine::kFast), reference, 1e-7, "all at once");
  expect_equal_targets(run(model, problems, spec, Engine::kFast, 2), reference, 1e-7, "in batches");
}

TEST(Targets, StatusSaysWhetherTheNormLimitHeldTheTargetBack) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  spec.stop_loss = 0;
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    spec.clamp_norm_factor = 0.1;
    for (const auto& target : run(model, problems, spec, engine))
      EXPECT_EQ(target.status, editors::FactStatus::kClamped);
    spec.clamp_norm_factor = 1000;
    for (const auto& target : run(model, problems, spec, engine))
      EXPECT_EQ(target.status, editors::FactStatus::kMaxSteps);
  }
}

TEST(Targets, OtherStopRulesAgreeToo) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  // One label at the looked-up token itself: the random model can be made to say it.
  auto problems = problems_of(model, {editors::FactToken::kLast, {"{} is a"}});
  for (auto& problem : problems)
    for (auto& row : problem.rows) row.labels.resize(1);
  for (const auto rule : {StopRule::kArgmax, StopRule::kMostProbable, StopRule::kProbability}) {
    TargetSpec spec = spec_of({{Site::kMlpDownOut, 3}, {Site::kAttnOut, 3}}, 3);
    if (rule != StopRule::kArgmax) spec.sites.pop_back();
    spec.stop_probability = 0.3;
    spec.stop_rule = rule;
    spec.steps = 30;
    spec.clamp_norm_factor = 50;
    spec.weight_decay = 0;
    spec.kl_factor = 0.001;
    spec.stop_loss = 0;
    spec.patience = 2;
    const auto reference = run(model, problems, spec, Engine::kReference);
    for (const auto& target : reference) {
      EXPECT_EQ(target.status, editors::FactStatus::kConverged) << static_cast<int>(rule);
      EXPECT_GT(target.steps, 1);
    }
    expect_equal_targets(run(model, problems, spec, Engine::kFast), reference, 1e-6,
                         std::to_string(static_cast<int>(rule)));
  }
}

TEST(Targets, HeldVectorsStayAdded) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  for (const auto& spec : {spec_of({{Site::kLayerOut, 1}}, 3), spec_of({{Site::kMlpOut, 1}}, std::nullopt),
                           spec_of({{Site::kMlpOut, 0}}, std::nullopt)}) {
    auto problems = problems_of(model);
    const auto without = run(model, problems, spec, Engine::kFast);
    for (auto& problem : problems) {
      for (size_t row = 0; row < problem.rows.size(); ++row) {
        if (problem.rows[row].lookup > 0)
          problem.held.push_back({row, problem.rows[row].lookup - 1, {testing::random_matrix(1, 32, row)[0]}});
        problem.held.push_back({row, problem.rows[row].lookup + 1, {testing::random_matrix(1, 32, row + 50)[0]}});
      }
    }
    const auto reference = run(model, problems, spec, Engine::kReference);
    expect_equal_targets(run(model, problems, spec, Engine::kFast), reference, 1e-8, hooks::to_string(spec.sites[0]));
    EXPECT_GT(relative_difference(reference[0].delta_D[0], without[0].delta_D[0]), 1e-3) << "they do matter";
  }
}

TEST(Targets, JointProblemsAverageTheirRows) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  auto problems = problems_of(model);
  TargetProblem joint = problems[0];
  joint.rows.insert(joint.rows.end(), problems[3].rows.begin(), problems[3].rows.end());
  for (auto& row : joint.rows) row.weight /= 2;
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  const auto reference = run(model, {joint}, spec, Engine::kReference);
  expect_equal_targets({run(model, {problems[1], joint}, spec, Engine::kFast).at(1)}, reference, 1e-8, "joint");
  const double alone = run(model, {problems[0]}, spec, Engine::kFast)[0].curve[0].nll,
               other = run(model, {problems[3]}, spec, Engine::kFast)[0].curve[0].nll;
  EXPECT_NEAR(reference[0].curve[0].nll, (alone + other) / 2, 1e-9);
}

TEST(Targets, FactsDoNotInfluenceEachOther) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  const auto together = run(model, problems, spec, Engine::kFast);
  for (size_t i = 0; i < problems.size(); ++i) {
    const auto alone = run(model, {problems[i]}, spec, Engine::kFast);
    EXPECT_LT(relative_difference(together[i].target_D[0], alone[0].target_D[0]), 1e-3);
  }
}

TEST(Targets, AFactWithoutANumberFailsAlone) {
  const models::Model model = tiny_model();
  auto problems = problems_of(model);
  problems[1].held.push_back({0, problems[1].rows[0].lookup, {at::full({32}, std::nan(""))}});
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    const auto targets = run(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), engine);
    EXPECT_EQ(targets[1].status, editors::FactStatus::kFailed);
    EXPECT_NE(targets[1].reason.find("not a number"), std::string::npos);
    for (const size_t i : {0U, 2U, 3U}) EXPECT_NE(targets[i].status, editors::FactStatus::kFailed) << i;
  }
}

TEST(Targets, RefusesWhatCannotBeOptimised) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  const auto refused = [&](const std::vector<TargetProblem>& p, const TargetSpec& spec) {
    EditContext context;
    EXPECT_THROW((void)editors::optimise_targets(model, p, spec, context), Error);
  };
  refused(problems, spec_of({}, 3));
  refused(problems, spec_of({{Site::kMlpOut, 1}, {Site::kAttnOut, 2}}, 3));
  refused(problems, spec_of({{Site::kLayerOut, 4}}, 3));
  refused(problems, spec_of({{Site::kLayerOut, 2}}, 1));
  auto bad = problems;
  bad[0].rows[0].lookup = 99;
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
  bad = problems;
  bad[0].rows[0].labels[0].second = 5000;  // a token of another vocabulary
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
  bad = problems;
  bad[0].rows.clear();
  refused(bad, spec_of({{Site::kLayerOut, 1}}, 3));
}

TEST(Targets, CanBeCancelledAndReportsProgress) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  for (const auto engine : {Engine::kFast, Engine::kReference}) {
    EditContext context;
    context.engine = engine;
    double done = 0;
    int updates = 0;
    context.progress = [&](const ProgressUpdate& update) {
      EXPECT_EQ(update.phase, "targets");
      done = update.done;
      ++updates;
    };
    (void)editors::optimise_targets(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), context);
    EXPECT_EQ(done, 4);
    EXPECT_GE(updates, engine == Engine::kFast ? 6 : 4);  // steps as well as facts
    context.cancel.request();
    EXPECT_THROW((void)editors::optimise_targets(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), context), Error);
    EXPECT_TRUE(model.hooks().at({Site::kLayerOut, 1}).idle());
  }
}

}  // namespace targets_test
}  // namespace emend
