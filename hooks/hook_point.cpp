#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/hooks/hook_point.h>

#include <algorithm>

namespace emend::hooks {

HookHandle HookPoint::add(HookFn fn) {
  if (!attached_) attached_ = std::make_shared<std::vector<std::shared_ptr<HookFn>>>();
  HookFn* const added = attached_->emplace_back(std::make_shared<HookFn>(std::move(fn))).get();
  return HookHandle({added, [weak = std::weak_ptr(attached_)](HookFn* gone) {
                       if (const auto all = weak.lock())
                         std::erase_if(*all, [gone](const auto& hook) { return hook.get() == gone; });
                     }});
}

static std::string describe(const at::Tensor& x) {
  return std::string(c10::toString(x.scalar_type())) + " " + shape_text(x.sizes()) + " on " + x.device().str();
}

at::Tensor HookPoint::run(at::Tensor x) const {
  // A copy, so that a hook may attach or detach hooks (itself included) while it runs.
  const auto attached = *attached_;
  for (const auto& hook : attached) {
    at::Tensor y = (*hook)(x);
    if (!y.defined()) continue;
    if (y.sizes() != x.sizes() || y.scalar_type() != x.scalar_type() || y.device() != x.device())
      refuse({"hook at " + to_string(ref_), "the replacement is " + describe(y), describe(x),
              "an edit keeps shape, dtype and device; move operands to the activation with route_like"});
    x = std::move(y);
  }
  return x;
}

// The sites outside layers lie in layer -1.
static size_t slot(Site site, int layer) noexcept {
  constexpr auto kSites = static_cast<size_t>(Site::kLogits) + 1;
  return static_cast<size_t>(layer + 1) * kSites + static_cast<size_t>(site);
}

HookTable::HookTable(int n_layers) : n_layers_(n_layers) {
  for (int layer = -1; layer < n_layers; ++layer)
    for (const Site site : all_sites()) points_.emplace_back(SiteRef{site, layer});
}

HookPoint& HookTable::at(const SiteRef& ref) {
  const bool in_layer = is_layer_site(ref.site);
  if (in_layer ? (ref.layer < 0 || ref.layer >= n_layers_) : ref.layer != -1)
    refuse(
        {"site " + to_string(ref), "layer " + std::to_string(ref.layer),
         in_layer ? "a layer from 0 to " + std::to_string(n_layers_ - 1) : "layer -1, because it lies outside layers",
         "check the layer numbers against the model"});
  return points_[slot(ref.site, ref.layer)];
}

bool HookTable::idle() const noexcept {
  return std::ranges::all_of(points_, &HookPoint::idle);
}

const HookPoint& HookTable::point(Site site, int layer) const noexcept {
  return points_[slot(site, layer)];
}

}  // namespace emend::hooks
