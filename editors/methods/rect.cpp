// RECT: Model Editing Harms General Abilities of Large Language Models: Regularization to the Rescue (Gu et al., EMNLP
// 2024).
//
//   1. ΔW as MEMIT, all layers.
//   2. Of each ΔW only the k percent of entries with the largest relative change |ΔW/W| are written.
//
// With `history` a batch is solved together with all earlier ones (closed_form): what was left out is asked for again.
// "The Labyrinth and the Thread" (arXiv 2605.26670) finds that this, not the mask, keeps a sequence stable.
//
//   D hidden width · F key width
#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct RectHparams : MemitHparams {
  double k_percent = 40;
  bool history = false;
};

WeightDelta largest_changes(const models::EditSite& site, const WeightDelta& solved, const at::Tensor& weight_DF,
                            double k_percent) {
  const at::Tensor delta_DF = solved.matrix();
  const at::Tensor weight = devices::route_like(weight_DF, delta_DF, devices::Purpose::kSolve).to(at::kDouble);
  const at::Tensor change_DF = (delta_DF / (weight + 1e-8)).abs();
  const auto dropped = static_cast<int64_t>(static_cast<double>(change_DF.numel()) * (100 - k_percent) / 100);
  if (dropped < 1) return solved;
  const at::Tensor threshold = std::get<0>(change_DF.reshape({-1}).kthvalue(dropped));
  return WeightDelta::dense(site, delta_DF * change_DF.ge(threshold).to(at::kDouble));
}

LocateRecipe rect_recipe(const RectHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  recipe.remembers_keys = recipe.keys_as_written = recipe.compensates = h.history;
  recipe.settle = [share = h.k_percent](const auto& site, const auto& solved, const auto& weight_DF) {
    return largest_changes(site, solved, weight_DF, share);
  };
  return recipe;
}

}  // namespace

EditorInfo make_rect() {
  using H = RectHparams;
  static const auto schema =
      hparams::Schema<H>("rect")
          .include(memit_hparams_schema())
          .field("k_percent", &H::k_percent, "share of the entries that are written, in percent",
                 {.formula = "the k % with the largest |ΔW / (W + 1e-8)|", .max = 100, .above = 0})
          .field("history", &H::history, history_field())
          .check("rounds", one_round);
  return locate_entry(
      "rect", "MEMIT, of whose change only the entries with the largest relative size are written",
      "Gu et al., Model Editing Harms General Abilities of Large Language Models: Regularization to the Rescue, EMNLP "
      "2024",
      schema, rect_recipe);
}

}  // namespace emend::editors
