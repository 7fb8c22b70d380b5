// Moving tensors between devices: the one place where it happens, and a count of what it cost.
//
// Goals: data moves to the operand that is written or that is larger; the mover is the callee; nothing asks a
// global for "the" device. Outside devices/ and the checkpoint loader nobody calls .to(device) or .cuda(): a
// test greps. Non-goal: deciding where things live. That is PlacementPlan's job (devices/placement.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace emend::devices {

/// Why a tensor moves. Counted, so that a test can say "no transfer of the head in this step".
enum class Purpose : uint8_t {
  kInput,       ///< token ids, position ids
  kHidden,      ///< the residual stream where the placement changes device
  kTable,       ///< rotary tables, masks, ALiBi slopes
  kLabels,      ///< target ids and loss weights, to the logits
  kLoss,        ///< scalar loss terms
  kDelta,       ///< an edit's delta, to the activation it is added to
  kKeys,        ///< keys and values gathered for a solve
  kStatistics,  ///< second moments
  kSolve,       ///< operands and results of a linear solve
  kWeight,      ///< weights: loading, writing an edit
  kSnapshot,    ///< original weights kept for undo
  kCache,       ///< KV cache
  kLogits,      ///< logits or rows of them
  kOptimiser,   ///< optimiser state
  kHost,        ///< results that the program reads
  kOther,
};
/// "input", "hidden", …
[[nodiscard]] std::string_view to_string(Purpose purpose) noexcept;

enum class Dtype : uint8_t {
  kKeep,   ///< keep the source's dtype
  kMatch,  ///< take the destination's dtype (narrowed before the transfer, widened after it)
};

namespace detail {
at::Tensor move(const at::Tensor& src, c10::Device to, at::ScalarType dtype, Purpose purpose);
[[noreturn]] void undefined_destination(Purpose purpose);
}  // namespace detail

/// THE mover: `src` on the device of `dst` and, with Dtype::kMatch, in its dtype. Gradients flow back through
/// it. Returns `src` itself (no copy, no count) when nothing changes and when `src` is undefined. The sizes
/// of `dst` do not matter; an undefined `dst` is a mistake of the caller (std::logic_error). Throws
/// Error(kDevice) when the target is out of memory.
[[nodiscard]] inline at::Tensor route_like(const at::Tensor& src, const at::Tensor& dst, Purpose purpose,
                                           Dtype dtype = Dtype::kKeep) {
  if (!src.defined()) return src;
  if (!dst.defined()) detail::undefined_destination(purpose);
  const auto wanted = dtype == Dtype::kMatch ? dst.scalar_type() : src.scalar_type();
  const auto device = dst.device();
  if (src.device() == device && src.scalar_type() == wanted) return src;
  return detail::move(src, device, wanted, purpose);
}

/// As route_like, to a named device. Only for code that owns a placement plan.
[[nodiscard]] inline at::Tensor route_to(const at::Tensor& src, c10::Device device, Purpose purpose) {
  if (!src.defined() || src.device() == device) return src;
  return detail::move(src, device, src.scalar_type(), purpose);
}

/// Indices as an int64 tensor [N] on the device of `like`, into which they will index.
[[nodiscard]] at::Tensor index_on(const std::vector<int64_t>& index, const at::Tensor& like);

/// `src` in host memory. For results that the program reads; gradients flow here too.
[[nodiscard]] inline at::Tensor to_host(const at::Tensor& src, Purpose purpose = Purpose::kHost) {
  return route_to(src, c10::Device(c10::kCPU), purpose);
}

/// Sends copies from one device to another through host memory from now on (or directly again). For pairs whose direct
/// copies were found to be wrong (devices/doctor.h). Process-wide, like the hardware it is about.
void stage_through_host(c10::Device from, c10::Device to, bool staged = true);
[[nodiscard]] bool is_staged(c10::Device from, c10::Device to);

struct TransferKey {  ///< what transfers are counted by
  c10::Device from, to;
  Purpose purpose;
  friend bool operator<(const TransferKey& a, const TransferKey& b) noexcept;
};
struct TransferTotal {
  int64_t count = 0;
  int64_t bytes = 0;
  int64_t largest = 0;  ///< bytes of the largest single transfer
};

/// Collects every transfer of the process, from all threads, while it is alive. Scopes nest and may overlap.
/// The way back of a gradient across devices is autograd's and is not counted.
class TransferScope {
 public:
  TransferScope();
  ~TransferScope();
  TransferScope(const TransferScope&) = delete;
  TransferScope& operator=(const TransferScope&) = delete;

  [[nodiscard]] std::map<TransferKey, TransferTotal> totals() const;  ///< of all transfers in the scope so far
  /// Over all pairs of devices, for one purpose or all.
  [[nodiscard]] TransferTotal total(std::optional<Purpose> purpose = {}) const;
  /// [{"from": "cpu", "to": "sim:0", "purpose": "hidden", "count": 3, "bytes": 4096, "largest": 2048}, …]
  [[nodiscard]] nlohmann::json to_json() const;

 private:
  friend at::Tensor detail::move(const at::Tensor& src, c10::Device to, at::ScalarType dtype, Purpose purpose);
  std::map<TransferKey, TransferTotal> totals_;
};

}  // namespace emend::devices
