// AnyEdit (Jiang et al., 2025), the MEMIT form: targets of any length, window by window (targets.h).
//
//   1. The target is cut into windows of `window_size` tokens. The first is optimised where MEMIT looks a fact up, each
//      later one at the token before it, with the earlier windows' δ still added.
//   2. Every window is a column of MEMIT's system: its key is the one of its own token.
//
// A target of at most one window is edited exactly as MEMIT edits it. The authors look the first window up at the last
// token of the prompt; `fact_token: last` does that, subject_last reaches other wordings too.
#include <emend/editors/steps/locate.h>

namespace emend::editors {
namespace {

struct AnyEditHparams : MemitHparams {
  int64_t window_size = 20;
  int64_t overlap = 0;
};

LocateRecipe anyedit_recipe(const AnyEditHparams& h, const RecipeInputs& in) {
  LocateRecipe recipe = memit_recipe(h, in);
  recipe.windows = {h.window_size, h.overlap};
  return recipe;
}

}  // namespace

EditorInfo make_anyedit() {
  using H = AnyEditHparams;
  static const auto schema =
      hparams::Schema<H>("anyedit")
          .include(memit_hparams_schema())
          .field("window_size", &H::window_size, "tokens a window", {.min = 1})
          .field("overlap", &H::overlap, "tokens that a window shares with the one before it", {.min = 0})
          .check("overlap", "less than window_size", [](const H& h) { return h.overlap < h.window_size; })
          .check("merge_equal_keys", "false: every window has a target of its own",
                 [](const H& h) { return !h.merge_equal_keys; })
          .check("rounds", one_round);
  return locate_entry("anyedit", "long answers, written window by window",
                      "Jiang et al., AnyEdit: Edit Any Knowledge Encoded in Language Models, ICML 2025", schema,
                      anyedit_recipe);
}

}  // namespace emend::editors
