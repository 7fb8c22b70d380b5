// Loops over every debug flavour of every family in families.def.
#include <emend/core/safetensors.h>

#include "support/family_suite.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace family_conformance_test {

using testing::FamilyFlavour;
using testing::FamilySuite;

// Different batch shapes take different kernels: sums of some hundred float32 products, logits up to about 10.
constexpr double kTolerance = 2e-5;

class Family : public ::testing::TestWithParam<FamilyFlavour> {
 protected:
  std::shared_ptr<const Checkpoint> checkpoint(uint64_t seed = 11) const {
    return random_checkpoint(testing::debug_config(GetParam().family, GetParam().flavour), seed);
  }
};

TEST_P(Family, EverySiteFires) {
  FamilySuite(GetParam(), {}).every_site_fires();
}
TEST_P(Family, EverySiteCanBeEdited) {
  FamilySuite(GetParam(), {}).every_site_can_be_edited();
}
TEST_P(Family, PackingChangesNothing) {
  FamilySuite(GetParam(), {}).packing_changes_nothing(kTolerance);
}
TEST_P(Family, RestartEqualsWhole) {
  FamilySuite(GetParam(), {}).restart_equals_whole(kTolerance);
}
TEST_P(Family, CacheEqualsWhole) {
  FamilySuite(GetParam(), {}).cache_equals_whole(kTolerance);
}
TEST_P(Family, EditSiteIsOriented) {
  FamilySuite(GetParam(), {}).edit_site_is_oriented(kTolerance);
}

TEST_P(Family, DoublePrecisionAgreesWithSingle) {
  FamilySuite single(GetParam(), {}), twice(GetParam(), {}, at::kDouble);
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const at::NoGradGuard no_grad;
  EXPECT_LE((single.logits(batch).to(at::kDouble) - twice.logits(batch)).abs().max().item<double>(), 1e-4);
}

TEST_P(Family, PaddingOnEitherSideChangesNothing) {
  FamilySuite suite(GetParam(), {});
  const at::NoGradGuard no_grad;
  const auto rows = testing::suite_rows();
  const auto packed = TokenBatch::from_rows(rows);
  const at::Tensor plain = suite.logits(packed);
  for (const bool left : {false, true}) {
    // With positions that count real tokens; Qwen's columns past the trained length are another thing (see below).
    if (left && suite.model().config().logn_length > 0) continue;
    at::Tensor ids = at::zeros({4, 12}, at::kLong), mask = at::zeros({4, 12}, at::kLong),
               positions = at::zeros({4, 12}, at::kLong);
    for (size_t r = 0; r < rows.size(); ++r)
      for (size_t k = 0; k < rows[r].size(); ++k) {
        const int64_t column = left ? 12 - static_cast<int64_t>(rows[r].size() - k) : static_cast<int64_t>(k);
        ids[r][column] = rows[r][k];
        mask[r][column] = 1;
        positions[r][column] = static_cast<int64_t>(k);
      }
    for (const bool keep : {false, true}) {
      const auto batch = TokenBatch::from_padded(ids, mask, positions, keep);
      const at::Tensor unpacked = batch.unpack(suite.logits(batch));
      const at::Tensor real = unpacked.index({mask.to(at::kBool)});
      EXPECT_LE((real - plain).abs().max().item<double>(), kTolerance) << "left " << left << " keep " << keep;
    }
  }
}

TEST_P(Family, EveryTensorIsConsumedAndNamed) {
  const auto source = checkpoint();
  const Model model = load_model(source);
  EXPECT_EQ(model.weight_names().size(), source->tensors().size());
  int64_t parameters = 0;
  for (const TensorInfo& info : source->tensors()) {
    EXPECT_TRUE(at::equal(model.weight(info.name), source->read(info.name))) << info.name;
    parameters += model.weight(info.name).numel();
  }
  EXPECT_EQ(model.parameter_count(), parameters);
  EXPECT_THROW((void)model.weight("no.such.weight"), Error);
}

TEST_P(Family, NamesWithoutTheBasePrefixLoadToo) {
  const auto source = checkpoint();
  const FamilySpec& family = family_named(GetParam().family);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const TensorInfo& info : source->tensors()) {
    const bool prefixed = info.name.starts_with(family.base_prefix);
    tensors.emplace_back(prefixed ? info.name.substr(family.base_prefix.size()) : info.name, source->read(info.name));
  }
  const Model whole = load_model(source),
              bare = load_model(std::make_shared<MemoryCheckpoint>(source->config(), tensors));
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(whole.forward(batch).logits, bare.forward(batch).logits));
  for (const TensorInfo& info : source->tensors()) EXPECT_TRUE(bare.has_weight(info.name)) << info.name;
}

TEST_P(Family, SavesAndLoadsToEqualLogits) {
  const testing::TemporaryFolder folder("family_" + GetParam().family + GetParam().flavour);
  const Model model = load_model(checkpoint());
  EXPECT_TRUE(save_model(model, folder / "model").empty());
  const Model again = load_model((folder / "model").string());
  const auto batch = TokenBatch::from_rows(testing::suite_rows());
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model.forward(batch).logits, again.forward(batch).logits));
  EXPECT_EQ(model.current_fingerprint(), again.current_fingerprint());
}

TEST_P(Family, ModuleNamesAreAcceptedAndCheckedWell) {
  const Model model = load_model(checkpoint());
  const ModuleNames& m = model.family().modules;
  NamedModules names{m.layer, m.attn, m.mlp, m.rewrite, m.ln_f, m.lm_head};
  check_module_names(model.family(), model.config(), names, [](const char*) { return std::string("test.yaml"); });
  names.rewrite_module_tmp = "model.layers.{}.mlp.nothing";
  EXPECT_THROW(
      check_module_names(model.family(), model.config(), names, [](const char*) { return std::string("test.yaml"); }),
      Error);
  if (model.config().no_edit_site.empty()) {
    std::string weight = m.rewrite + ".weight";
    weight.replace(weight.find("{}"), 2, "1");
    EXPECT_EQ(model.edit_site(1).weight_name, weight);
  }
  const auto modules = device_module_names(model.family(), model.config());
  for (const std::string& name : model.weight_names()) {  // every weight belongs to a module of a device map
    const auto within = [&](const std::string& module) { return name.starts_with(module + "."); };
    bool found = false;
    for (const auto* list : {&modules.embedding, &modules.position, &modules.final_norm, &modules.head})
      for (const std::string& module : *list) found = found || within(module);
    for (int64_t l = 0; l < model.n_layers(); ++l) found = found || within(modules.layer(l));
    EXPECT_TRUE(found) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Family, ::testing::ValuesIn(testing::all_flavours()), testing::flavour_name);

}  // namespace family_conformance_test
}  // namespace emend::models
