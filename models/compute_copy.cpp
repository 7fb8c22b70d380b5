#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/devices/placement.h>
#include <emend/models/compute_copy.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/products.h>

#include <algorithm>

namespace emend::models {
namespace {

constexpr int64_t kSmall = 1'000'000'000;  // parameters of a model of which a few more copies are nothing

struct CopyRules {
  at::ScalarType dtype;
  bool packs = false, conv1d = false;
};

detail::Linear converted(const detail::Linear& linear, const CopyRules& rules) {
  const at::ScalarType dtype = rules.dtype;
  detail::Linear copy = linear;  // with its adapter
  if (copy.weight.defined()) copy.weight = copy.weight.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
  if (copy.bias.defined()) copy.bias = copy.bias.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
  if (rules.packs && copy.weight.defined() && copy.weight.dim() == 2)
    copy.packed = PackedWeight::of(rules.conv1d ? copy.weight.t() : copy.weight);
  return copy;
}

detail::LayerWeights converted(const detail::LayerWeights& from, const CopyRules& rules) {
  detail::LayerWeights to;
  for (int part = 0; part < kParts; ++part) to.parts[part] = converted(from.parts[part], rules);
  for (const auto& expert : from.experts)
    to.experts.push_back({converted(expert.gate, rules), converted(expert.up, rules), converted(expert.down, rules)});
  return to;
}

// Parts that stand before the first layer.
bool is_below(Part part) {
  return part == Part::kEmbedding || part == Part::kPositions || part == Part::kProjectIn;
}

std::unique_ptr<Model::State> without_weights(const Model::State& from) {
  auto copy = std::make_unique<Model::State>(from.config, *from.family, from.plan);
  copy->checkpoint = from.checkpoint;
  copy->tokenizer = from.tokenizer;
  return copy;
}

}  // namespace

Model another_view(const Model& model) {
  const Model::State& from = *model.state_;
  auto view = without_weights(from);
  view->dtype = from.dtype;
  view->first_layer = from.first_layer;
  view->top = from.top;
  view->layers = from.layers;
  return Model(std::move(view));
}

Model compute_copy(const Model& model, at::ScalarType dtype, int first_layer) {
  const Model::State& from = *model.state_;
  EMEND_CHECK(first_layer >= from.first_layer && first_layer <= model.n_layers(), "a copy begins within the model");
  const at::NoGradGuard no_grad;
  const bool small = copied_whole(model.parameter_count());
  try {
    auto copy = without_weights(from);
    copy->dtype = dtype;
    copy->first_layer = first_layer;
    for (int part = 0; part < kParts; ++part) {
      const bool below = is_below(static_cast<Part>(part));
      if (first_layer > 0 && below) continue;
      copy->top.parts[part] = converted(from.top.parts[part], {dtype, small && !below});
    }
    const auto& embedding = from.top[Part::kEmbedding].weight;
    if (first_layer == 0 && from.top[Part::kHead].weight.is_same(embedding)) {
      detail::Linear& head = copy->top[Part::kHead];
      head.weight = copy->top[Part::kEmbedding].weight;
      head.packed = head.packed ? PackedWeight::of(head.weight) : nullptr;
    }
    for (int layer = first_layer; layer < model.n_layers(); ++layer)
      copy->layers[layer] = converted(from.layers[layer], {dtype, small, from.conv1d()});
    return Model(std::move(copy));
  } catch (const c10::OutOfMemoryError& error) {
    throw Error(ErrorClass::kDevice,
                {"copy of the frozen layers", error.what_without_backtrace(),
                 std::string("memory for their weights in ") + c10::toString(dtype),
                 "use " + setting("compute_dtype", "float32") + ", or spread the model over more devices"});
  }
}

bool hooks_idle_above(const Model& model, int first_layer) {
  for (const hooks::Site site : hooks::all_sites()) {
    if (!hooks::is_layer_site(site)) {
      if (!model.hooks().point(site, -1).idle()) return false;
      continue;
    }
    for (int layer = first_layer; layer < model.n_layers(); ++layer)
      if (!model.hooks().point(site, layer).idle()) return false;
  }
  return true;
}

at::ScalarType fast_compute_dtype(at::ScalarType dtype, std::span<const c10::Device> devices) {
  return dtype == at::kFloat && std::ranges::all_of(devices, multiplies_bfloat16) ? at::kBFloat16 : dtype;
}

at::ScalarType fast_compute_dtype(const Model& model) {
  return fast_compute_dtype(model.dtype(), model.placement().devices());
}

bool copied_whole(int64_t parameters) {
  return parameters <= kSmall;
}

at::ScalarType writing_dtype(const Model& model, at::ScalarType wanted) {
  return copied_whole(model.parameter_count()) && hooks_idle_above(model, 0) ? wanted : model.dtype();
}

}  // namespace emend::models
