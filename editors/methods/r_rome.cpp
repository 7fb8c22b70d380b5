// R-ROME: Rebuilding ROME (Gupta et al., 2024): ROME with one key in both places. Steps in rank_one.h.
//
//   enable_random_prefix_keys   u from k̄,          v = (t0 + δ − m̄)/(k̄·u)    k̄, m̄: means over all contexts
//   enable_prompt_keys          u from k_s,        v = δ/(k_s·u)              k_s: the plain prompt's key
//   original_implementation     u from k̄ whatever the key flags say: with enable_prompt_keys that is ROME
//
// With the prefix keys t0 belongs to the plain prompt while m̄ is a mean: so it is published, and the recorded numbers
// of the authors say the same.
#include <emend/editors/registry.h>
#include <emend/editors/steps/rank_one.h>

namespace emend::editors {
namespace {

struct RRomeHparams : RankOneHparams {
  bool enable_random_prefix_keys = true;
  bool enable_prompt_keys = false;
  bool original_implementation = false;
};

const hparams::Schema<RRomeHparams>& r_rome_schema() {
  static const auto schema =
      hparams::Schema<RRomeHparams>("r-rome")
          .include(rank_one_schema())
          .field("enable_random_prefix_keys", &RRomeHparams::enable_random_prefix_keys,
                 {.meaning = "keys and values are means over all contexts", .formula = "v = (t0 + d - m)/(k u)"})
          .field("enable_prompt_keys", &RRomeHparams::enable_prompt_keys,
                 {.meaning = "keys and values of the plain prompt", .formula = "v = d/(k u)"})
          .field("original_implementation", &RRomeHparams::original_implementation,
                 {.meaning = "the direction comes from the mean key whatever the other two say; with "
                             "enable_prompt_keys that is ROME"})
          .check("enable_prompt_keys", [](const RRomeHparams& h) -> std::string {
            if (h.enable_prompt_keys == h.enable_random_prefix_keys)
              return "exactly one of enable_prompt_keys and enable_random_prefix_keys";
            return "";
          });
  return schema;
}

std::unique_ptr<Editor> new_r_rome(const RRomeHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                                   const Log&) {
  check_locate_hparams(h, model, raw);
  const KeySource keys = h.enable_prompt_keys ? KeySource::kPlain : KeySource::kMean;
  return std::make_unique<RankOneEditor>(RankOneRecipe{.editor = "r-rome",
                                                       .hparams = r_rome_schema().dump(h),
                                                       .common = h,
                                                       .direction = h.original_implementation ? KeySource::kMean : keys,
                                                       .constraint = keys,
                                                       .target_is_current_plus_delta = h.enable_prompt_keys});
}

}  // namespace

EditorInfo make_r_rome() {
  EditorInfo info = editor_entry<RRomeHparams>(
      "r-rome", "ROME with the same key in both places: no exploding changes",
      "Gupta et al., Rebuilding ROME: Resolving Model Collapse during Sequential Model Editing, EMNLP 2024",
      r_rome_schema(), new_r_rome);
  info.batch = false;
  return info;
}

}  // namespace emend::editors
