// LyapLock, SUIT's keys and CrispEdit: against the published steps written out plainly, identities, and what is kept
// from batch to batch.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/datasets/fact.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/curvature.h>
#include <emend/editors/steps/locate.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/error_of.h"
#include "support/sequential_editors.h"

namespace emend {
namespace lifelong_editors_test {

using editors::LayerProblem;
using editors::LocateEditor;
using testing::kWidth;
using testing::made_up;
using testing::random_matrix;
using testing::random_spd;
using testing::relative_difference;
using testing::solved;
using testing::tiny_editor;

const std::string kLocate = testing::sequential_yaml();

// One layer of the public code with its names and its settings V = 1, b = 0, a = "1_sqrtD", Z = zmax = "1sqrtD".
struct PublicLyapLock {
  double lambda, alpha;
  at::Tensor w0, k0k0_T;
  at::Tensor pre_vk = {}, pre_kk = {};
  double D_base = 0, a = 0, Z = 0, zmax = 0;
  int cnt = 0;

  [[nodiscard]] double fro(const at::Tensor& w) const {
    const at::Tensor v0k0_T = w0.mm(k0k0_T), v0v0_T = v0k0_T.mm(w0.t());
    return (k0k0_T.mm(w.t()).mm(w).trace() - 2 * v0k0_T.mm(w.t()).trace() + v0v0_T.trace()).item<double>();
  }

  at::Tensor step(const at::Tensor& w, const at::Tensor& k, const at::Tensor& resid) {
    const at::Tensor v0k0_T = w0.mm(k0k0_T);
    at::Tensor left, system;
    if (cnt == 0) {
      left = resid.mm(k.t()) + lambda * (v0k0_T - w.mm(k0k0_T));
      system = k.mm(k.t()) + lambda * k0k0_T;
    } else {
      left = resid.mm(k.t()) + a * Z * lambda * (v0k0_T - w.mm(k0k0_T)) + pre_vk - w.mm(pre_kk);
      system = k.mm(k.t()) + a * Z * lambda * k0k0_T + pre_kk;
    }
    const at::Tensor written = w + left.mm(at::inverse(system).t());
    if (cnt++ == 0) {
      D_base = fro(written);
      a = 1 / std::sqrt(alpha * D_base);
      Z = zmax = std::sqrt(alpha * D_base);
    }
    Z = std::max(Z + a * (fro(written) - alpha * D_base), zmax);
    const at::Tensor given = written.mm(k);
    pre_vk = pre_vk.defined() ? pre_vk + given.mm(k.t()) : given.mm(k.t());
    pre_kk = pre_kk.defined() ? pre_kk + k.mm(k.t()) : k.mm(k.t());
    return written;
  }
};

TEST(LyapLock, FollowsThePublicCodeBatchByBatch) {
  const auto model = testing::tiny_model();
  for (const double alpha : {0.5, 3.0, 60.0}) {
    const auto editor =
        tiny_editor("lyaplock", kLocate + "mom2_update_weight: 2\nalpha: " + std::to_string(alpha) + "\n", model);
    LayerProblem problem = made_up(model, 1, 3);
    const at::Tensor w0 = problem.weight_DF.to(at::kDouble).clone();
    PublicLyapLock expected{2, alpha, w0, problem.moment.cov_FF()};
    at::Tensor weight = w0.clone(), keys, values;
    double longest = 0;
    for (uint64_t batch = 0; batch < 6; ++batch) {
      const LayerProblem next = made_up(model, 10 + 2 * batch, 3);
      problem.keys_FN = next.keys_FN;
      problem.residual_DN = next.residual_DN;
      problem.weight_DF = weight;
      const at::Tensor want = expected.step(weight, problem.keys_FN, problem.residual_DN);
      const auto update = dynamic_cast<const LocateEditor&>(*editor).update(problem);
      weight = weight + update.delta.matrix();
      ASSERT_LT(relative_difference(weight - w0, want - w0), 1e-8) << "alpha " << alpha << ", batch " << batch;
      longest = std::max(longest, update.carries[1].item<double>());
      const at::Tensor given = weight.mm(problem.keys_FN).mm(problem.keys_FN.t());
      keys = keys.defined() ? at::cat({keys, problem.keys_FN}, 1) : problem.keys_FN;
      values = values.defined() ? values + given : given;
      editor->load_state({{"keys.0", keys},
                          {"values.0", values},
                          {"carried.0", update.carries},
                          {"original." + problem.site.weight_name, w0.to(at::kFloat)}});
    }
    EXPECT_EQ(longest > 1.01, alpha < 60) << "the queue of alpha " << alpha << " has come to " << longest;
  }
}

// Facts in two batches, then the memory of an editor.
std::map<std::string, at::Tensor> edited_state(const std::string& name, const std::string& yaml, models::Model& model) {
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  context.statistics = &statistics;
  const auto editor = tiny_editor(name, yaml, model);
  const auto facts = testing::tiny_facts();
  (void)editor->edit(model, std::span(facts).subspan(0, 2), context);
  (void)editor->edit(model, std::span(facts).subspan(2), context);
  return editor->state();
}

TEST(LyapLock, RemembersWhatTheWeightsGaveAndTheQueue) {
  testing::TinyEdit tiny;
  const auto editor = tiny_editor("lyaplock", kLocate + "mom2_update_weight: 3\n", tiny.model);
  (void)editor->edit(tiny.model, testing::tiny_facts(), tiny.context);
  const auto state = editor->state();
  const at::Tensor keys = state.at("keys.0").to(at::kDouble);
  const at::Tensor weight = tiny.model.weight(tiny.model.edit_site(1).weight_name).to(at::kDouble);
  EXPECT_LT(relative_difference(state.at("values.0"), weight.mm(keys).mm(keys.t())), 1e-6);
  EXPECT_EQ(state.at("carried.0")[1].item<double>(), 1) << "nothing has been damaged before the first batch";
  const auto later = edited_state("lyaplock", kLocate + "mom2_update_weight: 3\nalpha: 0.01\n", tiny.model);
  EXPECT_GT(later.at("carried.0")[0].item<double>(), 0);
  EXPECT_GT(later.at("carried.0")[1].item<double>(), 50) << "1 + P/(alpha P) - 1";
}

// Keys of the bundled facts' subjects, as SUIT's directions are taken from.
TEST(Suit, KeysLoseWhatNamesShare) {
  auto model = testing::tiny_model();
  const auto editor = tiny_editor("memit", kLocate + "mom2_update_weight: 3\nsuit: 0.5\n", model);
  const LayerProblem problem = made_up(model, 1, 5);
  const at::Tensor u = std::get<0>(at::linalg_qr(random_matrix(kWidth, 4, 3)));
  editor->load_state({{"suit.0", u}, {"suit.1", u}});
  const at::Tensor &k = problem.keys_FN, own = k - u.mm(u.t()).mm(k);
  const at::Tensor expected =
      problem.residual_DN.mm(at::linalg_solve(problem.moment.cov_FF() * 3 + own.mm(own.t()), own).t());
  EXPECT_LT(relative_difference(solved(*editor, problem), expected), 1e-10);
  // Where every direction may be written, nothing happens along those that names share.
  const auto free = tiny_editor("alphaedit", kLocate + "nullspace_threshold: 1e9\nL2: 2\nsuit: 0.5\n", model);
  free->load_state({{"suit.0", u}, {"suit.1", u}});
  const at::Tensor delta = solved(*free, problem);
  EXPECT_GT(delta.norm().item<double>(), 1e-3);
  EXPECT_LT(delta.mm(u).norm().item<double>(), 1e-12 * delta.norm().item<double>());
}

TEST(Suit, DirectionsAreThoseOfManySubjectsOnTheUneditedModel) {
  auto model = testing::tiny_model();
  const auto facts = datasets::load_bundled_facts().facts;
  std::vector<editors::PromptRow> rows;
  for (const auto& fact : facts)
    rows.push_back(editors::render_prompts(model.tokenizer(), fact, editors::ContextTemplates::plain(), {}).rows[0]);
  editors::EditContext plain;
  const at::Tensor keys =
      editors::collect_at_lookup(model, rows, {{hooks::Site::kMlpDownIn, 2}}, plain)[0].to(at::kDouble).t();
  const auto [vectors, sigma, rest] = at::linalg_svd(keys, false);
  const at::Tensor held = sigma.square().cumsum(0) / sigma.square().sum();
  const auto state = edited_state("memit-seq", kLocate + "mom2_update_weight: 3\nsuit: 0.9\n", model);
  const at::Tensor u = state.at("suit.1").to(at::kDouble);
  EXPECT_EQ(u.size(1), held.lt(0.9).sum().item<int64_t>() + 1);
  const at::Tensor lead = vectors.narrow(1, 0, u.size(1));
  EXPECT_LT(relative_difference(u.mm(u.t()), lead.mm(lead.t())), 1e-5);
  EXPECT_LT(u.t().mm(state.at("keys.1").to(at::kDouble)).norm().item<double>(),
            1e-4 * state.at("keys.1").norm().item<double>())
      << "what is remembered are the keys that were written";
}

// The projector written out: eigenvectors of the Kronecker product itself.
TEST(FlatDirections, AreThoseOfTheKroneckerProduct) {
  const editors::Curvature curvature{random_spd(5, 1) * 7, random_spd(4, 2) * 7, 7};
  const at::Tensor full = at::kron(curvature.gradients_DD / 7, curvature.inputs_FF / 7);
  const auto [values, vectors] = at::linalg_eigh(full);
  const at::Tensor held = values.flip(0).cumsum(0) / values.sum(), x = random_matrix(4, 5, 3);
  for (const double energy : {0.3, 0.8, 0.95}) {
    const auto flat = editors::FlatDirections::of(curvature, energy);
    const int64_t protectedly = held.lt(energy).sum().item<int64_t>() + 1;
    const at::Tensor free = vectors.narrow(1, 0, 20 - protectedly);
    const at::Tensor expected = free.mm(free.t()).mm(x.reshape({20, 1})).reshape({4, 5});
    EXPECT_LT(relative_difference(flat.project(x), expected), 1e-10) << energy;
    EXPECT_LT(relative_difference(flat.project(flat.project(x)), flat.project(x)), 1e-12);
  }
  const at::Tensor none = editors::FlatDirections::of(curvature, 1).project(random_matrix(4, 5, 3));
  EXPECT_EQ(none.abs().max().item<double>(), 0) << "everything is protected";
}

// B is that of each token's gradient: dLoss/dW is Σ g kᵀ, and one token at a time gives g kᵀ itself.
TEST(Curvature, IsTheSumOverTokensOfTheirGradients) {
  const models::Model model = testing::tiny_model({.dtype = at::kDouble});
  const std::vector<std::vector<int64_t>> text = {{72, 101, 108, 108, 111}, {79, 115}, {65}};
  const auto rows = editors::text_learning_rows(text);
  ASSERT_EQ(rows.size(), 2U) << "one token predicts nothing";
  editors::EditContext context;
  const auto both = editors::curvature_of(model, rows, {1, 2}, context);
  EXPECT_EQ(both[0].tokens, 5);
  const auto first = editors::curvature_of(model, {rows[0]}, {1, 2}, context),
             second = editors::curvature_of(model, {rows[1]}, {1, 2}, context);
  for (size_t i = 0; i < 2; ++i) {
    const auto sum = first[i].with(second[i]);
    EXPECT_LT(relative_difference(both[i].inputs_FF, sum.inputs_FF), 1e-12);
    EXPECT_LT(relative_difference(both[i].gradients_DD, sum.gradients_DD), 1e-12);
  }
  // A row of two tokens has one gradient: ‖dLoss/dW‖² = (k·k)(g·g) = tr A · tr B.
  const at::Tensor weight = model.weight(model.edit_site(2).weight_name);
  const editors::TrainableScope scope({weight});
  const auto pass =
      editors::LearningPass(model, {rows[1]}, 1).run(std::vector<double>{1.0}, [&] { return scope.weights(); });
  EXPECT_NEAR(pass.gradients[0].square().sum().item<double>(),
              (second[1].inputs_FF.trace() * second[1].gradients_DD.trace()).item<double>(),
              1e-9 * pass.gradients[0].square().sum().item<double>());
}

const std::string kCrisp = "layers: [1, 2]\nnum_steps: 8\nlr: 5e-3\ntext_tokens: 128\nenergy_threshold: ";

TEST(CrispEdit, LearnsLessTheMoreIsProtected) {
  double before = -1;
  for (const char* energy : {"0.99", "0.8", "0.1"}) {
    auto model = testing::tiny_model();
    editors::EditContext context;
    const auto result =
        tiny_editor("crispedit", kCrisp + energy + "\n", model)->edit(model, testing::tiny_facts(), context);
    double fell = 0;
    for (const auto& outcome : result.outcomes) fell += outcome.curve.front().nll - outcome.curve.back().nll;
    EXPECT_GT(fell, before + 1e-3) << energy;
    before = std::max(fell, 0.0);
  }
}

TEST(CrispEdit, GoesOnFromItsMemory) {
  const auto facts = testing::tiny_facts();
  const std::span<const datasets::Fact> span(facts);
  editors::EditContext context;
  auto straight = testing::tiny_model(), resumed = testing::tiny_model(), alone = testing::tiny_model();
  const auto one = tiny_editor("crispedit", kCrisp + "0.8\n", straight);
  (void)one->edit(straight, span.subspan(0, 2), context);
  const auto memory = one->state();
  (void)one->edit(straight, span.subspan(2), context);
  const auto first = tiny_editor("crispedit", kCrisp + "0.8\n", resumed);
  (void)first->edit(resumed, span.subspan(0, 2), context);
  const auto second = tiny_editor("crispedit", kCrisp + "0.8\n", resumed);
  second->load_state(memory);
  (void)second->edit(resumed, span.subspan(2), context);
  EXPECT_TRUE(testing::changed_weights(resumed, testing::all_weights(straight)).empty());
  EXPECT_THROW(second->load_state({{"inputs.0", memory.at("inputs.0")}}), Error);
  // The facts' own tokens have joined: as many as their targets have.
  double labels = 0;
  for (const auto& fact : facts)
    labels += static_cast<double>(
        editors::render_prompts(straight.tokenizer(), fact, editors::ContextTemplates::plain(), {}).target_ids.size());
  const auto disabled = tiny_editor("crispedit", kCrisp + "0.8\nedit_cache_style: disable\n", alone);
  (void)disabled->edit(alone, facts, context);
  EXPECT_EQ(one->state().at("tokens.0").item<double>(), disabled->state().at("tokens.0").item<double>() + labels);
}

TEST(CrispEdit, TrainsTheRewrittenMatrixAlone) {
  const auto model = testing::tiny_model();
  EXPECT_NO_THROW(
      (void)tiny_editor("crispedit", "layers: [1]\nrewrite_module_tmp: model.layers.{}.mlp.down_proj.weight\n", model));
  for (const char* bad : {"layers: [1]\nrewrite_module_tmp: model.layers.{}.mlp.up_proj\n", "layers: [9]\n",
                          "layers: [1]\nobjective_optimization: prompt_last\n"})
    EXPECT_THROW((void)tiny_editor("crispedit", bad, model), Error) << bad;
  for (const std::string all_or_nothing : {"0", "1", "-0.5", "1.5"})
    testing::expect_refused([&] { (void)tiny_editor("crispedit", kCrisp + all_or_nothing + "\n", model); },
                            ErrorClass::kInvalidArgument, {"energy_threshold"});
  // GPT-2 has a bias beside it, and stores the matrix the other way round.
  auto gpt2 = testing::tiny_model({.family = "gpt2"});
  const auto weights = testing::all_weights(gpt2);
  editors::EditContext context;
  const auto result = tiny_editor("crispedit", kCrisp + "0.8\n", gpt2)->edit(gpt2, testing::tiny_facts(), context);
  for (const auto& outcome : result.outcomes) EXPECT_LT(outcome.curve.back().nll, outcome.curve.front().nll);
  EXPECT_EQ(testing::changed_weights(gpt2, weights).size(), 2U);
}

}  // namespace lifelong_editors_test
}  // namespace emend
