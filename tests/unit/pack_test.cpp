#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/steps/apply.h>
#include <gtest/gtest.h>

#include <random>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace pack_test {

using editors::EditPack;
using editors::EditTransaction;
using editors::WeightDelta;
using testing::all_weights;
using testing::changed_weights;
using testing::random_matrix;
using testing::TemporaryFolder;
using testing::tiny_model;

EditPack make_pack(const models::Model& model) {
  const auto low = model.edit_site(1), full = model.edit_site(2);
  editors::EditResult result;
  result.editor = "memit";
  result.hparams = {{"layers", {1, 2}}, {"v_lr", 0.5}};
  result.contexts = testing::tiny_contexts();
  result.deltas = {WeightDelta::factors(low, random_matrix(32, 2, 1) * 0.1, random_matrix(48, 2, 2)),
                   WeightDelta::dense(full, random_matrix(32, 48, 3) * 0.1)};
  const auto facts = testing::tiny_facts();
  return EditPack::from_results(model, std::span(&result, 1), facts);
}

TEST(Pack, RoundTripKeepsEverything) {
  const TemporaryFolder folder("pack");
  for (const char* family : {"llama", "gpt2"}) {
    models::Model model = tiny_model({.family = family});
    const EditPack pack = make_pack(model);
    const auto path = folder.path() / (std::string(family) + ".safetensors");
    editors::save_pack(path, pack);
    const EditPack read = editors::load_pack(path);
    EXPECT_EQ(read.base_fingerprint, model.fingerprint());
    EXPECT_EQ(read.editor, "memit");
    EXPECT_EQ(read.hparams, pack.hparams);
    EXPECT_EQ(read.facts, pack.facts);
    EXPECT_EQ(read.facts.size(), 4U);
    EXPECT_EQ(read.extra, pack.extra);
    ASSERT_EQ(read.deltas.size(), 2U);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(read.deltas[i].weight, pack.deltas[i].weight);
      EXPECT_EQ(read.deltas[i].layer, pack.deltas[i].layer);
      EXPECT_EQ(read.deltas[i].orientation, pack.deltas[i].orientation);
      EXPECT_EQ(read.deltas[i].low_rank(), pack.deltas[i].low_rank());
      EXPECT_TRUE(at::equal(read.deltas[i].matrix(), pack.deltas[i].matrix()));
    }
  }
}

TEST(Pack, ADescriptionIsReadAgain) {
  const EditPack pack = make_pack(tiny_model({}));
  const EditPack read = editors::described_edit(editors::describe_edit(pack), "a file");
  EXPECT_EQ(read.editor, pack.editor);
  EXPECT_EQ(read.facts, pack.facts);
  for (const char* other : {"", "{}", "[1]", R"({"editor": 1, "facts": []})", R"({"editor": "memit", "facts": 2})"}) {
    const auto said =
        testing::error_of([&] { (void)editors::described_edit(other, "a file"); }, ErrorClass::kCorruption);
    EXPECT_TRUE(said.starts_with("a file")) << said;
  }
}

TEST(Pack, ApplyGivesTheEditedModelAndRevertTheOriginalBytes) {
  const TemporaryFolder folder("pack");
  const auto path = folder.path() / "edit.safetensors";
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    models::Model edited = tiny_model({.dtype = dtype}), fresh = tiny_model({.dtype = dtype});
    const EditPack pack = make_pack(edited);
    editors::save_pack(path, pack);
    EditTransaction transaction(edited);
    for (const auto& delta : pack.deltas) (void)editors::apply_delta(delta, transaction);

    const auto before = all_weights(fresh);
    const auto applied = editors::apply_pack(fresh, editors::load_pack(path));
    EXPECT_TRUE(changed_weights(fresh, all_weights(edited)).empty());
    EXPECT_EQ(applied->changed().size(), 2U);
    applied->restore();
    EXPECT_TRUE(changed_weights(fresh, before).empty());
    const auto again = editors::apply_pack(fresh, pack);
    again->commit();
    EXPECT_TRUE(changed_weights(fresh, all_weights(edited)).empty());
    transaction.commit();
  }
}

TEST(Pack, OnlyForItsOwnModel) {
  models::Model model = tiny_model(), other = tiny_model({.seed = 2}), different = tiny_model({.family = "gpt2"});
  const EditPack pack = make_pack(model);
  const auto before = all_weights(other);
  EXPECT_THROW((void)editors::apply_pack(other, pack), Error);
  EXPECT_TRUE(changed_weights(other, before).empty());
  { const auto forced = editors::apply_pack(other, pack, {.force = true}); }
  EXPECT_TRUE(changed_weights(other, before).empty()) << "an uncommitted application is taken back";
  EXPECT_THROW((void)editors::apply_pack(different, pack, {.force = true}), Error) << "weights must exist and fit";
}

// Every damaged file is refused with the same class, and nothing else escapes.
void expect_refused(const std::filesystem::path& path, const std::string& what) {
  try {
    (void)editors::load_pack(path);
    ADD_FAILURE() << what << ": accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(error.error_class() == ErrorClass::kCorruption || error.error_class() == ErrorClass::kUnsupported)
        << what << ": " << error.what();
    EXPECT_NE(std::string(error.what()).find(path.filename().string()), std::string::npos) << error.what();
  }
}

TEST(Pack, RefusesDamagedAndHostileFiles) {
  const TemporaryFolder folder("pack");
  models::Model model = tiny_model();
  const auto path = folder.path() / "edit.safetensors", bad = folder.path() / "bad.safetensors";
  editors::save_pack(path, make_pack(model));
  const std::string bytes = read_file(path);

  for (const size_t length : {size_t{0}, size_t{4}, size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    write_file(bad, bytes.substr(0, length));
    expect_refused(bad, "cut to " + std::to_string(length));
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string flipped = bytes;
    const size_t at = random() % bytes.size();
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (random() % 8)));
    write_file(bad, flipped);
    expect_refused(bad, "bit flipped in byte " + std::to_string(at));
  }

  const SafetensorsFile file(path);
  const auto rewrite = [&](const std::function<void(nlohmann::json&, std::map<std::string, std::string>&,
                                                    std::vector<std::pair<std::string, at::Tensor>>&)>& change) {
    auto metadata = file.metadata();
    auto manifest = nlohmann::json::parse(metadata.at("manifest"));
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& [name, info] : file.tensors()) tensors.emplace_back(name, file.tensor(name));
    metadata["manifest"] = "";
    change(manifest, metadata, tensors);
    if (metadata["manifest"].empty()) metadata["manifest"] = manifest.dump();
    write_safetensors(bad, tensors, metadata);
  };
  rewrite([](auto&, auto& metadata, auto&) { metadata["version"] = "99"; });
  expect_refused(bad, "newer version");
  rewrite([](auto&, auto& metadata, auto&) { metadata["version"] = "-1"; });
  expect_refused(bad, "odd version");
  rewrite([](auto&, auto& metadata, auto&) { metadata.erase("checksum"); });
  expect_refused(bad, "no checksum");
  rewrite([](auto&, auto& metadata, auto&) { metadata["manifest"] = std::string(100000, '['); });
  expect_refused(bad, "deep manifest");
  rewrite([](auto& manifest, auto&, auto&) { manifest["deltas"][0]["rank"] = -3; });
  expect_refused(bad, "negative rank");
  rewrite([](auto& manifest, auto&, auto&) { manifest["deltas"][0]["shape"] = {int64_t{1} << 62, 4}; });
  expect_refused(bad, "huge shape");
  rewrite([](auto& manifest, auto&, auto&) { manifest["deltas"][1]["weight"] = manifest["deltas"][0]["weight"]; });
  expect_refused(bad, "weight twice");
  rewrite([](auto& manifest, auto&, auto&) { manifest["deltas"] = 5; });
  expect_refused(bad, "deltas of another type");
  rewrite([](auto&, auto&, auto& tensors) { tensors.emplace_back("9.left", at::zeros({2})); });
  expect_refused(bad, "extra tensor");
  rewrite([](auto&, auto&, auto& tensors) { tensors[0].second = tensors[0].second.to(at::kLong); });
  expect_refused(bad, "integer tensor");
}

TEST(Pack, AFileOfAnotherKindIsNoDamagedOne) {
  const TemporaryFolder folder("pack");
  const auto path = folder.path() / "results.json";
  write_file(path, nlohmann::json({{"editor", "memit"}, {"facts", 4}}).dump(2) + "\n");
  testing::expect_refused([&] { (void)editors::load_pack(path); }, ErrorClass::kCorruption, {"json: no edit pack"});
}

TEST(Pack, RefusesNumbersThatAreNone) {
  const TemporaryFolder folder("pack");
  models::Model model = tiny_model();
  EditPack pack = make_pack(model);
  pack.deltas[0].left_DR = pack.deltas[0].left_DR.clone();
  pack.deltas[0].left_DR[0][0] = std::numeric_limits<double>::infinity();
  editors::save_pack(folder.path() / "nan.safetensors", pack);
  expect_refused(folder.path() / "nan.safetensors", "infinite factor");
}

}  // namespace pack_test
}  // namespace emend
