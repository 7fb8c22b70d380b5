// ROME and MEMIT on one model of each family, placed in the more than five hundred ways of placement_suite_test.cpp:
// the edited weights are those of one device. ROME's layer goes round, so that the edit is made on every device.
#include <emend/editors/registry.h>
#include <emend/models/config.h>
#include <gtest/gtest.h>

#include <iostream>

#include "support/editor_models.h"
#include "support/placements.h"

namespace emend {
namespace placement_edits_test {

std::vector<datasets::Fact> edited_facts() {
  return {testing::make_fact(1, "the home of {} is in", "Ada Lovelace", "Rome"),
          testing::make_fact(2, "{} lies near", "Oslo", "Ulm")};
}

struct Edited {
  std::map<std::string, at::Tensor> weights;  ///< on the host
};

/// `layers`: "[0, 1]". Solves with moments that live on the host.
Edited edit(models::Model& model, const std::string& editor, const std::string& layers) {
  const auto raw = hparams::parse_hparams("layers: " + layers +
                                              "\nclamp_norm_factor: 2\nfact_token: subject_last\nv_num_grad_steps: 4\n"
                                              "v_lr: 0.5\nv_weight_decay: 0.01\nkl_factor: 0.0625\n"
                                              "mom2_adjustment: true\nmom2_update_weight: 5\n",
                                          "placement_suite.yaml");
  auto statistics = testing::tiny_statistics(model);
  editors::EditContext context;
  context.contexts = editors::ContextTemplates{{{"{}"}, {"so it is {}"}}, false, 0};
  context.statistics = &statistics;
  const devices::TransferScope scope;
  const auto result = editors::make_editor(editor, raw, model)->edit(model, edited_facts(), context);
  testing::expect_small_transfers(scope, model.vocab_size() * model.hidden_size() * 4, editor);
  EXPECT_EQ(result.failed(), 0) << result.outcomes[0].reason;
  Edited edited;
  for (const auto& figures : result.layers) {
    const at::Tensor weight = model.weight(figures.weight);
    EXPECT_EQ(weight.device(), model.placement().layers[static_cast<size_t>(figures.layer)]) << "a weight stays";
    edited.weights[figures.weight] = devices::to_host(weight.detach()).clone();
    EXPECT_GT(figures.update_norm, 0);
  }
  return edited;
}

int64_t edits_made = 0, edits_equal_in_bits = 0;

void expect_equal_edits(const Edited& got, const Edited& expected) {
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  bool bits = true;
  for (const auto& [name, weight] : expected.weights) {
    EXPECT_LT(testing::relative_difference(got.weights.at(name), weight), 1e-6) << name;
    bits = bits && at::equal(got.weights.at(name), weight);
  }
  ++edits_made;
  edits_equal_in_bits += bits;
}

class PlacementEdits : public ::testing::TestWithParam<std::string> {};

TEST_P(PlacementEdits, EditedWeightsEqualOneDevice) {
  const auto config = testing::placed_config(GetParam());
  const models::Model host = testing::placed_model(config);
  if (!host.config().no_edit_site.empty()) GTEST_SKIP() << "no editable matrix: " << host.config().no_edit_site;
  const auto shape = testing::placed_shape(host.config());
  std::map<std::string, Edited> expected;
  const auto reference = [&](const std::string& editor, const std::string& layers) -> const Edited& {
    auto& entry = expected[editor + layers];
    if (entry.weights.empty()) {
      models::Model model = testing::placed_model(config);
      entry = edit(model, editor, layers);
    }
    return entry;
  };
  int64_t turn = 0;
  for (const auto& placed : testing::plans_of(GetParam(), shape)) {
    SCOPED_TRACE(placed.name + ": " + placed.plan.to_json().dump());
    const std::string one = "[" + std::to_string(turn % shape.n_layers) + "]";
    const std::string several = shape.n_layers > 2 ? "[0, 1]" : "[0]";
    models::Model rome = testing::placed_model(config, &placed.plan);
    expect_equal_edits(edit(rome, "rome", one), reference("rome", one));
    models::Model memit = testing::placed_model(config, &placed.plan);
    expect_equal_edits(edit(memit, "memit", several), reference("memit", several));
    ++turn;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PlacementEdits, ::testing::ValuesIn(testing::all_family_names()),
                         [](const auto& info) { return info.param; });

/// Prints how many edits were compared, after all tests.
class EditCount : public ::testing::Environment {
  void TearDown() override {
    if (edits_made > 0)
      std::cout << edits_made << " edits compared with one device, " << edits_equal_in_bits
                << " of them equal in bits\n";
  }
};
const auto* const kEditCount = ::testing::AddGlobalTestEnvironment(new EditCount);

}  // namespace placement_edits_test
}  // namespace emend
