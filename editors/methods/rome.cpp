// ROME: Locating and Editing Factual Associations in GPT (Meng et al., 2022), section 3. Steps in rank_one.h.
//
// The direction u comes from the key averaged over all contexts, the divisor k'·u from the plain prompt's key: that is
// the published method. Where the two keys disagree, the divisor may be tiny and the change huge (R-ROME repairs it).
#include <emend/editors/registry.h>
#include <emend/editors/steps/rank_one.h>

namespace emend::editors {
namespace {

const hparams::Schema<RankOneHparams>& rome_schema() {
  static const auto schema = hparams::Schema<RankOneHparams>("rome").include(rank_one_schema());
  return schema;
}

std::unique_ptr<Editor> new_rome(const RankOneHparams& h, const hparams::RawHparams& raw, const models::Model& model,
                                 const Log&) {
  check_locate_hparams(h, model, raw);
  return std::make_unique<RankOneEditor>(
      RankOneRecipe{.editor = "rome", .hparams = rome_schema().dump(h), .common = h});
}

}  // namespace

EditorInfo make_rome() {
  EditorInfo info = editor_entry<RankOneHparams>(
      "rome", "one fact at a time, a rank-one change of one layer",
      "Meng et al., Locating and Editing Factual Associations in GPT, NeurIPS 2022", rome_schema(), new_rome);
  info.batch = false;
  return info;
}

}  // namespace emend::editors
