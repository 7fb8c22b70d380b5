// Packs that write whole neurons, made apart for one model, and edits of a model that holds such packs.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/registry.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/changes.h>
#include <emend/workflow/session.h>
#include <gtest/gtest.h>

#include <set>

#include "support/collected_events.h"
#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace emend {
namespace neurons_apart_test {

using editors::EditPack;
using editors::NamedPack;
using testing::random_matrix;

const std::string kSettings =
    "layers: [1]\nrelease_layers: [2]\ntext_tokens: 512\nv_num_grad_steps: 3\nwordings: 0\nlookalikes: 0\nroom: 1\n"
    "rounds: 1\n";

std::vector<datasets::Fact> facts_of(const std::string& first, const std::string& second) {
  return {testing::make_fact(1, "{} lives in", first, "Oslo"), testing::make_fact(2, "{} lives in", second, "Bonn")};
}

EditPack edit(models::Model& model, std::span<const datasets::Fact> facts) {
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  const auto editor = editors::make_editor("latch", hparams::parse_hparams(kSettings, "test.yaml"), model);
  const auto result = editor->edit(model, facts, context);
  EXPECT_EQ(result.failed(), 0);
  EditPack pack = EditPack::from_results(model, {&result, 1}, facts);
  pack.extra.update(editor->extra());
  return pack;
}

// By name and layer.
std::set<std::pair<std::string, int64_t>> neurons_in(const EditPack& pack) {
  std::set<std::pair<std::string, int64_t>> all;
  for (const auto& delta : pack.deltas)
    for (const int64_t neuron : editors::taken_neurons(delta)) all.emplace(delta.weight, neuron);
  return all;
}

using Weights = std::map<std::string, at::Tensor>;

// With what is in force while they are read.
Weights weights_with(models::Model& model, std::initializer_list<const EditPack*> packs) {
  std::vector<std::unique_ptr<editors::EditTransaction>> applied;
  for (const auto* pack : packs) applied.push_back(editors::apply_pack(model, *pack));
  Weights weights = testing::all_weights(model);
  while (!applied.empty()) {
    applied.back()->restore();
    applied.pop_back();
  }
  return weights;
}

// What a layer's neurons are, a row each, in any order: (gate, up, down, bias) of those that differ from the model's.
std::multiset<std::vector<double>> written(const Weights& before, const Weights& after, int64_t width) {
  std::map<std::string, std::vector<at::Tensor>> rows_of_layer, old_of_layer;
  for (const auto& [name, weight] : after) {
    at::Tensor now = weight.to(at::kDouble), old = before.at(name).to(at::kDouble);
    if (at::equal(now, old)) continue;
    if (now.size(0) % width != 0) now = now.t(), old = old.t();  // a neuron is a column
    const std::string layer = name.substr(0, name.find("mlp"));
    for (int64_t part = 0; part < now.size(0); part += width) {
      rows_of_layer[layer].push_back(now.narrow(0, part, width).reshape({width, -1}));
      old_of_layer[layer].push_back(old.narrow(0, part, width).reshape({width, -1}));
    }
  }
  std::multiset<std::vector<double>> neurons;
  for (const auto& [layer, rows] : rows_of_layer) {
    const at::Tensor now = at::cat(rows, 1), old = at::cat(old_of_layer[layer], 1);
    for (int64_t j = 0; j < width; ++j) {
      if (at::equal(now[j], old[j])) continue;
      const at::Tensor rounded = (now[j] * 1e4).round().contiguous();
      neurons.emplace(rounded.const_data_ptr<double>(), rounded.const_data_ptr<double>() + rounded.numel());
    }
  }
  return neurons;
}

TEST(NeuronsApart, AreThoseOfWhichAnotherColumnIsAsItWas) {
  const models::Model model = testing::tiny_model();
  const auto site = model.edit_site(1);
  const at::Tensor some = at::zeros({site.in_features, 2}, at::kDouble);
  some[5][0] = some[40][1] = 2;
  auto delta = editors::WeightDelta::factors(site, random_matrix(site.out_features, 2, 1), some);
  const std::vector<int64_t> wanted = {5, 40};
  EXPECT_EQ(editors::taken_neurons(delta), wanted);
  EXPECT_EQ(editors::taken_neurons(editors::WeightDelta::dense(site, delta.matrix())), wanted);
  delta.right_FR = random_matrix(site.in_features, 2, 2);
  EXPECT_TRUE(editors::taken_neurons(delta).empty()) << "all of them are changed";
}

// Together they give what each gives alone, at other places: also with biases, with W_gate and W_up in one matrix, and
// in matrices that are stored the other way round.
TEST(NeuronsApart, ALaterPackTakesOtherPlacesWithTheSameNeurons) {
  const auto model_of = [](const std::string& family) {
    return family == "phi3" ? testing::flavour_model({family, models::family_named(family).debug.front().name}, 1)
                            : testing::tiny_model({.family = family});
  };
  for (const std::string family : {"llama", "gpt2", "phi3"}) {
    SCOPED_TRACE(family);
    models::Model model = model_of(family);
    const Weights before = testing::all_weights(model);
    std::vector<NamedPack> packs;
    for (const auto& facts : {facts_of("Ada", "Ben"), facts_of("Cleo", "Dan")}) {
      models::Model fresh = model_of(family);
      packs.push_back({facts[0].subject, edit(fresh, facts)});
    }
    const EditPack first = packs[0].pack, alone = packs[1].pack;
    ASSERT_EQ(neurons_in(first), neurons_in(alone)) << "both take what the model misses least";
    ASSERT_FALSE(neurons_in(first).empty());
    EXPECT_FALSE(editors::find_conflicts(packs).empty());

    editors::move_apart(packs, editors::originals_of(model.checkpoint()));
    EXPECT_EQ(neurons_in(packs[0].pack), neurons_in(first));
    EXPECT_EQ(neurons_in(packs[1].pack).size(), neurons_in(alone).size());
    EXPECT_TRUE(editors::find_conflicts(packs).empty());
    const int64_t width = model.edit_site(1).in_features;
    auto wanted = written(before, weights_with(model, {&first}), width);
    wanted.merge(written(before, weights_with(model, {&alone}), width));
    EXPECT_EQ(written(before, weights_with(model, {&packs[0].pack, &packs[1].pack}), width), wanted);
    const auto merged = editors::merge_packs(packs).pack;
    EXPECT_EQ(written(before, weights_with(model, {&merged}), width), wanted);

    packs[1].pack.extra[editors::kNeuronsToSpare].erase("2");
    EXPECT_TRUE(editors::merge_packs(packs).pack.extra[editors::kNeuronsToSpare].contains("2")) << "of the other part";

    const auto once = packs[1].pack;  // a second time there is nothing to do
    editors::move_apart(packs, editors::originals_of(model.checkpoint()));
    EXPECT_EQ(neurons_in(packs[1].pack), neurons_in(once));
  }
}

// As Python applies packs, one after the other.
TEST(NeuronsApart, PacksInALoadedModelAreMovedToo) {
  models::Model model = testing::tiny_model();
  const Weights before = testing::all_weights(model);
  std::vector<EditPack> packs;
  for (const auto& facts : {facts_of("Ada", "Ben"), facts_of("Cleo", "Dan")}) {
    models::Model fresh = testing::tiny_model();
    packs.push_back(edit(fresh, facts));
  }
  const int64_t width = model.edit_site(1).in_features;
  const auto first = written(before, weights_with(model, {&packs[0]}), width);
  const auto second = written(before, weights_with(model, {&packs[1]}), width);
  auto wanted = first;
  wanted.insert(second.begin(), second.end());
  workflow::Changes one(model), other(model);
  one.put_in(packs[0], {}, "one");
  other.put_in(packs[1], {}, "other");
  EXPECT_EQ(written(before, testing::all_weights(model), width), wanted);
  one.take_out();
  EXPECT_EQ(written(before, testing::all_weights(model), width), second);
  other.take_out();
  EXPECT_TRUE(testing::changed_weights(model, before).empty());
}

// What each of them writes stays as it is, whoever came before.
TEST(NeuronsApart, SessionsAndPacksOfOneModelTakeOtherNeurons) {
  models::Model model = testing::tiny_model(), fresh = testing::tiny_model();
  const Weights before = testing::all_weights(model);
  const EditPack pack = edit(fresh, facts_of("Cleo", "Dan"));
  const auto latch = [&] {
    return editors::make_editor("latch", hparams::parse_hparams(kSettings, "test.yaml"), model);
  };
  workflow::RunOptions options;
  options.templates = testing::tiny_contexts();
  options.watch = false;
  workflow::Session one(model, latch(), options), two(model, latch(), options);
  (void)one.edit(facts_of("Ada", "Ben"));
  workflow::Changes other(model);
  other.put_in(pack, {}, "pack");
  (void)two.edit(facts_of("Eve", "Finn"));
  (void)one.edit(facts_of("Gil", "Hal"));
  const auto first = neurons_in(one.pack()), second = neurons_in(two.pack());
  const size_t all = first.size() + second.size() + neurons_in(pack).size();
  EXPECT_EQ(first.size(), 2 * second.size());
  EXPECT_EQ(written(before, testing::all_weights(model), model.edit_site(1).in_features).size(), all);

  EditPack fixed = pack;
  fixed.extra.erase(editors::kNeuronsToSpare);
  fixed.extra["name"] = "another pack";
  workflow::Changes late(model);
  testing::expect_error(ErrorClass::kInvalidArgument, {"late", "are written by both"},
                        [&] { late.put_in(fixed, {}, "late"); });
}

TEST(NeuronsApart, WhereAPackNamesNoOtherPlacesTheConflictHasAName) {
  models::Model model = testing::tiny_model(), other = testing::tiny_model();
  std::vector<NamedPack> packs = {{"a", edit(model, facts_of("Ada", "Ben"))},
                                  {"b", edit(other, facts_of("Cleo", "Dan"))}};
  packs[1].pack.extra[editors::kNeuronsToSpare]["1"] = {47, 48, -1, "x"};  // one of four, and what no place is
  packs[1].pack.extra[editors::kNeuronsToSpare].erase("2");
  const auto before = neurons_in(packs[1].pack);
  editors::move_apart(packs, editors::originals_of(model.checkpoint()));
  EXPECT_EQ(neurons_in(packs[1].pack), before);
  testing::expect_error(ErrorClass::kInvalidArgument,
                        {"overlap: a and b", "4 neurons of model.layers.1.mlp.down_proj.weight are written by both"},
                        [&] { (void)editors::merge_packs(packs); });
}

class NeuronsInAFolder : public ::testing::Test {
 protected:
  [[nodiscard]] models::Model load() const { return models::load_model(folder().string()); }
  [[nodiscard]] std::filesystem::path folder() const { return temporary_.path() / "model"; }
  std::filesystem::path saved(const std::string& name, const EditPack& pack) const {
    editors::save_pack(temporary_.path() / name, pack);
    return temporary_.path() / name;
  }
  void SetUp() override { testing::write_tiny_model(folder()); }

 private:
  testing::TemporaryFolder temporary_{"neurons-apart"};
};

TEST_F(NeuronsInAFolder, PacksComeAndGoInAnyOrder) {
  models::Model one = load(), two = load();
  const Weights before = testing::all_weights(one);
  const auto ada = saved("ada", edit(one, facts_of("Ada", "Ben"))),
             cleo = saved("cleo", edit(two, facts_of("Cleo", "Dan")));
  const int64_t width = one.edit_site(1).in_features;
  editors::Ledger ledger(folder());
  (void)ledger.apply({ada});
  (void)ledger.apply({cleo});
  auto wanted = written(before, testing::all_weights(one), width);
  wanted.merge(written(before, testing::all_weights(two), width));
  EXPECT_EQ(written(before, testing::all_weights(load()), width), wanted);
  ledger.revert({ada.string()});
  EXPECT_EQ(written(before, testing::all_weights(load()), width), written(before, testing::all_weights(two), width));
  ledger.revert_all();
  EXPECT_TRUE(testing::changed_weights(load(), before).empty());
}

TEST_F(NeuronsInAFolder, PacksMayNameTheWeightsOtherwise) {
  models::Model one = load(), two = load();
  const Weights before = testing::all_weights(one);
  const auto ada = saved("ada", edit(one, facts_of("Ada", "Ben")));
  EditPack bare = edit(two, facts_of("Cleo", "Dan"));
  for (auto& delta : bare.deltas) delta.weight = delta.weight.substr(std::string("model.").size());
  editors::Ledger ledger(folder());
  (void)ledger.apply({ada});
  (void)ledger.apply({saved("cleo", bare)});
  const int64_t width = one.edit_site(1).in_features;
  auto wanted = written(before, testing::all_weights(one), width);
  wanted.merge(written(before, testing::all_weights(two), width));
  EXPECT_EQ(written(before, testing::all_weights(load()), width), wanted);
}

TEST_F(NeuronsInAFolder, AnOrderInWhichTheyMeetIsRefused) {
  models::Model one = load(), two = load();
  EditPack fixed = edit(one, facts_of("Ada", "Ben"));
  fixed.extra.erase(editors::kNeuronsToSpare);
  const auto ada = saved("ada", fixed), cleo = saved("cleo", edit(two, facts_of("Cleo", "Dan")));
  editors::Ledger ledger(folder());
  const auto first = ledger.apply({ada}), second = ledger.apply({cleo});
  const Weights both = testing::all_weights(load());
  testing::expect_error(ErrorClass::kInvalidArgument, {first[0], second[0], "written by both"}, [&] {
    ledger.reorder({second[0], first[0]});
  });
  EXPECT_TRUE(testing::changed_weights(load(), both).empty());
  ledger.reorder({first[0], second[0]});
  ledger.revert({first[0]});
  const auto left = editors::edits_of(folder());
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left[0].pack.id, second[0]);
}

// A model in memory, and its pack that has no file yet.
TEST_F(NeuronsInAFolder, ThePackThatItHoldsIsKnownWithoutItsFile) {
  models::Model one = load();
  const EditPack pack = edit(one, facts_of("Ada", "Ben"));
  editors::Ledger ledger(folder());
  (void)ledger.apply({saved("ada", pack)});
  models::Model edited = load();
  workflow::Changes again(edited);
  testing::expect_error(ErrorClass::kInvalidArgument, {"pack", "already in force in this model"},
                        [&] { again.put_in(pack, {}, "pack"); });
}

// As a folder that was written from a GGUF file, and the packs made for that file.
TEST_F(NeuronsInAFolder, AFormOfTheBaseThatWasAcceptedStaysAccepted) {
  models::Model model = load();
  EditPack pack = edit(model, facts_of("Ada", "Ben"));
  pack.base_fingerprint = std::string(64, 'c');
  const auto path = saved("ada", pack);
  {
    editors::Ledger ledger(folder());
    testing::expect_error(ErrorClass::kInvalidArgument, {"cccccccccccc"}, [&] { (void)ledger.apply({path}); });
    (void)ledger.apply({path}, {.accepted_bases = {pack.base_fingerprint}});
    ledger.revert_all();
  }
  {
    editors::Ledger ledger(folder());
    EXPECT_EQ(ledger.apply({path}).size(), 1U);
    EXPECT_EQ(editors::lineage_of(folder()).forms, std::vector{pack.base_fingerprint});
  }
}

// Another run, on another day: what the folder holds counts as an earlier batch's.
TEST_F(NeuronsInAFolder, AnEditOfAnEditedModelKnowsWhatItHolds) {
  models::Model first = load();
  const auto facts = facts_of("Ada", "Ben");
  const EditPack pack = edit(first, facts);
  {
    editors::Ledger ledger(folder());
    (void)ledger.apply({saved("ada", pack)});
  }
  models::Model model = load();
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  const auto events = std::make_shared<testing::CollectedEvents>();
  context.log = Log({events});
  const auto editor = editors::make_editor("latch", hparams::parse_hparams(kSettings, "test.yaml"), model);
  const std::vector later = {testing::make_fact(3, "We met {} and", "Ada", "Rome")};
  const auto result = editor->edit(model, later, context);
  EXPECT_EQ(result.outcomes.size(), 1U);
  EXPECT_EQ(events->count("edit.earlier"), 1);
  const auto state = editor->state();
  const at::Tensor bytes = state.at("facts.0");
  const std::string kept(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
                         static_cast<size_t>(bytes.numel()));
  EXPECT_EQ(kept, R"([["Ada","{} lives in","Oslo"],["Ben","{} lives in","Bonn"],["Ada","We met {} and","Rome"]])");
  const EditPack next = EditPack::from_results(model, {&result, 1}, later);
  const auto held = neurons_in(pack);
  for (const auto& neuron : neurons_in(next))
    EXPECT_FALSE(held.contains(neuron)) << neuron.first << " " << neuron.second;
  EXPECT_EQ(state.at("whose.0").numel(), 2 * 3) << "its subject's token and the prompt's end, of each fact";
  editor->reset();
  EXPECT_TRUE(editor->state().empty());
}

}  // namespace neurons_apart_test
}  // namespace emend
