// Deltas that other programs have saved.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/npz.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/import_deltas.h>
#include <emend/editors/packs/peft.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/error_of.h"

namespace emend {
namespace import_deltas_test {

using editors::import_deltas;
using editors::WeightDelta;
using testing::random_matrix;
using testing::tiny_model;

class ImportDeltas : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "deltas.safetensors"; }
  void write(const std::vector<std::pair<std::string, at::Tensor>>& tensors) const {
    write_safetensors(path(), tensors);
  }
  void expect_refused(ErrorClass error_class, const std::string& word, const std::string& weight = "") const {
    testing::expect_refused([&] { (void)import_deltas(path(), model_, weight); }, error_class, {word});
  }

  testing::TemporaryFolder folder_{"import"};
  models::Model model_ = tiny_model({.family = GetParam()});
  models::EditSite site_ = model_.edit_site(1);
  at::Tensor left_DN_ = random_matrix(32, 3, 1), right_FN_ = random_matrix(48, 3, 2);
};

// upd = key_mat @ val_mat.T, turned where the weight is stored the other way round: kmeng01/memit,
// upd_matrix_match_shape.
TEST_P(ImportDeltas, PairsOfMemit) {
  write({{site_.weight_name + ".key_mat", right_FN_}, {site_.weight_name + ".val_mat", left_DN_}});
  const auto deltas = import_deltas(path(), model_);
  ASSERT_EQ(deltas.size(), 1U);
  EXPECT_EQ(deltas[0].weight, site_.weight_name);
  EXPECT_EQ(deltas[0].layer, 1);
  EXPECT_EQ(deltas[0].orientation, site_.orientation);
  EXPECT_LT(testing::relative_difference(deltas[0].matrix(), right_FN_.mm(left_DN_.t()).t()), 1e-14);
}

// The weight is called what the model calls it, however the source does.
TEST_P(ImportDeltas, NamesWithoutThePrefix) {
  const std::string bare = models::without_base(model_.family(), site_.weight_name);
  ASSERT_NE(bare, site_.weight_name);
  write({{bare + ".key_mat", right_FN_}, {bare + ".val_mat", left_DN_}});
  EXPECT_EQ(import_deltas(path(), model_).at(0).weight, site_.weight_name);
}

TEST_P(ImportDeltas, VectorsOfRome) {
  const at::Tensor u_F = right_FN_.select(1, 0), v_D = left_DN_.select(1, 0);
  write({{site_.weight_name + ".left_vector", u_F.contiguous()},
         {site_.weight_name + ".right_vector", v_D.contiguous()}});
  EXPECT_LT(testing::relative_difference(import_deltas(path(), model_).at(0).matrix(), at::outer(u_F, v_D).t()), 1e-14);
}

// tests/fixtures/npz/make.py: the two vectors of a ROME cache for a matrix of 48 inputs and 32 outputs.
TEST_P(ImportDeltas, ArchivesOfNumpyAndVectorsWithoutAWeight) {
  const auto archive = std::filesystem::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "npz" / "rome_vectors.npz";
  const NpzFile file(archive);
  const at::Tensor u_F = file.read("left_vector"), v_D = file.read("right_vector");
  const auto deltas = import_deltas(archive, model_, site_.weight_name);
  ASSERT_EQ(deltas.size(), 1U);
  EXPECT_EQ(deltas[0].weight, site_.weight_name);
  EXPECT_LT(testing::relative_difference(deltas[0].matrix(), at::outer(v_D.to(at::kDouble), u_F.to(at::kDouble))),
            1e-12);
  testing::expect_refused([&] { (void)import_deltas(archive, model_); }, ErrorClass::kInvalidArgument, {"weight W"});
  write({{site_.weight_name, at::zeros_like(model_.weight(site_.weight_name))}});
  expect_refused(ErrorClass::kInvalidArgument, "names its weights", site_.weight_name);
}

TEST_P(ImportDeltas, DenseChangesAndWhatApplyingThemGives) {
  const at::Tensor before = model_.weight(site_.weight_name).clone();
  const at::Tensor change = at::randn(before.sizes()) * 0.1;
  write({{site_.weight_name, change}});
  editors::EditPack pack;
  pack.base_fingerprint = model_.fingerprint();
  pack.deltas = import_deltas(path(), model_);
  const auto applied = editors::apply_pack(model_, pack);
  EXPECT_LT((model_.weight(site_.weight_name) - before - change).abs().max().item<double>(), 1e-6);
  // Laid out as editors give their changes: it can be added to them, and an adapter of it says the same.
  EXPECT_EQ(pack.deltas[0].orientation, WeightDelta::factors(site_, left_DN_, right_FN_).orientation);
  (void)editors::export_peft(folder_.path() / "dense", pack, model_);
  EXPECT_LT(testing::relative_difference(import_deltas(folder_.path() / "dense", model_).at(0).matrix(),
                                         pack.deltas[0].matrix()),
            1e-5);
}

TEST_P(ImportDeltas, AnExportedAdapterComesBack) {
  editors::EditPack pack;
  pack.deltas = {WeightDelta::factors(site_, left_DN_, right_FN_)};
  (void)editors::export_peft(folder_.path() / "adapter", pack, model_);
  const auto deltas = import_deltas(folder_.path() / "adapter", model_);
  ASSERT_EQ(deltas.size(), 1U);
  EXPECT_EQ(deltas[0].weight, site_.weight_name);
  EXPECT_LT(testing::relative_difference(deltas[0].matrix(), pack.deltas[0].matrix()), 1e-6);
  // Twice the scale is twice the change, by the alpha of the module; DoRA is no sum.
  const auto config_path = folder_.path() / "adapter" / "adapter_config.json";
  auto config = nlohmann::json::parse(read_file(config_path));
  for (auto& [module, alpha] : config["alpha_pattern"].items()) alpha = 2 * alpha.get<double>();
  write_file(config_path, config.dump());
  EXPECT_LT(testing::relative_difference(import_deltas(folder_.path() / "adapter", model_)[0].matrix(),
                                         2 * pack.deltas[0].matrix()),
            1e-6);
  // Its keys are regular expressions, of which PEFT takes the first that fits, in the order of the file.
  const std::string module = config["alpha_pattern"].items().begin().key();
  const double alpha = config["alpha_pattern"].items().begin().value().get<double>() / 2;
  auto ordered = nlohmann::ordered_json::parse(config.dump());
  ordered["alpha_pattern"] = {
      {"nothing", 7}, {".*" + module.substr(module.rfind('.') + 1), 3 * alpha}, {module, alpha}};
  write_file(config_path, ordered.dump());
  EXPECT_LT(testing::relative_difference(import_deltas(folder_.path() / "adapter", model_)[0].matrix(),
                                         3 * pack.deltas[0].matrix()),
            1e-6);
  for (const nlohmann::json& other : {nlohmann::json{{"use_dora", true}},
                                      {{"init_lora_weights", "pissa_niter_4"}},
                                      {{"layer_replication", {{0, 2}, {1, 4}}}},
                                      {{"alora_invocation_tokens", {3, 4}}},
                                      {{"use_rslora", "yes"}},
                                      {{"r", 77}, {"rank_pattern", nlohmann::json::object()}},
                                      {{"lora_alpha", 1e308}, {"alpha_pattern", nlohmann::json::object()}}}) {
    auto unlike = config;
    unlike.update(other);
    write_file(config_path, unlike.dump());
    EXPECT_THROW((void)import_deltas(folder_.path() / "adapter", model_), Error) << other;
  }
}

TEST_P(ImportDeltas, WhatDoesNotFitIsRefused) {
  const std::string weight = site_.weight_name;
  write({{weight + ".key_mat", right_FN_}});
  expect_refused(ErrorClass::kCorruption, "val_mat");
  write({{weight + ".key_mat", right_FN_}, {weight + ".val_mat", left_DN_}, {weight, at::zeros({2})}});
  expect_refused(ErrorClass::kCorruption, "several changes");
  write({{weight + ".key_mat", left_DN_}, {weight + ".val_mat", right_FN_}});
  expect_refused(ErrorClass::kInvalidArgument, "do not fit");
  write({{weight + "s", left_DN_}});
  expect_refused(ErrorClass::kNotFound, weight);
  write({{weight, at::zeros({3, 3})}});
  expect_refused(ErrorClass::kInvalidArgument, "another shape");
  write({{weight, model_.weight(weight) * 1.01}});
  expect_refused(ErrorClass::kInvalidArgument, "itself");
  write_safetensors(path(), {{"0.left", left_DN_}}, {{"manifest", "{}"}});
  expect_refused(ErrorClass::kInvalidArgument, "an edit pack");
  write({{weight + ".key_mat", right_FN_ / 0}, {weight + ".val_mat", left_DN_}});
  expect_refused(ErrorClass::kCorruption, "NaN");
  write({});
  expect_refused(ErrorClass::kCorruption, "no change");
  write_file(path(), std::string("PK\x03\x04\x00\x00\x08\x08", 8) + std::string(100, 'x'));
  expect_refused(ErrorClass::kUnsupported, "pickle");
}

INSTANTIATE_TEST_SUITE_P(Families, ImportDeltas, ::testing::Values("llama", "gpt2"),
                         [](const auto& info) { return info.param; });

}  // namespace import_deltas_test
}  // namespace emend
