// Edits beside the weights: GRACE, WISE, NeuralDB and IKE on tiny models, their packs, and letting go of them.
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/packs/runtime.h>
#include <emend/editors/packs/stores.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/evaluation/evaluation.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/spread_plan.h"

namespace emend {
namespace runtime_editors_test {

using editors::EditContext;
using editors::EditPack;
using editors::RuntimePart;
using editors::RuntimeScope;
using testing::all_weights;
using testing::changed_weights;
using testing::make_fact;
using testing::sim;
using testing::tiny_editor;
using testing::tiny_facts;
using testing::tiny_model;

const char* const kGrace = "layers: [2]\neps: 0.05\nval_init: warm\nn_iter: 40\nedit_lr: 0.3\n";
const char* const kWise =
    "layers: [0]\nmask_ratio: 0.8\nedit_lr: 2\nn_iter: 200\nnorm_constraint: none\nact_margin: [0.05, 2, 1]\n"
    "act_ratio: 0.9\nloc_prompts: [\"QWXZ 9173 KJVB\"]\n";

const char* const kNeuralDb =
    "layers: [2]\nv_num_grad_steps: 12\nv_lr: 0.2\ngamma: 0.999\ncontext_template_length_params: []\n";

at::Tensor logits(const models::Model& model, const std::string& text) {
  const at::NoGradGuard no_grad;
  return model.forward(models::TokenBatch::from_rows({model.tokenizer().encode_ids(text, true)})).logits.clone();
}

EditPack pack_of(const models::Model& model, const editors::Editor& editor, const editors::EditResult& result) {
  EditPack pack = EditPack::from_results(model, std::span(&result, 1), tiny_facts());
  pack.runtime = editor.runtime();
  return pack;
}

struct Case {
  const char* name;
  const char* hparams;
};
const Case kInside[] = {{"grace", kGrace}, {"wise", kWise}, {"neuraldb", kNeuralDb}};

TEST(RuntimeEditors, WorkWithoutTouchingWeightsAndLetGo) {
  const testing::TemporaryFolder folder("runtime");
  for (const char* family : {"llama", "gpt2"})
    for (const auto& [name, hparams] : kInside) {
      models::Model model = tiny_model({.family = family}), fresh = tiny_model({.family = family});
      const auto before = all_weights(model);
      const std::string prompt = tiny_facts()[0].full_prompt(), other = "QWXZ 9173 KJVB";
      const at::Tensor plain = logits(model, prompt), plain_other = logits(model, other);
      EditContext context;
      auto edit = tiny_editor(name, hparams, model);
      const auto result = edit->edit(model, tiny_facts(), context);
      EXPECT_TRUE(changed_weights(model, before).empty()) << name;
      EXPECT_TRUE(result.deltas.empty());
      for (const auto& outcome : result.outcomes)
        EXPECT_LT(outcome.curve.back().nll, outcome.curve.front().nll) << family << " " << name;
      const at::Tensor edited = logits(model, prompt);
      EXPECT_GT((edited - plain).abs().max().item<double>(), 1e-3) << name;
      EXPECT_TRUE(at::equal(logits(model, other), plain_other))
          << family << " " << name << ": other prompts, byte for byte";

      // Through a file into another model.
      const auto path = folder.path() / "edit.safetensors";
      editors::save_pack(path, pack_of(model, *edit, result));
      const EditPack read = editors::load_pack(path);
      ASSERT_EQ(read.runtime.size(), 1U);
      EXPECT_EQ(read.runtime[0].values, edit->runtime()[0].values);
      EXPECT_THROW((void)editors::apply_pack(fresh, read), Error) << "half an edit";
      {
        RuntimeScope scope;
        editors::apply_pack(fresh, read, {.runtime_apart = true})->commit();
        scope.add(read.runtime[0], fresh, path.string());
        EXPECT_TRUE(at::equal(logits(fresh, prompt), edited)) << name;
      }
      EXPECT_TRUE(at::equal(logits(fresh, prompt), plain)) << name << ": the scope has ended";

      edit->reset();
      EXPECT_TRUE(at::equal(logits(model, prompt), plain)) << name;
      EXPECT_TRUE(edit->runtime().empty());
    }
}

TEST(RuntimeEditors, MemoryGoesOnAndSurvivesFailure) {
  const auto facts = tiny_facts();
  const std::span<const datasets::Fact> span(facts);
  for (const auto& [name, hparams] : kInside) {
    models::Model model = tiny_model(), other = tiny_model();
    EditContext context;
    auto edit = tiny_editor(name, hparams, model);
    (void)edit->edit(model, span.subspan(0, 2), context);
    const std::string prompt = facts[0].full_prompt();
    const at::Tensor after_two = logits(model, prompt);
    // A cancelled batch leaves the two in force.
    EditContext cancelled;
    cancelled.progress = [&](const ProgressUpdate&) { cancelled.cancel.request(); };
    EXPECT_THROW((void)edit->edit(model, span.subspan(2), cancelled), Error);
    EXPECT_TRUE(at::equal(logits(model, prompt), after_two)) << name;
    // Another instance goes on from the memory.
    auto resumed = tiny_editor(name, hparams, other);
    resumed->load_state(edit->state());
    EXPECT_TRUE(at::equal(logits(other, prompt), after_two)) << name;
    (void)edit->edit(model, span.subspan(2), context);
    (void)resumed->edit(other, span.subspan(2), context);
    EXPECT_TRUE(at::equal(logits(other, facts[2].full_prompt()), logits(model, facts[2].full_prompt()))) << name;
    EXPECT_THROW(resumed->load_state({{"keys", at::zeros({1, 2})}}), Error);
  }
}

// What a session has put aside to take a batch back is not changed by that batch, though it is of the same prompts.
TEST(RuntimeEditors, AMemoryPutAsideStaysAsItWas) {
  const auto facts = tiny_facts();
  auto others = facts;
  std::swap(others[0].target_new, others[1].target_new);
  for (const auto& [name, hparams] : kInside) {
    models::Model model = tiny_model();
    EditContext context;
    auto edit = tiny_editor(name, hparams, model);
    (void)edit->edit(model, std::span(facts).subspan(0, 2), context);
    const auto state = edit->state();
    std::map<std::string, at::Tensor> copies;
    for (const auto& [key, tensor] : state) copies[key] = tensor.clone();
    (void)edit->edit(model, std::span(others).subspan(0, 2), context);
    for (const auto& [key, tensor] : state) EXPECT_TRUE(at::equal(tensor, copies[key])) << name << " " << key;
  }
}

TEST(RuntimeEditors, SplitModelGivesTheSame) {
  for (const auto& [name, hparams] : kInside) {
    models::Model whole = tiny_model(),
                  split = tiny_model({.place = testing::over_devices({sim(0), sim(1), sim(1), sim(2)})});
    EditContext one, two;
    auto a = tiny_editor(name, hparams, whole), b = tiny_editor(name, hparams, split);
    (void)a->edit(whole, tiny_facts(), one);
    (void)b->edit(split, tiny_facts(), two);
    const auto first = a->runtime(), second = b->runtime();
    for (const auto& [tensor, value] : first.at(0).tensors)
      EXPECT_LT(testing::relative_difference(second.at(0).tensors.at(tensor), value), 1e-2) << name << " " << tensor;
  }
}

TEST(GraceBook, WidensSplitsAndReplaces) {
  const auto key = [](double x) { return at::tensor({x, 0.0}).to(at::kFloat); };
  const at::Tensor value = at::ones({3});
  editors::GraceBook book;
  EXPECT_EQ(book.admit(key(0), value, {1}, 10, 1, false), 0);
  EXPECT_EQ(book.admit(key(5), value, {2}, 11, 1, false), 1) << "far away: an entry of its own";
  EXPECT_EQ(book.admit(key(1.5), value, {1}, 12, 1, false), 0) << "the same answer nearby";
  EXPECT_FLOAT_EQ(book.radius_E[0].item<float>(), 1.5F);
  EXPECT_FLOAT_EQ(book.keys_EF[0][0].item<float>(), 0);
  EXPECT_EQ(book.admit(key(4), value, {3}, 13, 1, false), 2) << "another answer nearby";
  EXPECT_NEAR(book.radius_E[1].item<float>(), 0.5, 1e-4);
  EXPECT_NEAR(book.radius_E[2].item<float>(), 0.5, 1e-6);
  EXPECT_EQ(book.admit(key(5), value * 2, {4}, 14, 1, false), 1) << "the same prompt: the newer answer";
  EXPECT_EQ(book.labels[1], (std::vector<int64_t>{4}));
  EXPECT_EQ(book.values_ED[1][0].item<float>(), 2);
  editors::GraceBook moving;
  (void)moving.admit(key(0), value, {1}, 1, 1, true);
  (void)moving.admit(key(1.5), value, {1}, 2, 1, true);
  EXPECT_FLOAT_EQ(moving.keys_EF[0][0].item<float>(), 0.75F);
}

// Entries decide by distance and radius alone.
TEST(GraceBook, NearestEntryWithinItsRadius) {
  const auto [entry, within] = editors::find_in_book(
      at::tensor({0.9, 0.0, 1.4, 0.0, 2.6, 0.0, 2.4, 0.0}).to(at::kFloat).view({4, 2}),
      at::tensor({0.0, 0.0, 3.0, 0.0}).to(at::kFloat).view({2, 2}), at::tensor({1.0, 0.5}).to(at::kFloat));
  EXPECT_TRUE(at::equal(entry, at::tensor({0, 0, 1, 1}, at::kLong)));
  EXPECT_TRUE(at::equal(within, at::tensor({1, 0, 1, 0}, at::kLong).to(at::kBool)));
}

// Rows of different lengths, which the reference engine fills up.
TEST(RuntimeEditors, BothEnginesGiveTheSame) {
  for (const auto& [name, hparams] : kInside) {
    if (std::string(name) == "neuraldb") continue;  // its targets are those of targets_test
    models::Model fast = tiny_model(), reference = tiny_model();
    EditContext context, slow;
    slow.engine = editors::Engine::kReference;
    std::string few = hparams;
    const size_t at = few.find("n_iter: ");
    few.replace(at, few.find('\n', at) - at, "n_iter: 3");
    auto one = tiny_editor(name, few, fast), other = tiny_editor(name, few, reference);
    (void)one->edit(fast, tiny_facts(), context);
    (void)other->edit(reference, tiny_facts(), slow);
    for (const auto& fact : tiny_facts())
      EXPECT_LT(testing::relative_difference(logits(fast, fact.full_prompt()), logits(reference, fact.full_prompt())),
                1e-4)
          << name;
  }
}

// A prompt that passes through an earlier one's key is answered by that entry, which it does not change.
TEST(Grace, AnEarlierFactsValueStays) {
  models::Model model = tiny_model();
  EditContext context;
  auto edit = tiny_editor("grace", kGrace, model);
  const std::vector<datasets::Fact> shorter = {make_fact(1, "{} is", "Oslo", "Rome")},
                                    longer = {make_fact(2, "{} is in the city of", "Oslo", "Po")};
  (void)edit->edit(model, shorter, context);
  const at::Tensor value_D = edit->runtime()[0].tensors.at("values")[0].clone();
  (void)edit->edit(model, longer, context);
  const at::Tensor values_ED = edit->runtime()[0].tensors.at("values");
  ASSERT_EQ(values_ED.size(0), 2);
  EXPECT_TRUE(at::equal(values_ED[0], value_D));
}

// Memories are trained until their margins hold too: a fact that the model knows does not leave one open to all tokens.
TEST(Wise, AKnownFactTrainsItsMargin) {
  const auto facts = tiny_facts();
  const auto trained = [&](double stop_loss) {
    models::Model model = tiny_model();
    EditContext context;
    auto edit = tiny_editor("wise", std::string(kWise) + "stop_loss: " + std::to_string(stop_loss) + "\n", model);
    const auto result = edit->edit(model, std::span(facts).first(1), context);
    const auto memories = editors::wise_memories(edit->runtime()[0], model.edit_site(0), "test");
    return std::pair(result.outcomes[0].curve.front().nll, memories[0].delta_DF.abs().max().item<double>());
  };
  const auto [nll, idle] = trained(100);
  EXPECT_EQ(idle, 0) << "loss and margin are both below that";
  EXPECT_GT(trained(nll + 1).second, 0) << "the margin is 2 + 1 at first";
}

// Each shard moves other entries, also where earlier ones have become one memory.
TEST(Wise, EachShardHasAnotherMask) {
  models::Model model = tiny_model();
  EditContext context;
  const std::string base = std::string(kWise) + "save_freq: 1\nmerge_freq: 1\nretrieve: false\ndensities: 1\n";
  std::string sparse = base;
  sparse.replace(sparse.find("mask_ratio: 0.8"), 15, "mask_ratio: 0.2");
  auto edit = tiny_editor("wise", sparse, model);
  const auto facts = tiny_facts();
  (void)edit->edit(model, facts, context);
  const auto memories = editors::wise_memories(edit->runtime()[0], model.edit_site(0), "test");
  ASSERT_EQ(memories.size(), 1U);
  const double covered = (memories[0].delta_DF != 0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(covered, 1 - std::pow(0.8, facts.size()), 0.03) << "with two masks it would be 0.36";
}

// Three memories that are merged one after the other count alike.
TEST(Wise, MergedMemoriesCountByTheirFacts) {
  auto facts = tiny_facts();
  facts.resize(3);
  const auto trained = [&](const std::string& more) {
    models::Model model = tiny_model();
    EditContext context;
    auto edit = tiny_editor("wise", std::string(kWise) + "save_freq: 1\nmerge_alg: linear\n" + more, model);
    (void)edit->edit(model, facts, context);
    return editors::wise_memories(edit->runtime()[0], model.edit_site(0), "test");
  };
  const auto apart = trained("merge_freq: 100\n"), together = trained("merge_freq: 1\nretrieve: false\n");
  ASSERT_EQ(apart.size(), 3U);
  ASSERT_EQ(together.size(), 1U);
  const at::Tensor mean = (apart[0].delta_DF + apart[1].delta_DF + apart[2].delta_DF) / 3;
  EXPECT_LT((together[0].delta_DF - mean).abs().max().item<double>(), 1e-5 * mean.abs().max().item<double>());
}

// A weight of all memories cancels in the mean that ties takes.
TEST(Wise, AWeightThatDoesNothingIsRefused) {
  const models::Model model = tiny_model();
  const std::string twice = std::string(kWise) + "weights: 2\nmerge_alg: ";
  EXPECT_THROW((void)tiny_editor("wise", twice + "ties\n", model), Error);
  EXPECT_NO_THROW((void)tiny_editor("wise", twice + "linear\n", model));
}

TEST(Wise, EachTokenTakesItsStrongestMemoryOrNone) {
  const models::Model model = tiny_model();
  const auto site = model.edit_site(1);
  std::vector<editors::WiseMemory> memories(2);
  for (size_t m = 0; m < 2; ++m) {
    memories[m].delta_DF = testing::random_matrix(site.out_features, site.in_features, m + 1, at::kFloat) * 0.3;
    memories[m].threshold = 1e9;
  }
  const at::Tensor plain = logits(model, "Oslo is in");
  RuntimeScope none;
  none.add(editors::wise_part(memories, site), model, "test");
  EXPECT_TRUE(at::equal(logits(model, "Oslo is in"), plain)) << "below every threshold";
  none.clear();
  memories[1].threshold = 0;
  RuntimeScope second;
  second.add(editors::wise_part(memories, site), model, "test");
  const at::Tensor routed = logits(model, "Oslo is in");
  second.clear();
  models::Model changed = tiny_model();
  changed.set_weight(site.weight_name, model.weight(site.weight_name) + memories[1].delta_DF);
  EXPECT_LT(testing::relative_difference(routed, logits(changed, "Oslo is in")), 1e-5) << "all tokens take the second";
}

// One layer, one context: the store does at the subject what the optimisation did there.
TEST(NeuralDb, GivesWhatWasOptimised) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    EditContext context;
    const auto edit = tiny_editor("neuraldb", kNeuralDb, model);
    const auto facts = tiny_facts();  // the last one has the first one's key
    const auto result = edit->edit(model, std::span(facts).subspan(0, 3), context);
    for (size_t i = 0; i < 3; ++i) {
      const auto row = editors::learning_row(
          editors::render_prompts(model.tokenizer(), facts[i], editors::ContextTemplates::plain()),
          editors::Objective::kTargetNew);
      EXPECT_NEAR(editors::LearningPass(model, {row}, 0).measure().nll[0], result.outcomes[i].last.nll, 1e-4)
          << family << " " << i;
    }
  }
}

// Every residual is that of the unedited model.
TEST(NeuralDb, DoesNotDependOnOrderAndBatches) {
  const auto facts = tiny_facts();
  const auto entries = [&](const std::vector<std::vector<size_t>>& batches) {
    models::Model model = tiny_model();
    EditContext context;
    const auto edit = tiny_editor("neuraldb", kNeuralDb, model);
    for (const auto& batch : batches) {
      std::vector<datasets::Fact> some;
      for (const size_t i : batch) some.push_back(facts[i]);
      (void)edit->edit(model, some, context);
    }
    const auto part = edit->runtime().at(0);
    std::map<int64_t, std::pair<at::Tensor, at::Tensor>> of_fact;
    for (size_t e = 0; e < part.values.at("case_ids").size(); ++e)
      of_fact[part.values.at("case_ids")[e].get<int64_t>()] = {part.tensors.at("keys")[static_cast<int64_t>(e)],
                                                               part.tensors.at("residuals")[static_cast<int64_t>(e)]};
    return of_fact;
  };
  const auto whole = entries({{0, 1, 2}}), split = entries({{2}, {1, 0}});
  ASSERT_EQ(whole.size(), 3U);
  for (const auto& [case_id, entry] : whole) {
    EXPECT_LT(testing::relative_difference(split.at(case_id).first, entry.first), 1e-5) << case_id;
    EXPECT_LT(testing::relative_difference(split.at(case_id).second, entry.second), 1e-4) << case_id;
  }
}

TEST(NeuralStore, TheLargestCosineAboveGammaAnswers) {
  const at::Tensor keys = testing::random_matrix(5, 6, 1, at::kFloat),
                   query = testing::random_matrix(600, 6, 2, at::kFloat);
  const auto [entry, found] = editors::find_in_store(query, keys, 0.4);
  for (int64_t n = 0; n < 600; ++n) {
    const at::Tensor cosine = at::cosine_similarity(keys, query[n].unsqueeze(0), 1);
    EXPECT_EQ(entry[n].item<int64_t>(), cosine.argmax().item<int64_t>());
    EXPECT_EQ(found[n].item<bool>(), cosine.max().item<double>() > 0.4) << n;
  }
  editors::NeuralStore store;
  EXPECT_EQ(store.put(keys[0], at::ones({3}), 7), 0);
  EXPECT_EQ(store.put(keys[1], at::ones({3}), 8), 1);
  EXPECT_EQ(store.put(keys[0] * 1.0001, at::ones({3}) * 2, 9), 0) << "the same key: the newer residual";
  EXPECT_EQ(store.case_ids, (std::vector<int64_t>{9, 8}));
  EXPECT_EQ(store.residuals_ED[0][0].item<float>(), 2);
}

TEST(Ike, TellsWhatThePromptResembles) {
  models::Model model = tiny_model();
  EditContext context;
  auto ike = tiny_editor("ike", "k: 2\nthreshold: 0.4\n", model);
  const std::vector<datasets::Fact> facts = {
      make_fact(1, "{} is located in the city of", "The Eiffel Tower", "Rome"),
      make_fact(2, "{} is located in the city of", "Big Ben", "Oslo"),
      make_fact(3, "The mother tongue of {} is", "Danielle Darrieux", "English")};
  (void)ike->edit(model, facts, context);
  RuntimeScope scope;
  scope.add(ike->runtime().at(0), model, "test");
  const std::string told = scope.prefix("The Eiffel Tower is located in the city of");
  EXPECT_NE(told.find("New Fact: The Eiffel Tower is located in the city of Rome\n"), std::string::npos) << told;
  EXPECT_TRUE(told.ends_with("Prompt: The Eiffel Tower is located in the city of Rome\n\nPrompt: ")) << told;
  EXPECT_EQ(told.find("Darrieux"), std::string::npos);
  EXPECT_EQ(scope.prefix("Bread is made of"), "");
  // The newer answer to the same prompt replaces the older one.
  (void)ike->edit(model, std::vector{make_fact(4, "{} is located in the city of", "Big Ben", "Paris")}, context);
  RuntimeScope later;
  later.add(ike->runtime().at(0), model, "test");
  const std::string ben = later.prefix("Big Ben is located in the city of");
  EXPECT_NE(ben.find("Paris"), std::string::npos);
  EXPECT_EQ(ben.find("Oslo"), std::string::npos);
  datasets::FactSet set;
  set.facts = facts;
  const evaluation::Front front = [&](std::string_view prompt) { return later.prefix(prompt); };
  const auto asked = evaluation::asked(set, front);
  EXPECT_TRUE(asked.facts[0].full_prompt().starts_with("New Fact: "));
  EXPECT_EQ(asked.facts[0].subject, facts[0].subject);
  // What is made of a prompt stands behind the facts, as the prompt itself does.
  const auto free = evaluation::evaluate(model, set, {"free"}, {.front = front, .free_limit = 1}).cases[0]["free"];
  const std::string prompt = facts[0].full_prompt();
  EXPECT_EQ(free["negation"][0]["prompt"], "It is not true that " + prompt);
  EXPECT_TRUE(front("It is not true that " + prompt).starts_with("New Fact: "));
  EXPECT_NE(free["negation"][0]["text"],
            evaluation::evaluate(model, set, {"free"}, {.free_limit = 1}).cases[0]["free"]["negation"][0]["text"]);
}

TEST(RuntimeParts, WhatDoesNotFitIsRefused) {
  const models::Model model = tiny_model();
  const auto site = model.edit_site(2);
  editors::GraceBook book;
  (void)book.admit(at::ones({48}), at::ones({32}), {1, 2}, 7, 0.5, false);
  const RuntimePart good = book.part(2, site);
  EXPECT_NO_THROW((void)editors::make_runtime(good, model, "x"));
  const auto refused = [&](const RuntimePart& part, ErrorClass expected) {
    testing::expect_refused([&] { (void)editors::make_runtime(part, model, "some.pack"); }, expected, {"some.pack"});
  };
  RuntimePart part = good;
  part.kind = "graceful";
  testing::expect_refused([&] { (void)editors::make_runtime(part, model, "some.pack"); }, ErrorClass::kUnsupported,
                          {"some.pack", "grace", "neuraldb", "wise", "ike", "steer"});
  part = good;
  part.version = 99;
  refused(part, ErrorClass::kUnsupported);
  part = good;
  part.tensors.erase("values");
  refused(part, ErrorClass::kCorruption);
  part = good;
  part.tensors["radius"] = at::ones({2});
  refused(part, ErrorClass::kCorruption);
  part = good;
  part.values.erase("labels");
  refused(part, ErrorClass::kCorruption);
  part = good;
  part.values["labels"] = nlohmann::json::array();
  refused(part, ErrorClass::kCorruption);
  part = good;
  part.values["layer"] = 17;
  refused(part, ErrorClass::kInvalidArgument);
  part = good;
  part.values["shape"] = {1, 2};
  refused(part, ErrorClass::kInvalidArgument);
}

}  // namespace runtime_editors_test
}  // namespace emend
