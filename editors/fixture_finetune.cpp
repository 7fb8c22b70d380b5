#include <ATen/ATen.h>
#include <emend/editors/detail/fixture_finetune.h>

#include <vector>

namespace emend::editors::detail {
namespace {

void compare_curve(Comparison& comparison, const nlohmann::json& expected, const std::map<std::string, at::Tensor>& got,
                   const std::string& traced, const std::string& where) {
  const auto found = got.find(traced);
  if (found == got.end()) {
    comparison.fail(where, "not computed");
    return;
  }
  const at::Tensor want = at::tensor(expected.get<std::vector<double>>(), at::kDouble);
  if (want.sizes() != found->second.sizes()) {
    comparison.fail(where, std::to_string(found->second.size(0)) + " steps, expected " + std::to_string(want.size(0)));
    return;
  }
  comparison.add("loss", where + " first", want.narrow(0, 0, 1), found->second.narrow(0, 0, 1),
                 {Measure::kAbsolute, 1e-4});
  comparison.add("loss", where, want, found->second, {Measure::kAbsolute, 1e-3});
}

}  // namespace

void complete_finetune_values(const std::string& editor, nlohmann::json& values) {
  if (editor == "ft_l" || editor == "ft-l") values["score_padding"] = true;
}

void compare_training_losses(Comparison& comparison, const nlohmann::json& expected,
                             const std::map<std::string, at::Tensor>& got, const std::string& where) {
  if (!expected.is_object() || !expected.contains("batch")) return;
  compare_curve(comparison, expected.at("batch"), got, "batch_losses", where + "losses.batch");
  if (expected.contains("epoch"))
    compare_curve(comparison, expected.at("epoch"), got, "epoch_losses", where + "losses.epoch");
}

}  // namespace emend::editors::detail
