#include <ATen/ATen.h>
#include <emend/editors/detail/fixture_locate.h>
#include <emend/editors/key_cache.h>
#include <emend/editors/null_space.h>

namespace emend::editors::detail {

void add_memory(std::map<std::string, at::Tensor>& trace, const Editor& editor) {
  if (!dynamic_cast<const RememberingEditor*>(&editor)) return;
  KeyCache memory;
  memory.load(editor.state());
  std::vector<at::Tensor> sums;
  for (size_t i = 0; memory.layer(i).gram_FF().defined(); ++i) sums.push_back(memory.layer(i).gram_FF());
  if (!sums.empty()) trace["cache_after"] = at::stack(sums);
}

void set_memory(Editor& editor, const at::Tensor& sums_LFF) {
  std::map<std::string, at::Tensor> state;
  for (int64_t i = 0; i < sums_LFF.size(0); ++i) state.emplace("sum." + std::to_string(i), sums_LFF[i]);
  editor.load_state(state);
}

void compare_projectors(Comparison& comparison, const std::string& name, const at::Tensor& expected_LFF,
                        const StatisticsProvider& statistics, const std::vector<int>& layers, double threshold) {
  for (size_t i = 0; i < layers.size() && static_cast<int64_t>(i) < expected_LFF.size(0); ++i) {
    const SecondMoment& moment = statistics.get(layers[i]);
    comparison.add("P", name + "." + std::to_string(i), expected_LFF[static_cast<int64_t>(i)],
                   NullSpace::of(moment, threshold, moment.cov_FF()).matrix_FF(), {Measure::kRelative, 1e-5});
  }
}

void compare_settled(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                     const LocateEditor& editor, const LayerProblem& problem, const WeightDelta& solved) {
  if (!editor.settles()) return;
  comparison.add("weight_change_from_stored", name, expected_DF,
                 editor.settle(problem.site, solved, problem.weight_DF).matrix(), {Measure::kRelative, 1e-5});
}

void compare_masked(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                    const at::Tensor& got_DF) {
  const at::Tensor both = expected_DF.ne(0).logical_and(got_DF.ne(0)).to(at::kDouble);
  const double other = expected_DF.ne(0).ne(got_DF.ne(0)).to(at::kDouble).mean().item<double>();
  if (other > 0.005) comparison.fail(name, std::to_string(100 * other) + " % of the entries are others");
  comparison.add("weight_change", name + " where both write", expected_DF * both, got_DF * both,
                 {Measure::kRelative, 1e-3});
}

}  // namespace emend::editors::detail
