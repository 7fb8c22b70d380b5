// LoRA and AdaLoRA as editors: factors of the asked rank, adapters gone afterwards, packs, adapters for PEFT.
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/packs/peft.h>
#include <emend/editors/registry.h>
#include <gtest/gtest.h>

#include "support/editor_models.h"
#include "support/spread_plan.h"

namespace emend {
namespace lora_editor_test {

using editors::EditContext;
using testing::all_weights;
using testing::changed_weights;
using testing::sim;
using testing::tiny_facts;
using testing::tiny_model;

std::unique_ptr<editors::Editor> lora(const models::Model& model, const std::string& hparams) {
  return editors::make_editor("lora", hparams::parse_hparams(hparams, "test.yaml"), model);
}

TEST(LoraEditor, TrainsFactorsAndMergesThem) {
  const testing::TemporaryFolder folder("lora");
  for (const char* type : {"lora", "adalora"})
    for (const char* family : {"llama", "gpt2"}) {
      models::Model model = tiny_model({.family = family}), fresh = tiny_model({.family = family});
      const auto before = all_weights(model);
      EditContext context;
      const auto editor =
          lora(model, std::string("lora_type: ") + type + "\nrank: 3\nnum_steps: 30\nlora_dropout: 0.1\nlr: 2e-2\n");
      const editors::EditResult result = editor->edit(model, tiny_facts(), context);
      ASSERT_FALSE(result.deltas.empty());
      for (const auto& delta : result.deltas) {
        EXPECT_TRUE(delta.low_rank());
        EXPECT_EQ(delta.rank(), 3);
      }
      EXPECT_EQ(changed_weights(model, before).size(), result.deltas.size()) << type << " " << family;
      for (const auto& outcome : result.outcomes)
        EXPECT_LT(outcome.curve.back().nll, 0.8 * outcome.curve.front().nll) << type << " " << family;
      // Merged weights do what the adapters did: the last measurement was made with adapters.
      const auto pack = editors::EditPack::from_results(fresh, std::span(&result, 1), tiny_facts());
      editors::save_pack(folder.path() / "edit.safetensors", pack);
      editors::apply_pack(fresh, editors::load_pack(folder.path() / "edit.safetensors"))->commit();
      EXPECT_TRUE(changed_weights(fresh, all_weights(model)).empty());
      EXPECT_EQ(editors::export_peft(folder.path() / "adapter", pack, fresh).size(), result.deltas.size());
      EditContext again;
      const auto measured =
          lora(model, "lora_type: lora\nrank: 1\nnum_steps: 1\nlora_dropout: 0\n")->edit(model, tiny_facts(), again);
      for (size_t i = 0; i < measured.outcomes.size(); ++i)
        EXPECT_NEAR(measured.outcomes[i].curve.front().nll, result.outcomes[i].curve.back().nll, 2e-3)
            << type << " " << family;
    }
}

TEST(LoraEditor, LeavesNoTraceWhenCancelled) {
  models::Model model = tiny_model();
  const auto before = all_weights(model);
  const auto tokens = models::TokenBatch::from_rows({{1, 2, 3}});
  const at::Tensor plain = model.forward(tokens).logits.detach().clone();
  EditContext context;
  context.progress = [&](const ProgressUpdate& update) {
    if (update.done >= 2) context.cancel.request();
  };
  for (const char* type : {"lora", "adalora"}) {
    EXPECT_THROW((void)lora(model, std::string("lora_type: ") + type + "\n")->edit(model, tiny_facts(), context),
                 Error);
    EXPECT_TRUE(changed_weights(model, before).empty());
    EXPECT_TRUE(at::equal(model.forward(tokens).logits, plain)) << "adapters are gone";
  }
}

TEST(LoraEditor, EqualSeedsAndSplitModelsAgree) {
  const char* hparams = "lora_type: lora\nrank: 2\nnum_steps: 3\ntarget_modules: [down_proj]\nlayers: [1, 2]\n";
  models::Model one = tiny_model(), two = tiny_model(),
                split = tiny_model({.place = testing::over_devices({sim(0), sim(1), sim(2), sim(2)})});
  EditContext a, b, c;
  (void)lora(one, hparams)->edit(one, tiny_facts(), a);
  (void)lora(two, hparams)->edit(two, tiny_facts(), b);
  EXPECT_TRUE(changed_weights(two, all_weights(one)).empty());
  const auto result = lora(split, hparams)->edit(split, tiny_facts(), c);
  ASSERT_EQ(result.deltas.size(), 2U);
  for (const auto& delta : result.deltas)
    EXPECT_LT(
        testing::relative_difference(devices::to_host(split.weight(delta.weight).detach()), one.weight(delta.weight)),
        1e-5);
}

TEST(LoraEditor, OptionsWorkOrAreRefused) {
  const models::Model model = tiny_model();
  for (const char* bad :
       {"kl_factor: 1\n", "norm_constraint: 0.1\n", "lora_type: dora\n", "layers: [9]\n", "rank: 0\n"})
    EXPECT_THROW((void)lora(model, bad), Error) << bad;
  models::Model trained = tiny_model();
  EditContext context;
  EXPECT_THROW((void)lora(trained, "target_modules: [nothing]\n")->edit(trained, tiny_facts(), context), Error);
}

}  // namespace lora_editor_test
}  // namespace emend
