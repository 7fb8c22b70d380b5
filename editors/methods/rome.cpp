// ROME: Locating and Editing Factual Associations in GPT (Meng et al., 2022), section 3. Steps in rank_one.h.
//
// The direction u comes from the key averaged over all contexts, the divisor k'·u from the plain prompt's key: that is
// the published method. Where the two keys disagree, the divisor may be tiny and the change huge (R-ROME repairs it).
#include <emend/editors/steps/rank_one.h>

namespace emend::editors {

EditorInfo make_rome() {
  using H = RankOneHparams;
  static const auto schema = hparams::Schema<H>("rome").include(rank_one_schema());
  EditorInfo info = editor_entry(
      "rome", "one fact at a time, a rank-one change of one layer",
      "Meng et al., Locating and Editing Factual Associations in GPT, NeurIPS 2022", schema,
      [](const H& h, const RecipeInputs& in) { return std::make_unique<RankOneEditor>(RankOneRecipe{h}, in); });
  info.batch = false;
  return info;
}

// R-ROME: Rebuilding ROME (Gupta et al., 2024): ROME with one key in both places. Steps in rank_one.h.
//
//   enable_random_prefix_keys   u from k̄,          v = (t0 + δ − m̄)/(k̄·u)    k̄, m̄: means over all contexts
//   enable_prompt_keys          u from k_s,        v = δ/(k_s·u)              k_s: the plain prompt's key
//   original_implementation     u from k̄ whatever the key flags say: with enable_prompt_keys that is ROME
//
// With the prefix keys t0 belongs to the plain prompt while m̄ is a mean: so it is published, and the recorded numbers
// of the authors say the same.
namespace {

struct RRomeHparams : RankOneHparams {
  bool enable_random_prefix_keys = true;
  bool enable_prompt_keys = false;
  bool original_implementation = false;
};

std::unique_ptr<Editor> new_r_rome(const RRomeHparams& h, const RecipeInputs& in) {
  const KeySource keys = h.enable_prompt_keys ? KeySource::kPlain : KeySource::kMean;
  return std::make_unique<RankOneEditor>(RankOneRecipe{.common = h,
                                                       .direction = h.original_implementation ? KeySource::kMean : keys,
                                                       .constraint = keys,
                                                       .target_is_current_plus_delta = h.enable_prompt_keys},
                                         in);
}

}  // namespace

EditorInfo make_r_rome() {
  using H = RRomeHparams;
  static const auto schema =
      hparams::Schema<H>("r-rome")
          .include(rank_one_schema())
          .field("enable_random_prefix_keys", &H::enable_random_prefix_keys,
                 "keys and values are means over all contexts", {.formula = "v = (t0 + d - m)/(k u)"})
          .field("enable_prompt_keys", &H::enable_prompt_keys, "keys and values of the plain prompt",
                 {.formula = "v = d/(k u)"})
          .field("original_implementation", &H::original_implementation,
                 "the direction comes from the mean key whatever the other two say; with "
                 "enable_prompt_keys that is ROME")
          .check("enable_prompt_keys", "exactly one of enable_prompt_keys and enable_random_prefix_keys",
                 [](const H& h) { return h.enable_prompt_keys != h.enable_random_prefix_keys; });
  EditorInfo info = editor_entry(
      "r-rome", "ROME with the same key in both places: no exploding changes",
      "Gupta et al., Rebuilding ROME: Resolving Model Collapse during Sequential Model Editing, EMNLP 2024", schema,
      new_r_rome);
  info.batch = false;
  return info;
}

}  // namespace emend::editors
