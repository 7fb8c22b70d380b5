// The training steps on tiny models: gradients against finite differences, the box, failure and cancel, packs, devices.
#include <emend/core/error.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/finetune.h>
#include <emend/editors/steps/optimiser.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/spread_plan.h"

namespace emend {
namespace finetune_test {

using editors::EditContext;
using editors::LearningPass;
using editors::LearningRow;
using editors::Objective;
using testing::all_weights;
using testing::changed_weights;
using testing::relative_difference;
using testing::sim;
using testing::tiny_facts;
using testing::tiny_model;

std::vector<LearningRow> tiny_rows(const models::Model& model, Objective objective) {
  std::vector<LearningRow> rows;
  for (const auto& fact : tiny_facts())
    rows.push_back(editors::learning_row(
        editors::render_prompts(model.tokenizer(), fact, editors::ContextTemplates::plain()), objective));
  return rows;
}

std::unique_ptr<editors::Editor> editor(const models::Model& model, const std::string& name,
                                        const std::string& hparams) {
  return editors::make_editor(name, hparams::parse_hparams(hparams, "test.yaml"), model);
}

const char* const kFew = "layers: [1, 2]\nnum_steps: 4\nlr: 5e-3\n";

// A padding token that was added to the tokenizer alone is none of the model's.
TEST(LearningPass, LabelsBeyondTheVocabularyAreRefused) {
  const models::Model model = tiny_model();
  auto rows = tiny_rows(model, Objective::kPromptLast);
  rows[0].labels.emplace_back(rows[0].labels[0].first, model.vocab_size());
  EXPECT_THROW((void)LearningPass(model, rows, 1), Error);
}

TEST(LearningPass, GradientAgreesWithFiniteDifferences) {
  for (const char* family : {"llama", "gpt2"}) {
    for (const auto objective : {Objective::kPromptLast, Objective::kTargetNew}) {
      models::Model model = tiny_model({.family = family, .dtype = at::kDouble});
      const std::string name = model.edit_site(1).weight_name;
      const LearningPass pass(model, tiny_rows(model, objective), 1);
      const std::vector<double> weights = {0.1, 0.2, 0.3, 0.4};
      const auto loss = [&] {
        double sum = 0;
        const auto measured = pass.measure();
        for (size_t r = 0; r < weights.size(); ++r) sum += weights[r] * measured.nll[r];
        return sum;
      };
      at::Tensor gradient;
      {
        const editors::TrainableScope scope({model.weight(name)});
        gradient = pass.run(weights, [&] { return scope.weights(); }).gradients.at(0);
      }
      EXPECT_FALSE(model.weight(name).requires_grad());
      const double h = 1e-6;
      at::Tensor weight = model.weight(name);
      for (int64_t i = 0; i < 48; i += 11) {
        const int64_t row = i % weight.size(0), column = (i * 5) % weight.size(1);
        const double kept = weight[row][column].item<double>();
        weight[row][column] = kept + h;
        const double up = loss();
        weight[row][column] = kept - h;
        const double down = loss();
        weight[row][column] = kept;
        EXPECT_NEAR((up - down) / (2 * h), gradient[row][column].item<double>(), 1e-7) << family << " " << i;
      }
    }
  }
}

TEST(LearningPass, EnginesAgree) {
  models::Model model = tiny_model({.dtype = at::kDouble});
  const auto rows = tiny_rows(model, Objective::kTargetNew);
  const std::vector<double> weights(rows.size(), 0.25);
  const editors::TrainableScope scope({model.weight(model.edit_site(2).weight_name)});
  const auto run = [&](int first, editors::Engine engine) {
    return LearningPass(model, rows, first, engine).run(weights, [&] { return scope.weights(); });
  };
  const auto reference = run(0, editors::Engine::kReference), whole = run(0, editors::Engine::kFast),
             part = run(2, editors::Engine::kFast);
  for (const auto& got : {whole, part}) {
    EXPECT_LT(relative_difference(got.gradients[0], reference.gradients[0]), 1e-12);
    for (size_t r = 0; r < rows.size(); ++r) EXPECT_NEAR(got.nll[r], reference.nll[r], 1e-12);
  }
}

TEST(LearningPass, RefusesRowsThatCannotBeLearnt) {
  const models::Model model = tiny_model();
  EXPECT_THROW(LearningPass(model, {}, 0), Error);
  EXPECT_THROW(LearningPass(model, {{{1, 2}, {}}}, 0), Error);
  EXPECT_THROW(LearningPass(model, {{{1, 2}, {{2, 5}}}}, 0), Error);
}

// Three steps written out by hand.
TEST(Optimiser, AdamAndAdamW) {
  for (const bool decoupled : {false, true}) {
    at::Tensor value = at::tensor({1.0, -2.0}, at::kDouble);
    editors::Adam adam({.lr = 0.1, .weight_decay = 0.5, .decoupled = decoupled});
    double w[2] = {1, -2}, m[2] = {0, 0}, v[2] = {0, 0};
    for (int t = 1; t <= 3; ++t) {
      const at::Tensor gradient = at::tensor({0.3 * t, -0.1}, at::kDouble);
      adam.step({value}, {gradient});
      for (int i = 0; i < 2; ++i) {
        double g = gradient[i].item<double>();
        if (decoupled) {
          w[i] -= 0.1 * 0.5 * w[i];
        } else {
          g += 0.5 * w[i];
        }
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.999 * v[i] + 0.001 * g * g;
        w[i] -= 0.1 * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
        EXPECT_NEAR(value[i].item<double>(), w[i], 1e-12);
      }
    }
  }
}

TEST(Finetune, StaysInTheBox) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    const auto before = all_weights(model);
    EditContext context;
    const auto ft = editor(model, "ft-l", std::string(kFew) + "norm_constraint: 2e-3\n");
    const auto result = ft->edit(model, tiny_facts(), context);
    double largest = 0;
    for (const auto& name : changed_weights(model, before)) {
      const double change = (model.weight(name).detach() - before.at(name)).abs().max().item<double>();
      EXPECT_LE(change, 2e-3 * (1 + 1e-3)) << name;
      largest = std::max(largest, change);
    }
    EXPECT_GT(largest, 1.9e-3) << "the limit was reached";
    EXPECT_EQ(changed_weights(model, before).size(), std::string(family) == "gpt2" ? 4U : 2U) << "with the bias";
    for (const auto& outcome : result.outcomes) EXPECT_LT(outcome.curve.back().loss, outcome.curve.front().loss);
  }
}

TEST(Finetune, EveryVariantLowersTheLossAndItsPackGivesTheSameBytes) {
  const testing::TemporaryFolder folder("finetune");
  for (const char* name : {"ft", "ft-l", "ft-m", "ft-w"})
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      models::Model model = tiny_model({.family = "gpt2", .dtype = dtype}),
                    fresh = tiny_model({.family = "gpt2", .dtype = dtype});
      EditContext context;
      const auto ft = editor(model, name, std::string(kFew) + "batch_size: 3\nnorm_constraint: 0.1\n");
      const editors::EditResult result = ft->edit(model, tiny_facts(), context);
      for (const auto& outcome : result.outcomes)
        if (dtype == at::kFloat && std::string(name) != "ft-w") {
          EXPECT_LT(outcome.curve.back().loss, outcome.curve.front().loss) << name;
        }
      editors::save_pack(folder.path() / "edit.safetensors",
                         editors::EditPack::from_results(model, std::span(&result, 1), tiny_facts()));
      editors::apply_pack(fresh, editors::load_pack(folder.path() / "edit.safetensors"))->commit();
      EXPECT_TRUE(changed_weights(fresh, all_weights(model)).empty()) << name;
    }
}

TEST(Finetune, FailureAndCancelLeaveEveryByte) {
  models::Model model = tiny_model({.family = "gpt2"});
  const auto before = all_weights(model);
  EditContext context;
  int calls = 0;
  context.progress = [&](const ProgressUpdate&) {
    if (++calls == 3) context.cancel.request();
  };
  EXPECT_THROW((void)editor(model, "ft", kFew)->edit(model, tiny_facts(), context), Error);
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(changed_weights(model, before).empty());

  EditContext diverging;
  const auto far = [&] {
    (void)editor(model, "ft", "layers: [1]\nnum_steps: 10\nlr: 1e30\n")->edit(model, tiny_facts(), diverging);
  };
  (void)testing::error_of(far, ErrorClass::kNumeric);
  EXPECT_TRUE(changed_weights(model, before).empty());
  for (const auto& name : model.weight_names()) EXPECT_FALSE(model.weight(name).requires_grad()) << name;
  EXPECT_TRUE(editor(model, "ft", kFew)->edit(model, {}, diverging).deltas.empty());
}

TEST(Finetune, OptionsWorkOrAreRefused) {
  const models::Model model = tiny_model();
  for (const char* bad : {"layers: [1]\nkl_factor: 0.1\n", "layers: [4]\n", "layers: [2, 1]\n",
                          "layers: [1]\nwd_power_law: [1]\n", "layers: [1]\nobjective_optimization: promptz_last\n",
                          "layers: [1]\nrewrite_module_tmp: model.layers.{}.nothing\n",
                          "layers: [1]\nwd_power_law: [-0.8, 0.1]\nweight_decay: 0.1\n",
                          "layers: [1]\nscore_padding: true\nobjective_optimization: target_new\n"})
    EXPECT_THROW((void)editor(model, "ft", bad), Error) << bad;
  editors::FineTuneHparams h;
  h.wd_power_law = {-0.87028798, 0.15589562};
  EXPECT_NEAR(h.decay(10000), std::pow(10000.0, -0.87028798) * std::exp(0.15589562), 1e-12);
  // Another module than the MLP's: all its weights.
  models::Model gpt2 = tiny_model({.family = "gpt2"});
  const auto before = all_weights(gpt2);
  EditContext context;
  (void)editor(gpt2, "ft", "layers: [1]\nnum_steps: 2\nrewrite_module_tmp: \"transformer.h.{}.attn\"\n")
      ->edit(gpt2, tiny_facts(), context);
  EXPECT_EQ(changed_weights(gpt2, before).size(), 4U);
}

TEST(Finetune, SplitModelGivesTheSameWeights) {
  models::Model whole = tiny_model(),
                split = tiny_model({.place = testing::over_devices({sim(0), sim(1), sim(1), sim(2)})});
  for (const char* name : {"ft-l", "ft-m"}) {
    EditContext one, two;
    const auto a = editor(whole, name, kFew)->edit(whole, tiny_facts(), one);
    const auto b = editor(split, name, kFew)->edit(split, tiny_facts(), two);
    ASSERT_EQ(a.deltas.size(), b.deltas.size());
    for (size_t i = 0; i < a.deltas.size(); ++i)
      EXPECT_LT(relative_difference(b.deltas[i].matrix(), a.deltas[i].matrix()), 1e-4) << name;
  }
}

}  // namespace finetune_test
}  // namespace emend
