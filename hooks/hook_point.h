// A place in the forward path where functions may look at or replace a tensor.
//
// LibTorch's C++ modules have no forward hooks, so the executor calls a HookPoint at each site; idle, it is one branch.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/hooks/site.h>

#include <functional>
#include <memory>
#include <utility>

namespace emend::hooks {

/// Returns an undefined tensor to observe only, or a replacement of the same shape, dtype and device.
using HookFn = std::function<at::Tensor(const at::Tensor&)>;

/// Detaches its function when destroyed; safe if the point is gone first.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(HookHandle&& other) = default;
  HookHandle& operator=(HookHandle&& other) = default;
  void remove() noexcept { attached_.reset(); }  ///< detaches now

 private:
  friend class HookPoint;
  explicit HookHandle(std::shared_ptr<void> attached) : attached_(std::move(attached)) {}
  std::shared_ptr<void> attached_;  // detaches once it is let go
};

class HookPoint {
 public:
  explicit HookPoint(SiteRef ref) : ref_(ref) {}

  /// Runs the attached functions in the order they were attached and returns the (possibly replaced) tensor.
  /// Throws Error(kInvalidArgument) naming the site if a replacement changes shape, dtype or device.
  [[nodiscard]] at::Tensor operator()(at::Tensor x) const {
    if (idle()) [[likely]]
      return x;
    return run(std::move(x));
  }
  /// Attaches `fn`. All passes run this one function: what it keeps lasts from pass to pass, and passes in several
  /// threads run it at the same time.
  [[nodiscard]] HookHandle add(HookFn fn);
  [[nodiscard]] bool idle() const noexcept { return !attached_ || attached_->empty(); }
  [[nodiscard]] const SiteRef& ref() const noexcept { return ref_; }

 private:
  [[nodiscard]] at::Tensor run(at::Tensor x) const;
  SiteRef ref_;
  std::shared_ptr<std::vector<std::shared_ptr<HookFn>>> attached_;  // null before the first
};

/// All points of one model.
class HookTable {
 public:
  explicit HookTable(int n_layers);
  /// Throws Error(kInvalidArgument) when the layer is out of range.
  [[nodiscard]] HookPoint& at(const SiteRef& ref);
  /// For the executor: no range check.
  [[nodiscard]] const HookPoint& point(Site site, int layer) const noexcept;
  /// Whether nothing is attached anywhere.
  [[nodiscard]] bool idle() const noexcept;

 private:
  int n_layers_;
  std::vector<HookPoint> points_;
};

/// Thrown by a stopping hook and caught by the model's forward pass; not an error.
struct StopForward {};

}  // namespace emend::hooks
