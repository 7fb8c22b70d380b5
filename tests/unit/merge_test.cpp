// Packs of several people as one, and what tells edits apart.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/difference.h>
#include <emend/editors/packs/merge.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace merge_test {

using editors::ConflictKind;
using editors::EditPack;
using editors::merge_packs;
using editors::NamedPack;
using editors::OnConflict;
using editors::WeightDelta;
using testing::all_weights;
using testing::changed_weights;
using testing::random_matrix;
using testing::tiny_model;

nlohmann::json fact(const std::string& prompt, const std::string& subject, const std::string& target,
                    const std::string& relation = "") {
  nlohmann::json json = {{"case_id", 1}, {"prompt", prompt}, {"subject", subject}, {"target_new", target}};
  if (!relation.empty()) json["relation_id"] = relation;
  return json;
}

// Factors of `rank` on the given layers.
EditPack pack_of(const models::Model& model, const std::vector<int>& layers, int64_t rank, uint64_t seed,
                 const std::vector<nlohmann::json>& facts) {
  EditPack pack;
  pack.base_fingerprint = model.fingerprint();
  pack.editor = "memit";
  pack.hparams = {{"layers", layers}};
  pack.facts = facts;
  pack.extra = {{"seed", seed}};
  for (const int layer : layers) {
    const auto site = model.edit_site(layer);
    pack.deltas.push_back(WeightDelta::factors(site, random_matrix(site.out_features, rank, seed + layer) * 0.02,
                                               random_matrix(site.in_features, rank, seed + 50 + layer)));
  }
  return pack;
}

double largest_difference(const models::Model& model, const std::map<std::string, at::Tensor>& wanted) {
  double largest = 0;
  for (const auto& [name, weight] : wanted)
    largest = std::max(largest, (model.weight(name) - weight).abs().max().item<double>());
  return largest;
}

TEST(Merge, EqualsApplyingInTurnAndRevertsToTheOriginalBytes) {
  for (const char* family : {"llama", "gpt2"})
    for (const int64_t rank : {1, 3, 12, 20, 40}) {  // joined: 2 … 80 columns for 32 × 48
      models::Model model = tiny_model({.family = family});
      const auto before = all_weights(model);
      const std::vector<NamedPack> packs = {
          {"a", pack_of(model, {1, 2}, rank, 10, {fact("{} is in", "Oslo", "Rome")})},
          {"b", pack_of(model, {2, 3}, rank, 20, {fact("{} is in", "Bern", "Rome")})}};
      const auto merge = merge_packs(packs);
      std::map<std::string, at::Tensor> in_turn;
      {
        const auto first = editors::apply_pack(model, packs[0].pack);
        const auto second = editors::apply_pack(model, packs[1].pack);
        in_turn = all_weights(model);
        second->restore();
        first->restore();
      }
      ASSERT_TRUE(changed_weights(model, before).empty());
      const auto merged = editors::apply_pack(model, merge.pack);
      EXPECT_LT(largest_difference(model, in_turn), 1e-6) << family << " rank " << rank;
      EXPECT_EQ(merged->changed().size(), 3U);
      merged->restore();
      EXPECT_TRUE(changed_weights(model, before).empty());

      ASSERT_EQ(merge.weights.size(), 3U);
      EXPECT_EQ(merge.weights[1].rank_joined, 2 * rank);
      const int64_t kept = merge.weights[1].rank;
      EXPECT_EQ(kept, 2 * rank * (32 + 48) <= 32 * 48 ? 2 * rank : 0) << "random factors have full rank";
      EXPECT_EQ(merge.pack.facts.size(), 2U);
      EXPECT_EQ(merge.pack.extra["merged"].size(), 2U);
    }
}

TEST(Merge, FactorsThatRepeatThemselvesAreBroughtToTheirRank) {
  const models::Model model = tiny_model();
  WeightDelta delta = pack_of(model, {1}, 4, 3, {}).deltas[0];
  delta.left_DR = delta.left_DR.repeat({1, 10});
  delta.right_FR = delta.right_FR.repeat({1, 10});
  const WeightDelta small = editors::compact(delta);
  ASSERT_TRUE(small.low_rank());
  EXPECT_EQ(small.rank(), 4);
  EXPECT_LT(testing::relative_difference(small.matrix(), delta.matrix()), 1e-13);
}

std::vector<ConflictKind> kinds(const std::vector<NamedPack>& packs) {
  std::vector<ConflictKind> list;
  for (const auto& conflict : editors::find_conflicts(packs)) list.push_back(conflict.kind);
  return list;
}

TEST(Merge, ConflictsHaveNames) {
  const models::Model model = tiny_model(), other = tiny_model({.seed = 2});
  const auto one = [&](const nlohmann::json& fact) { return pack_of(model, {1}, 1, 5, {fact}); };
  const NamedPack rome{"a", one(fact("{} is in", "Oslo", "Rome", "P131"))};
  EXPECT_TRUE(kinds({rome, {"b", one(fact("{} is in", "Bern", "Rome", "P131"))}}).empty());
  EXPECT_EQ(kinds({rome, {"b", one(fact("{} is in", "Oslo", "Ulm"))}}), std::vector{ConflictKind::kTarget});
  EXPECT_EQ(kinds({rome, {"b", one(fact("One finds {} in", "Oslo", "Ulm", "P131"))}}),
            std::vector{ConflictKind::kTarget})
      << "one relation in other words";
  EXPECT_EQ(kinds({rome, {"b", one(fact("{} is in", "Oslo", "Rome"))}}), std::vector{ConflictKind::kRepeat});
  EXPECT_EQ(kinds({rome, {"b", one(fact("{}  is in", "oslo", "rome "))}}), std::vector{ConflictKind::kRepeat});
  const NamedPack cafe{"c", one(fact("{} is in", "Caf\u00e9 Flore", "Rome"))};
  EXPECT_EQ(kinds({cafe, {"b", one(fact("{} is in", "Cafe\u0301 Flore", "Ulm"))}}), std::vector{ConflictKind::kTarget})
      << "one subject, composed and decomposed";
  EXPECT_EQ(kinds({rome, {"b", pack_of(other, {1}, 1, 5, {})}}), std::vector{ConflictKind::kBase});
  NamedPack dense{"c", one(fact("{} is in", "Ulm", "Rome"))}, dense_too{"d", one(fact("{} is in", "Kiel", "Rome"))};
  for (auto* pack : {&dense, &dense_too})
    pack->pack.deltas[0] = WeightDelta::dense(model.edit_site(1), random_matrix(32, 48, 9));
  EXPECT_EQ(kinds({dense, dense_too}), std::vector{ConflictKind::kOverlap});
  EXPECT_TRUE(kinds({rome, dense}).empty());
  dense.pack.deltas[0].dense_DF = random_matrix(32, 47, 9);
  EXPECT_EQ(kinds({rome, dense}), std::vector{ConflictKind::kWeight});
  NamedPack ike{"e", one(fact("{} is in", "Graz", "Rome"))}, ike_too{"f", one(fact("{} is in", "Linz", "Rome"))};
  ike.pack.runtime = ike_too.pack.runtime = {{"ike", 1, {}, {}}};
  EXPECT_EQ(kinds({ike, ike_too}), std::vector{ConflictKind::kRuntime});
}

TEST(Merge, ConflictsAreRefusedOrSettled) {
  const models::Model model = tiny_model(), other = tiny_model({.seed = 2});
  const std::vector<NamedPack> packs = {{"anna", pack_of(model, {1}, 1, 1, {fact("{} is in", "Oslo", "Rome")})},
                                        {"ben", pack_of(model, {1}, 1, 2, {fact("{} is in", "Oslo", "Ulm")})},
                                        {"cleo", pack_of(model, {2}, 1, 3, {fact("{} is in", "Bern", "Kiel")})}};
  const auto said = testing::error_of([&] { (void)merge_packs(packs); }, ErrorClass::kInvalidArgument);
  testing::expect_parts(said, {"anna", "ben", "Oslo is in", "Rome", "Ulm", "on_conflict"});
  EXPECT_EQ(said.find("cleo"), std::string::npos);
  EXPECT_EQ(merge_packs(packs, OnConflict::kFirst).used, (std::vector<size_t>{0, 2}));
  EXPECT_EQ(merge_packs(packs, OnConflict::kLast).used, (std::vector<size_t>{1, 2}));
  const auto sum = merge_packs(packs, OnConflict::kSum);
  EXPECT_EQ(sum.used.size(), 3U);
  EXPECT_EQ(sum.pack.extra["conflicts"].size(), 1U);
  auto bases = packs;
  bases[1] = {"ben", pack_of(other, {1}, 1, 2, {fact("{} is in", "Graz", "Ulm")})};
  EXPECT_THROW((void)merge_packs(bases, OnConflict::kSum), Error) << "sums of two models' changes mean nothing";
  EXPECT_EQ(merge_packs(bases, OnConflict::kFirst).used, (std::vector<size_t>{0, 2}));
  EXPECT_THROW((void)merge_packs({}), Error);
}

TEST(Merge, APackWithoutFactsIsNotAddedTwice) {
  const models::Model model = tiny_model();
  auto pack = pack_of(model, {1}, 1, 3, {});
  pack.id = "0123456789ab";
  const auto conflicts = editors::find_conflicts(std::vector<NamedPack>{{"a", pack}, {"b", pack}});
  ASSERT_EQ(conflicts.size(), 1U);
  EXPECT_EQ(conflicts[0].kind, ConflictKind::kRepeat);
  auto other = pack;
  other.id = "ba9876543210";
  EXPECT_TRUE(editors::find_conflicts(std::vector<NamedPack>{{"a", pack}, {"b", other}}).empty());
}

TEST(Merge, AMergedPackIsAPack) {
  const testing::TemporaryFolder folder("merge");
  models::Model model = tiny_model();
  std::vector<NamedPack> packs = {{"a", pack_of(model, {1}, 2, 1, {fact("{} is in", "Oslo", "Rome")})},
                                  {"b", pack_of(model, {1, 2}, 2, 2, {fact("{} is in", "Bern", "Rome")})}};
  packs[1].pack.editor = "rome";
  for (auto& [name, pack] : packs) pack.extra["spare_neurons"] = 32;
  editors::save_pack(folder.path() / "merged.safetensors", merge_packs(packs).pack);
  const auto read = editors::load_pack(folder.path() / "merged.safetensors");
  EXPECT_EQ(read.extra["spare_neurons"], 32) << "the room that its parts need";
  EXPECT_EQ(read.editor, "memit+rome");
  EXPECT_EQ(read.base_fingerprint, model.fingerprint());
  const std::vector<NamedPack> again = {{"merged", read}};
  EXPECT_EQ(merge_packs(again).pack.extra, read.extra) << "the merge of one pack is that pack";
}

// Made on two edits of one model, it needs both.
TEST(Merge, LiesOnAllEditsUnderItsParts) {
  const models::Model model = tiny_model();
  std::vector<NamedPack> packs = {{"a", pack_of(model, {1}, 2, 1, {fact("{} is in", "Oslo", "Rome")})},
                                  {"b", pack_of(model, {2}, 2, 2, {fact("{} is in", "Bern", "Rome")})}};
  const std::string root = model.fingerprint(), with_x(64, 'a'), with_y(64, 'b');
  packs[0].pack.base_fingerprint = with_x;
  packs[0].pack.under = {root, {"x"}};
  packs[1].pack.base_fingerprint = with_y;
  packs[1].pack.under = {root, {"y"}};
  const EditPack merged = merge_packs(packs).pack;
  EXPECT_EQ(merged.under.edits, (std::vector<std::string>{"x", "y"}));
  const auto misses = [&](const std::string& edits, const std::string& fingerprint, const editors::Lineage& here) {
    testing::expect_error(ErrorClass::kInvalidArgument, {"on top of the edits " + edits + ";"},
                          [&] { editors::require_base(merged, fingerprint, {}, "pack", here); });
  };
  misses("y", with_x, {root, {"x"}});
  misses("x", with_y, {root, {"y"}});
  misses("x, y", root, {});
  editors::require_base(merged, std::string(64, 'c'), {}, "pack", {root, {"y", "x"}});
  editors::require_base(packs[0].pack, with_x, {}, "pack", {root, {"x"}});
  editors::require_base(packs[0].pack, with_x, {}, "a copy that knows of no edits", {});
}

TEST(Merge, AnotherModelIsAcceptedByNameOnly) {
  models::Model model = tiny_model(), other = tiny_model({.seed = 2});
  const EditPack pack = pack_of(model, {1}, 1, 1, {});
  const auto accepts = [&](std::vector<std::string> bases) {
    try {
      (void)editors::apply_pack(other, pack, {.accepted_bases = std::move(bases)});
      return true;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("accept_base"), std::string::npos);
      return false;
    }
  };
  EXPECT_FALSE(accepts({}));
  EXPECT_TRUE(accepts({model.fingerprint()}));
  EXPECT_TRUE(accepts({model.fingerprint().substr(0, 8)}));
  std::string capitals = model.fingerprint().substr(0, 12);
  for (char& c : capitals) c = static_cast<char>(std::toupper(c));
  EXPECT_TRUE(accepts({capitals}));
  EXPECT_FALSE(accepts({model.fingerprint().substr(0, 7)})) << "too short to be a name";
  EXPECT_FALSE(accepts({other.fingerprint(), ""}));
}

TEST(Difference, Facts) {
  const auto a = nlohmann::json::array(
      {fact("{} is in", "Oslo", "Rome"), fact("{} is in", "Bern", "Kiel"), fact("{} is in", "Ulm", "Po")});
  const auto b = nlohmann::json::array(
      {fact("{} is in", "Bern", "Graz"), fact("{} is in ", "OSLO", "rome "), fact("{} is in", "Ur", "Po")});
  const auto difference = editors::compare_facts(a, b);
  EXPECT_EQ(difference.same, 1U);
  ASSERT_EQ(difference.changed.size(), 1U);
  EXPECT_EQ(difference.changed[0].question, "Bern is in");
  EXPECT_EQ(difference.changed[0].a + " " + difference.changed[0].b, "Kiel Graz");
  ASSERT_EQ(difference.only_a.size(), 1U);
  EXPECT_EQ(difference.only_a[0]["subject"], "Ulm");
  ASSERT_EQ(difference.only_b.size(), 1U);
  EXPECT_EQ(difference.only_b[0]["subject"], "Ur");
}

TEST(Difference, Weights) {
  const models::Model model = tiny_model();
  const auto a = pack_of(model, {1, 2}, 2, 1, {}).deltas, b = pack_of(model, {2, 3}, 2, 9, {}).deltas;
  auto list = editors::compare_deltas(a, b, &model.checkpoint());
  ASSERT_EQ(list.size(), 3U);
  const at::Tensor one = a[1].matrix(), two = b[0].matrix();
  EXPECT_NEAR(list[1].between, (two - one).norm().item<double>(), 1e-12);
  EXPECT_NEAR(*list[1].cosine, ((one * two).sum() / (one.norm() * two.norm())).item<double>(), 1e-12);
  EXPECT_NEAR(*list[1].base, model.weight(a[1].weight).to(at::kDouble).norm().item<double>(), 1e-9);
  EXPECT_EQ(list[0].b, 0);
  EXPECT_FALSE(list[0].cosine);
  EXPECT_NEAR(list[0].between, list[0].a, 1e-12);
  EXPECT_NEAR(list[2].b, b[1].norm(), 1e-12);
  auto opposite = a;
  for (auto& delta : opposite) delta.left_DR = -delta.left_DR;
  EXPECT_NEAR(*editors::compare_deltas(a, opposite, nullptr)[0].cosine, -1, 1e-12);
}

// A pack compared with the difference of two checkpoints, also where the checkpoint stores the transpose.
TEST(Difference, CheckpointsGiveThePacksChanges) {
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = testing::debug_model(family, 3);
    const testing::TemporaryFolder folder("difference");
    const auto pack = pack_of(model, {0, 1}, 2, 1, {});
    (void)models::save_model(model, folder.path() / "base", at::kFloat);
    {
      const auto applied = editors::apply_pack(model, pack);
      (void)models::save_model(model, folder.path() / "edited", at::kFloat);
    }
    const auto base = models::open_checkpoint((folder.path() / "base").string()),
               edited = models::open_checkpoint((folder.path() / "edited").string());
    const auto deltas = editors::deltas_between(*base, *edited);
    ASSERT_EQ(deltas.size(), 2U) << family;
    EXPECT_TRUE(editors::deltas_between(*base, *base).empty());
    for (const auto& one : editors::compare_deltas(pack.deltas, deltas, base.get())) {
      EXPECT_NEAR(*one.cosine, 1, 1e-6) << family;
      EXPECT_LT(one.between, 1e-4 * one.a) << family;
    }
    for (const auto& delta : deltas) EXPECT_EQ(delta.orientation, pack.deltas[0].orientation) << family;
    // The same model without the family's prefix, and with a tensor that is no weight.
    const std::string prefix = model.family().base_prefix;
    std::vector<std::pair<std::string, at::Tensor>> bare;
    for (const auto& info : edited->tensors())
      bare.emplace_back(info.name.starts_with(prefix) ? info.name.substr(prefix.size()) : info.name,
                        edited->read(info.name));
    bare.emplace_back(std::string(family) == "llama" ? "layers.0.self_attn.rotary_emb.inv_freq" : "h.0.attn.bias",
                      at::ones({2}));
    // A tied head that is stored as well, by a name that the loader takes for it.
    if (model.config().tied_head) bare.emplace_back("language_model.lm_head.weight", at::ones({2, 2}));
    std::filesystem::create_directories(folder.path() / "bare");
    write_file(folder.path() / "bare" / "config.json", read_file(folder.path() / "edited" / "config.json"));
    write_safetensors(folder.path() / "bare" / "model.safetensors", bare);
    const auto again = models::open_checkpoint((folder.path() / "bare").string());
    for (const auto& one : editors::deltas_between(*base, *again)) {
      const auto same = std::ranges::find(deltas, one.weight, &editors::WeightDelta::weight);
      ASSERT_NE(same, deltas.end()) << one.weight;
      EXPECT_TRUE(at::equal(one.dense_DF, same->dense_DF));
    }
    EXPECT_EQ(editors::deltas_between(*base, *again).size(), 2U);
    const models::Model stranger = testing::debug_model(std::string(family) == "llama" ? "gpt2" : "llama");
    EXPECT_THROW((void)editors::deltas_between(*base, stranger.checkpoint()), Error);
  }
}

}  // namespace merge_test
}  // namespace emend
