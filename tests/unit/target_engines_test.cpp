// Both engines find the same targets, which are those of the loss written down once more.
#include <ATen/ATen.h>
#include <emend/editors/steps/targets.h>
#include <emend/hooks/hook_session.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/spread_plan.h"
#include "support/target_runs.h"

namespace emend {
namespace target_engines_test {

using editors::Engine;
using editors::StopRule;
using editors::Target;
using editors::TargetProblem;
using editors::TargetSpec;
using hooks::Site;
using testing::expect_engines_agree;
using testing::expect_equal_targets;
using testing::optimised;
using testing::problems_of;
using testing::relative_difference;
using testing::spec_of;
using testing::tiny_model;

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
        const std::vector<int64_t> batches = bos ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 3};
        (void)expect_engines_agree(model, problems, spec, 1e-8, std::string(family) + ", " + name, batches);
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
  const auto reference = expect_engines_agree(model, problems, spec, 1e-8, "a sketch", {0, 3});
  for (size_t i = 0; i < problems.size(); ++i) {
    TargetProblem sketch = problems[i];
    sketch.rows = {sketch.rows[0], sketch.rows[2]};
    for (auto& row : sketch.rows) row.weight = 0.5;
    TargetSpec alone = spec;
    alone.sketch_steps = 0;
    alone.steps = 4;
    alone.lr *= 1.5;
    const Target first = optimised(model, {sketch}, alone, Engine::kReference)[0];
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
    const auto one = optimised(model, problems, spec, Engine::kFast);
    for (const int lanes : {2, 3, 20})
      for (const int64_t batch : {0, 1, 4})
        expect_equal_targets(optimised(model, problems, spec, Engine::kFast, batch, lanes), one, 1e-10,
                             std::string(name) + ", " + std::to_string(lanes) + " lanes");
  }
}

TEST(Targets, EnginesAgreeInSinglePrecision) {
  const models::Model model = tiny_model();
  const auto problems = problems_of(model);
  for (const auto& [name, spec] : variants()) (void)expect_engines_agree(model, problems, spec, 2e-3, name);
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
    (void)expect_engines_agree(model, problems, spec, 1e-8, "joint rows");
  }
}

// A text that names its subject again feels δ there too, though only in the row that says so.
TEST(Targets, ChangesAreAddedWhereTheSubjectComesAgain) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  auto problems = problems_of(model);
  const auto plain = problems;
  for (auto& problem : problems) {
    auto& row = problem.rows[0];
    const auto last = static_cast<int64_t>(row.ids.size()) - 1;
    row.also = {row.lookup + 1, last};
    problem.rows.push_back(row);
    problem.rows.back().also = {};
    problem.rows.back().weight = 0.1;
  }
  for (const auto& spec : {spec_of({{Site::kLayerOut, 1}}, 3), spec_of({{Site::kMlpOut, 1}}, std::nullopt)}) {
    const auto again = expect_engines_agree(model, problems, spec, 1e-8, "again");
    EXPECT_GT(relative_difference(again[0].delta_D[0], optimised(model, plain, spec, Engine::kFast)[0].delta_D[0]),
              1e-3);
  }
  problems[0].rows[0].also = {problems[0].rows[0].lookup};
  EXPECT_THROW((void)optimised(model, problems, spec_of({{Site::kLayerOut, 1}}, 3), Engine::kFast), Error);
}

TEST(Targets, EveryLookupTokenWorks) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const TargetSpec spec = spec_of({{Site::kLayerOut, 1}}, 3);
  for (const auto token :
       {editors::FactToken::kSubjectFirst, editors::FactToken::kSubjectFirstAfterLast, editors::FactToken::kLast}) {
    const auto problems = problems_of(model, {token, {"{} is a"}});
    (void)expect_engines_agree(model, problems, spec, 1e-8, std::to_string(static_cast<int>(token)));
  }
}

// No layer between the edited place and the loss: only the looked-up token itself can feel the change.
TEST(Targets, TheLastLayersWorkToo) {
  const models::Model model = tiny_model({.dtype = at::kDouble});
  const auto problems = problems_of(model, {editors::FactToken::kLast, {"{} is a"}});
  for (const auto& spec : {spec_of({{Site::kLayerOut, 1}}, 1), spec_of({{Site::kLayerOut, 3}}, 3),
                           spec_of({{Site::kMlpOut, 3}}, std::nullopt)})
    (void)expect_engines_agree(model, problems, spec, 1e-8, hooks::to_string(spec.sites[0]));
}

TEST(Targets, LossAndGradientAgreeWithFiniteDifferences) {
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family, .dtype = at::kDouble});
    const auto problems = problems_of(model);
    for (const auto& [name, spec] : variants()) {
      const auto targets = optimised(model, problems, spec, Engine::kFast);
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

}  // namespace target_engines_test
}  // namespace emend
