// EAMET: MEMIT to the bit without its terms, and with them its loss, its beginning and its gradient against the
// formulas written out plainly.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/sequential_editors.h"

namespace emend {
namespace eamet_test {

using editors::Engine;
using testing::relative_difference;
using testing::tiny_facts;

const std::string kShared = "v_num_grad_steps: 6\nv_lr: 0.1\nclamp_norm_factor: 4\n";
const std::string kNoTerms = "cs_factor: 0\nmse_factor: 0\n";

editors::Trace edit(const std::string& name, const std::string& yaml, models::Model& model, Engine engine,
                    const std::vector<datasets::Fact>& facts) {
  auto statistics = testing::tiny_statistics(model);
  editors::Trace trace;
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  context.statistics = &statistics;
  context.trace = &trace;
  context.engine = engine;
  context.max_facts_per_batch = 1;  // as EAMET has them: products of other sizes round differently
  (void)testing::tiny_editor(name, yaml, model)->edit(model, facts, context);
  return trace;
}

TEST(Eamet, WithoutItsTermsIsMemitToTheBit) {
  for (const Engine engine : {Engine::kReference, Engine::kFast}) {
    const std::string same = kShared + "layers: [1, 2]\nv_weight_decay: 0\nv_stop_loss: 0.05\n";
    auto memit = testing::tiny_model(), eamet = testing::tiny_model();
    (void)edit("memit", same + "mom2_update_weight: 2\n", memit, engine, tiny_facts());
    (void)edit("eamet", same + "mom2_update_weight: [2]\ndelta_init: zero\n" + kNoTerms, eamet, engine, tiny_facts());
    EXPECT_TRUE(testing::changed_weights(eamet, testing::all_weights(memit)).empty());
    EXPECT_FALSE(testing::changed_weights(eamet, testing::all_weights(testing::tiny_model())).empty());
  }
}

// One number after the other.
using Vector = std::vector<double>;
Vector vector_of(const at::Tensor& x) {
  const at::Tensor dense = x.to(at::kDouble).contiguous();
  return {dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel()};
}
double product(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
double cosine(const Vector& a, const Vector& b) {
  return product(a, b) / std::sqrt(product(a, a) * product(b, b));
}
Vector shares(const Vector& x, double tau) {
  Vector p;
  for (const double value : x) p.push_back(std::exp(value / tau));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

constexpr double kTau = 0.2, kOrder = 0.7, kAmount = 1.3;
const std::string kTerms = "tau: 0.2\ncs_factor: 0.7\nmse_factor: 1.3\n";

double misalignment(const Vector& delta, const std::vector<Vector>& earlier, const Vector& of_keys) {
  if (earlier.empty()) return 0;
  Vector of_deltas;
  for (const Vector& other : earlier) of_deltas.push_back(cosine(delta, other));
  const Vector p = shares(of_keys, kTau), q = shares(of_deltas, kTau);
  double order = 0, amount = 0;
  for (size_t j = 0; j < p.size(); ++j) order += p[j] * std::log((p[j] + 1e-8) / (q[j] + 1e-8));
  std::vector<size_t> nearest(p.size());
  std::iota(nearest.begin(), nearest.end(), size_t{0});
  std::sort(nearest.begin(), nearest.end(), [&](size_t a, size_t b) { return of_keys[a] > of_keys[b]; });
  nearest.resize(std::min<size_t>(nearest.size(), 50));
  Vector near;
  for (const size_t j : nearest) near.push_back(of_keys[j]);
  const Vector weight = shares(near, kTau);
  for (size_t n = 0; n < near.size(); ++n) amount += weight[n] * std::pow(near[n] - of_deltas[nearest[n]], 2);
  return kOrder * order + kAmount * amount;
}

// What a fact's alignment is made from, of a recorded edit of one layer.
struct Recorded {
  std::vector<Vector> earlier;  // δ of the facts before it
  Vector of_keys;               // cosines of its key and theirs
  double key_norm = 0;
};
Recorded recorded(const editors::Trace& trace, const std::vector<datasets::Fact>& facts, size_t fact) {
  Recorded out;
  const at::Tensor keys_FN = trace.at("layer.2.keys");
  const auto key = [&](size_t i) { return vector_of(keys_FN.select(1, static_cast<int64_t>(i))); };
  for (size_t j = 0; j < fact; ++j) {
    const std::string prefix = "z." + std::to_string(facts[j].case_id) + ".";
    out.earlier.push_back(vector_of(trace.at(prefix + "target") - trace.at(prefix + "target_init")));
    out.of_keys.push_back(cosine(key(fact), key(j)));
  }
  out.key_norm = std::sqrt(product(key(fact), key(fact)));
  return out;
}

void expect_losses(const editors::Trace& trace, const std::vector<datasets::Fact>& facts, size_t fact, double decay) {
  const Recorded from = recorded(trace, facts, fact);
  const std::string prefix = "z." + std::to_string(facts[fact].case_id) + ".";
  const at::Tensor steps = trace.at(prefix + "delta_steps"), losses = trace.at(prefix + "losses"),
                   initial = trace.at(prefix + "target_init");
  EXPECT_LT(relative_difference(steps[0], initial * from.key_norm / initial.norm()), 1e-9) << prefix;
  for (int64_t it = 0; it < losses.size(0); ++it) {
    const double expected = decay * steps[it].norm().item<double>() / initial.norm().item<double>() +
                            misalignment(vector_of(steps[it]), from.earlier, from.of_keys);
    EXPECT_NEAR(losses[it][3].item<double>(), expected, 1e-6 * expected) << prefix << " step " << it;
    EXPECT_NEAR(losses[it][0].item<double>(), losses[it].slice(0, 1, 4).sum().item<double>(), 1e-9);
  }
}

TEST(Eamet, EachTargetIsPulledAsTheFormulasSay) {
  const auto facts = tiny_facts();
  const std::string yaml = kShared + "layers: [2]\nv_weight_decay: 0.3\nmom2_update_weight: [2]\n";
  for (const Engine engine : {Engine::kReference, Engine::kFast}) {
    auto model = testing::tiny_model({.dtype = at::kDouble}), plain = testing::tiny_model({.dtype = at::kDouble});
    const auto with = edit("eamet", yaml + kTerms, model, engine, facts);
    const auto without = edit("eamet", yaml + kNoTerms, plain, engine, facts);
    for (size_t fact = 0; fact < facts.size(); ++fact) expect_losses(with, facts, fact, 0.3);
    for (size_t fact = 1; fact < facts.size(); ++fact) {
      const Recorded from = recorded(with, facts, fact);
      const std::string prefix = "z." + std::to_string(facts[fact].case_id) + ".";
      Vector delta = vector_of(with.at(prefix + "delta_steps")[0]), slope;
      for (double& x : delta) {
        const double here = x, step = 1e-6;
        x = here + step;
        const double above = misalignment(delta, from.earlier, from.of_keys);
        x = here - step;
        slope.push_back((above - misalignment(delta, from.earlier, from.of_keys)) / (2 * step));
        x = here;
      }
      const at::Tensor got = with.at(prefix + "grad_steps")[0] - without.at(prefix + "grad_steps")[0];
      EXPECT_LT(relative_difference(got, at::tensor(slope, at::kDouble)), 1e-5) << prefix;
    }
  }
}

TEST(Eamet, OnlyTheFiftyNearestKeysSayHowMuch) {
  std::vector<datasets::Fact> facts;
  for (int64_t i = 0; i < 53; ++i)
    facts.push_back(
        testing::make_fact(i, "{} is", std::string(1, static_cast<char>('A' + i % 26)) + std::to_string(i * i), "Po"));
  auto model = testing::tiny_model({.dtype = at::kDouble});
  const auto trace = edit("eamet",
                          "layers: [2]\nv_num_grad_steps: 2\nv_lr: 0.1\nv_weight_decay: 0.3\n"
                          "mom2_update_weight: [2]\n" +
                              kTerms,
                          model, Engine::kFast, facts);
  for (const size_t fact : {size_t{50}, size_t{52}}) expect_losses(trace, facts, fact, 0.3);
}

TEST(Eamet, EveryLayerHasItsWeight) {
  const auto model = testing::tiny_model();
  editors::LayerProblem problem = testing::made_up(model, 1, 3);
  const auto written = [&](const std::string& name, const std::string& yaml) {
    return testing::solved(*testing::tiny_editor(name, "layers: [1, 2]\nmom2_update_weight: " + yaml + "\n", model),
                           problem);
  };
  for (const size_t index : {size_t{0}, size_t{1}}) {
    problem.index = index;
    EXPECT_TRUE(at::equal(written("eamet", "[2, 500]"), written("memit", index == 0 ? "2" : "500")));
    EXPECT_TRUE(at::equal(written("eamet", "[9]"), written("memit", "9")));
  }
}

TEST(Eamet, RefusesWhatItDoesNotCarry) {
  const auto model = testing::tiny_model();
  for (const std::string bad : {"weight_decay_method: fix_ks\n", "mom2_update_weight: [1, 2, 3]\n",
                                "mom2_update_weight: []\n", "tau: 0\n", "delta_init: random\n"})
    EXPECT_THROW((void)testing::tiny_editor("eamet", "layers: [1, 2]\n" + bad, model), Error) << bad;
}

}  // namespace eamet_test
}  // namespace emend
