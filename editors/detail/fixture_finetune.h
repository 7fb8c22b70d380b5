// What the recorded runs of the fine-tuning editors need besides the common comparison.
#pragma once

#include <emend/editors/detail/fixture_compare.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace emend::editors::detail {

/// Settings that the recorded code does not name but has: FT-L scores the padding of shorter targets.
void complete_finetune_values(const std::string& editor, nlohmann::json& values);

/// Compares the losses of every step and epoch ("batch", "epoch") with what an editor traced; nothing for other
/// editors.
void compare_training_losses(Comparison& comparison, const nlohmann::json& expected,
                             const std::map<std::string, at::Tensor>& got, const std::string& where);

}  // namespace emend::editors::detail
