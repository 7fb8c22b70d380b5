#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/hooks/hook_point.h>

#include <algorithm>

namespace emend::hooks {

struct HookPoint::State {
  struct Attached {
    int id;
    HookFn fn;
  };
  std::vector<Attached> attached;
  int next_id = 0;
};

HookHandle HookPoint::add(HookFn fn) {
  if (!state_) state_ = std::make_shared<State>();
  const int id = state_->next_id++;
  state_->attached.push_back({id, std::move(fn)});
  return HookHandle({nullptr, [id, weak = std::weak_ptr(state_)](void*) {
                       if (const auto state = weak.lock())
                         std::erase_if(state->attached, [id](const auto& a) { return a.id == id; });
                     }});
}

bool HookPoint::idle() const noexcept {
  return !state_ || state_->attached.empty();
}

static std::string describe(const at::Tensor& x) {
  return std::string(c10::toString(x.scalar_type())) + " " + shape_text(x.sizes()) + " on " + x.device().str();
}

at::Tensor HookPoint::run(at::Tensor x) const {
  // A copy, so that a hook may attach or detach hooks (itself included) while it runs.
  const auto attached = state_->attached;
  for (const auto& entry : attached) {
    at::Tensor y = entry.fn(x);
    if (!y.defined()) continue;
    if (y.sizes() != x.sizes() || y.scalar_type() != x.scalar_type() || y.device() != x.device())
      refuse({"hook at " + to_string(ref_), "the replacement is " + describe(y), describe(x),
              "an edit keeps shape, dtype and device; move operands to the activation with route_like"});
    x = std::move(y);
  }
  return x;
}

// Sites outside layers come first, then the layer sites of layer 0, of layer 1, …
static constexpr int kGlobalSites = 3;
static constexpr int kLayerSites = static_cast<int>(Site::kLayerOut) - static_cast<int>(Site::kLayerIn) + 1;

static int slot(Site site, int layer) noexcept {
  switch (site) {
    case Site::kEmbedding:
      return 0;
    case Site::kFinalNorm:
      return 1;
    case Site::kLogits:
      return 2;
    default:
      return kGlobalSites + layer * kLayerSites + (static_cast<int>(site) - static_cast<int>(Site::kLayerIn));
  }
}

HookTable::HookTable(int n_layers) : n_layers_(n_layers) {
  points_.assign(static_cast<size_t>(kGlobalSites + n_layers * kLayerSites), HookPoint({Site::kEmbedding, -1}));
  for (const Site site : all_sites())
    for (int layer = is_layer_site(site) ? 0 : -1; layer < (is_layer_site(site) ? n_layers : 0); ++layer)
      points_[static_cast<size_t>(slot(site, layer))] = HookPoint({site, layer});
}

HookPoint& HookTable::at(const SiteRef& ref) {
  const bool in_layer = is_layer_site(ref.site);
  if (in_layer ? (ref.layer < 0 || ref.layer >= n_layers_) : ref.layer != -1)
    refuse(
        {"site " + to_string(ref), "layer " + std::to_string(ref.layer),
         in_layer ? "a layer from 0 to " + std::to_string(n_layers_ - 1) : "layer -1, because it lies outside layers",
         "check the layer numbers against the model"});
  return points_[static_cast<size_t>(slot(ref.site, ref.layer))];
}

bool HookTable::idle() const noexcept {
  return std::ranges::all_of(points_, &HookPoint::idle);
}

const HookPoint& HookTable::point(Site site, int layer) const noexcept {
  return points_[static_cast<size_t>(slot(site, layer))];
}

}  // namespace emend::hooks
