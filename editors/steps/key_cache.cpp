#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/key_cache.h>

namespace emend::editors {
namespace {

// What is kept of a layer, by its name in a saved state.
const std::map<std::string, at::Tensor EarlierKeys::*> kParts = {
    {"keys", &EarlierKeys::keys_FP}, {"sum", &EarlierKeys::sum_FF}, {"values", &EarlierKeys::values_DF}};

at::Tensor gram(const at::Tensor& keys_FP) {
  const at::Tensor keys = keys_FP.to(at::kDouble);
  return keys.mm(keys.t());
}

// The sum alone, once it is the smaller of the two. There are keys.
void fold(EarlierKeys& layer) {
  if (!layer.sum_FF.defined() && layer.keys_FP.size(1) <= layer.keys_FP.size(0)) return;
  const at::Tensor more = gram(layer.keys_FP);
  layer.sum_FF = layer.sum_FF.defined() ? layer.sum_FF + more : more;
  layer.keys_FP = at::Tensor();
}

[[noreturn]] void refuse_memory(const std::string& got) {
  throw Error(ErrorClass::kCorruption,
              {"memory of earlier keys", got, "what the editor saved (keys.0, sum.0, …)", "start the run anew"});
}

}  // namespace

at::Tensor EarlierKeys::gram_FF() const {
  return sum_FF.defined() || !keys_FP.defined() ? sum_FF : gram(keys_FP);
}

Preserved EarlierKeys::with(Preserved base) const {
  base.extra_FF = sum_FF;
  base.previous_FP = keys_FP;
  return base;
}

void KeyCache::add(const std::vector<at::Tensor>& keys_FN, const std::vector<at::Tensor>& values_DN) {
  if (!layers_.empty() && layers_.size() != keys_FN.size())
    refuse({"earlier keys", std::to_string(keys_FN.size()) + " layers", std::to_string(layers_.size()),
            "reset the editor for other layers"});
  std::vector<EarlierKeys> grown = layers_;  // all or nothing
  grown.resize(keys_FN.size());
  for (size_t i = 0; i < keys_FN.size(); ++i) {
    const at::Tensor keys = devices::to_host(keys_FN[i].detach()).to(at::kFloat).contiguous();
    EarlierKeys& layer = grown[i];
    const at::Tensor& there = layer.sum_FF.defined() ? layer.sum_FF : layer.keys_FP;
    if (there.defined() && there.size(0) != keys.size(0))
      refuse({"earlier keys", "keys of width " + std::to_string(keys.size(0)), std::to_string(there.size(0)),
              "one editor serves one model"});
    layer.keys_FP = layer.keys_FP.defined() ? at::cat({layer.keys_FP, keys}, 1) : keys;
    fold(layer);
    if (values_DN.empty()) continue;
    const at::Tensor product = devices::to_host(values_DN[i].detach()).to(at::kDouble).mm(keys.to(at::kDouble).t());
    layer.values_DF = layer.values_DF.defined() ? layer.values_DF + product : product;
  }
  layers_ = std::move(grown);
}

EarlierKeys KeyCache::layer(size_t index) const {
  return index < layers_.size() ? layers_[index] : EarlierKeys{};
}

std::map<std::string, at::Tensor> KeyCache::state() const {
  std::map<std::string, at::Tensor> state;
  for (size_t i = 0; i < layers_.size(); ++i)
    for (const auto& [kind, part] : kParts)
      if (const at::Tensor& kept = layers_[i].*part; kept.defined())
        state.emplace(kind + "." + std::to_string(i), kept);
  return state;
}

void KeyCache::load(const std::map<std::string, at::Tensor>& state) {
  std::vector<EarlierKeys> layers(state.size());
  for (const auto& [name, tensor] : state) {
    const size_t dot = name.find('.');
    const std::string kind = name.substr(0, dot), number = name.substr(std::min(dot, name.size() - 1) + 1);
    const size_t index = number_in<size_t>(number).value_or(layers.size());
    if (!kParts.contains(kind) || index >= layers.size()) refuse_memory("\"" + name + "\"");
    EarlierKeys& layer = layers[index];
    at::Tensor& place = layer.*kParts.at(kind);
    if (tensor.dim() != 2 || (kind == "sum" && tensor.size(0) != tensor.size(1)) || place.defined() ||
        (kind != "values" && (layer.keys_FP.defined() || layer.sum_FF.defined())))
      refuse_memory("\"" + name + "\" of an odd shape or twice");
    place = tensor.to(kind == "keys" ? at::kFloat : at::kDouble).clone();
  }
  while (!layers.empty() && !layers.back().keys_FP.defined() && !layers.back().sum_FF.defined()) layers.pop_back();
  layers_ = std::move(layers);
}

}  // namespace emend::editors
