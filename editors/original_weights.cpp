#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/apply.h>
#include <emend/editors/original_weights.h>

namespace emend::editors {
namespace {

const std::string kPrefix = "original.";

}  // namespace

void OriginalWeights::keep(const models::Model& model, const std::vector<int64_t>& layers) {
  if (!weights_.empty()) return;
  for (const int64_t layer : layers) {
    const std::string name = model.edit_site(static_cast<int>(layer)).weight_name;
    weights_.emplace(name, devices::to_host(model.weight(name).detach(), devices::Purpose::kSnapshot).clone());
  }
}

void OriginalWeights::write_into(EditTransaction& transaction) const {
  for (const auto& [name, weight] : weights_) write_weight(name, weight, transaction);
}

void OriginalWeights::save(std::map<std::string, at::Tensor>& state) const {
  for (const auto& [name, weight] : weights_) state.emplace(kPrefix + name, weight);
}

void OriginalWeights::load(std::map<std::string, at::Tensor>& state) {
  weights_.clear();
  for (auto entry = state.begin(); entry != state.end();) {
    if (!entry->first.starts_with(kPrefix)) {
      ++entry;
      continue;
    }
    weights_.emplace(entry->first.substr(kPrefix.size()), entry->second.clone());
    entry = state.erase(entry);
  }
}

}  // namespace emend::editors
