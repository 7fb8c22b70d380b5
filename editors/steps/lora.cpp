#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/lora.h>
#include <emend/models/family.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

namespace emend::editors {
namespace {

// Projections that peft adapts where nothing is named, under the names of the families.
constexpr std::array kDefaultModules = {"q_proj",   "v_proj", "c_attn", "query_key_value",
                                        "qkv_proj", "W_pack", "wqkv",   "qkv"};

// "model.layers.4.self_attn.q_proj.weight" → "model.layers.4.self_attn.q_proj".
std::string module_of(const std::string& weight) {
  return weight.substr(0, weight.size() - std::string(".weight").size());
}

bool ends_with_module(const std::string& path, std::string_view module) {
  if (!path.ends_with(module)) return false;
  return path.size() == module.size() || path[path.size() - module.size() - 1] == '.';
}

// The first number between dots.
int layer_in_name(const std::string& weight) {
  for (size_t dot = weight.find('.'), next; (next = weight.find('.', dot + 1)) != std::string::npos; dot = next)
    if (const auto layer = number_in<int>(weight.substr(dot + 1, next - dot - 1))) return *layer;
  return -1;
}

bool wanted(const std::string& path, const std::vector<std::string>& modules) {
  return std::any_of(modules.begin(), modules.end(), [&](const std::string& module) {
    return module == "all-linear" || ends_with_module(path, module);
  });
}

std::vector<std::string> choose_weights(const models::Model& model, const LoraShape& shape) {
  std::vector<std::string> modules = shape.target_modules;
  if (modules.empty()) modules.assign(kDefaultModules.begin(), kDefaultModules.end());
  const std::set<int64_t> layers(shape.layers.begin(), shape.layers.end());
  for (const int64_t layer : layers)
    if (layer < 0 || layer >= model.n_layers())
      refuse({"layers", "layer " + std::to_string(layer), "0 to " + std::to_string(model.n_layers() - 1), ""});
  std::vector<std::string> chosen;
  std::set<std::string> names;
  for (const auto& weight : model.adaptable_weights()) {
    if (!weight.ends_with(".weight")) continue;
    const std::string path = module_of(weight);
    names.insert(path.substr(path.rfind('.') + 1));
    if (wanted(path, modules) && (layers.empty() || layers.contains(layer_in_name(weight)))) chosen.push_back(weight);
  }
  const std::string known = join(names);
  for (const auto& module : shape.target_modules)
    if (std::none_of(chosen.begin(), chosen.end(),
                     [&](const std::string& weight) { return wanted(module_of(weight), {module}); }))
      refuse({"target_modules", "\"" + module + "\", which names no linear layer",
              "some of " + known + ", or all-linear", ""});
  if (chosen.empty())
    refuse({"target_modules", "no linear layer of that kind in this model", "some of " + known, "name them"});
  return chosen;
}

void check_shape(const LoraShape& shape, int64_t smaller_side) {
  if (shape.rank < 1 || shape.rank > smaller_side)
    refuse({"r", std::to_string(shape.rank), "a rank from 1 to " + std::to_string(smaller_side), ""});
  if (!(shape.dropout >= 0 && shape.dropout < 1))
    refuse({"lora_dropout", std::to_string(shape.dropout), "0 or more, below 1", ""});
  if (!(shape.alpha > 0)) refuse({"lora_alpha", std::to_string(shape.alpha), "more than 0", ""});
}

}  // namespace

LoraAdapters::LoraAdapters(models::Model& model, const LoraShape& shape)
    : model_(&model), shape_(shape), weights_(choose_weights(model, shape)) {
  const at::ScalarType dtype = model.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  const bool in_out = model.family().orientation == models::Orientation::kInOut;
  at::Generator generator = at::detail::createCPUGenerator(shape.seed);
  first_layer_ = model.n_layers();
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor weight = model.weight(weights_[i]);
    const int64_t out = weight.size(in_out ? 1 : 0), in = weight.size(in_out ? 0 : 1);
    check_shape(shape, std::min(in, out));
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    auto adapter = std::make_shared<models::LinearAdapter>();
    // Drawn on the host, so that a model has the same adapters wherever its layers lie.
    const at::Tensor a_RI = at::empty({shape.rank, in}, at::kFloat).uniform_(-bound, bound, generator).to(dtype);
    adapter->a_RI = devices::route_like(a_RI, weight, devices::Purpose::kDelta).detach().requires_grad_(true);
    adapter->b_OR = at::zeros({out, shape.rank}, weight.options().dtype(dtype)).requires_grad_(true);
    adapter->scale = shape.alpha / static_cast<double>(shape.rank);
    adapter->dropout = shape.dropout;
    adapters_.push_back(adapter);
    generators_.push_back(at::detail::createCPUGenerator(shape.seed + 1 + i));
    layers_.push_back(layer_in_name(weights_[i]));
    first_layer_ = std::min(first_layer_, layers_.back());
  }
  for (size_t i = 0; i < weights_.size(); ++i) model.set_adapter(weights_[i], adapters_[i]);
}

LoraAdapters::~LoraAdapters() {
  for (const auto& weight : weights_) model_->set_adapter(weight, nullptr);
}

std::vector<at::Tensor> LoraAdapters::parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& adapter : adapters_) all.insert(all.end(), {adapter->a_RI, adapter->b_OR});
  return all;
}

int64_t LoraAdapters::parameter_count() const {
  int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

void LoraAdapters::set_training(bool training) {
  for (size_t i = 0; i < adapters_.size(); ++i) {
    adapters_[i]->generator.reset();
    if (training && shape_.dropout > 0) adapters_[i]->generator = generators_[i];
  }
}

std::vector<at::Tensor> LoraAdapters::dropout_state() const {
  std::vector<at::Tensor> state;
  if (shape_.dropout > 0)
    for (const auto& generator : generators_) state.push_back(generator.get_state());
  return state;
}

void LoraAdapters::set_dropout_state(const std::vector<at::Tensor>& state) {
  for (size_t i = 0; i < state.size(); ++i) generators_.at(i).set_state(state[i]);
}

std::vector<WeightDelta> LoraAdapters::deltas() const {
  std::vector<WeightDelta> deltas;
  for (size_t i = 0; i < weights_.size(); ++i) {
    deltas.push_back({weights_[i],
                      layers_[i],
                      model_->family().orientation,
                      adapters_[i]->b_OR.detach().to(at::kDouble) * adapters_[i]->scale,
                      adapters_[i]->a_RI.detach().t().to(at::kDouble).contiguous(),
                      {}});
  }
  return deltas;
}

}  // namespace emend::editors
