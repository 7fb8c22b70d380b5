#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/device_map.h>
#include <emend/models/adapter.h>
#include <emend/models/detail/model_state.h>

#include <array>

namespace emend::models {
namespace {

constexpr std::array kAdaptable = {Part::kQkv,    Part::kQ,    Part::kK,  Part::kV,   Part::kAttnOut,
                                   Part::kGateUp, Part::kGate, Part::kUp, Part::kDown};

bool adaptable(const ExpectedTensor& expected) {
  return !expected.bias && expected.expert < 0 &&
         std::find(kAdaptable.begin(), kAdaptable.end(), expected.part) != kAdaptable.end();
}

std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

}  // namespace

std::vector<std::string> Model::adaptable_weights() const {
  std::vector<std::string> names;
  for (const auto& name : state_->names)
    if (adaptable(state_->find(name).expected)) names.push_back(name);
  return names;
}

void Model::set_adapter(const std::string& weight, std::shared_ptr<const LinearAdapter> adapter) {
  const State::Weight& entry = state_->find(weight);
  if (!adaptable(entry.expected))
    throw Error(ErrorClass::kNotFound, {weight, "not a linear layer inside a block", "one of adaptable_weights()", ""});
  if (adapter) {
    const int64_t out = entry.tensor.size(state_->conv1d() ? 1 : 0), in = entry.tensor.size(state_->conv1d() ? 0 : 1);
    const bool fits = adapter->a_RI.dim() == 2 && adapter->b_OR.dim() == 2 && adapter->a_RI.size(1) == in &&
                      adapter->b_OR.size(0) == out && adapter->a_RI.size(0) == adapter->b_OR.size(1);
    if (!fits)
      throw Error(ErrorClass::kInvalidArgument,
                  {"adapter of " + weight, "factors " + shape_text(adapter->a_RI) + " and " + shape_text(adapter->b_OR),
                   "[R, " + std::to_string(in) + "] and [" + std::to_string(out) + ", R]", ""});
    const auto home = entry.tensor.device();
    if (adapter->a_RI.device() != home || adapter->b_OR.device() != home)
      throw Error(ErrorClass::kInvalidArgument,
                  {"adapter of " + weight,
                   "factors on " + devices::to_string(adapter->a_RI.device()) + " and " +
                       devices::to_string(adapter->b_OR.device()),
                   "both on " + devices::to_string(home) + ", where the weight lives",
                   "route them to the weight (devices::route_like) before they are attached"});
  }
  state_->layers.at(entry.expected.layer)[entry.expected.part].adapter = std::move(adapter);
}

}  // namespace emend::models
