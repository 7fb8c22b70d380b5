#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/devices/placement.h>
#include <emend/devices/route.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <tuple>

namespace emend::devices {
namespace {

constexpr std::array<std::string_view, 16> kPurposeNames = {
    "input", "hidden", "table",    "labels", "loss",   "delta",     "keys", "statistics",
    "solve", "weight", "snapshot", "cache",  "logits", "optimiser", "host", "other"};

/// What all threads share. Only real transfers look here, so one mutex is cheap enough.
struct Shared {
  std::mutex mutex;
  std::vector<TransferScope*> scopes;                       // those that are alive; the mutex guards their totals too
  std::vector<std::pair<c10::Device, c10::Device>> staged;  // pairs whose direct copies are not to be trusted
};
Shared& shared() {
  static Shared instance;
  return instance;
}

void add(TransferTotal& total, const TransferTotal& more) {
  total.count += more.count;
  total.bytes += more.bytes;
  total.largest = std::max(total.largest, more.largest);
}

}  // namespace

std::string_view to_string(Purpose purpose) noexcept {
  return kPurposeNames[static_cast<size_t>(purpose)];
}

bool operator<(const TransferKey& a, const TransferKey& b) noexcept {
  const auto order = [](const TransferKey& key) {
    return std::tuple(key.from.type(), key.from.index(), key.to.type(), key.to.index(), key.purpose);
  };
  return order(a) < order(b);
}

// Small things that the host makes in the middle of a pass. From pinned memory they are queued behind the device's
// work, which from ordinary memory they would wait for.
static bool made_in_passing(Purpose purpose, int64_t bytes) {
  constexpr int64_t kSmall = int64_t{4} << 20;  // pinned memory stays with the process
  return bytes <= kSmall && (purpose == Purpose::kInput || purpose == Purpose::kTable || purpose == Purpose::kLabels);
}

namespace detail {

at::Tensor move(const at::Tensor& src, c10::Device to, at::ScalarType dtype, Purpose purpose) {
  const auto from = src.device();
  if (from == to) return src.to(dtype);
  // The narrower type crosses.
  const bool narrows = c10::elementSize(dtype) < static_cast<size_t>(src.element_size());
  try {
    at::Tensor value = narrows ? src.to(dtype) : src;
    const auto bytes = static_cast<int64_t>(value.numel() * value.element_size());
    // A gradient goes back the same way.
    if (is_staged(from, to) || (value.requires_grad() && is_staged(to, from))) value = value.to(c10::kCPU);
    const bool behind = made_in_passing(purpose, bytes) && from.is_cpu() && !to.is_meta() && !value.requires_grad();
    if (behind) value = value.pin_memory();
    value = value.to(to, value.scalar_type(), /*non_blocking=*/behind).to(dtype);
    const std::lock_guard lock(shared().mutex);
    for (auto* scope : shared().scopes) add(scope->totals_[{from, to, purpose}], {1, bytes, bytes});
    return value;
  } catch (const c10::OutOfMemoryError& error) {
    throw Error(ErrorClass::kDevice,
                {"moving " + std::string(to_string(purpose)) + " from " + to_string(from) + " to " + to_string(to),
                 error.what_without_backtrace(),
                 std::to_string(src.numel() * static_cast<int64_t>(c10::elementSize(dtype))) + " bytes free on " +
                     to_string(to),
                 "take a smaller batch, or give that device fewer layers with " + setting("max_memory")});
  }
}

void undefined_destination(Purpose purpose) {
  emend::detail::check_failed(__FILE__, __LINE__, "dst.defined()",
                              "route_like (" + std::string(to_string(purpose)) + ") needs a defined destination");
}

}  // namespace detail

at::Tensor index_on(const std::vector<int64_t>& index, const at::Tensor& like) {
  return route_like(at::tensor(index, at::kLong), like, Purpose::kInput);
}

void stage_through_host(c10::Device from, c10::Device to, bool staged) {
  const std::lock_guard lock(shared().mutex);
  std::erase(shared().staged, std::pair(from, to));
  if (staged) shared().staged.emplace_back(from, to);
}

bool is_staged(c10::Device from, c10::Device to) {
  const std::lock_guard lock(shared().mutex);
  return std::ranges::count(shared().staged, std::pair(from, to)) > 0;
}

TransferScope::TransferScope() {
  const std::lock_guard lock(shared().mutex);
  shared().scopes.push_back(this);
}

TransferScope::~TransferScope() {
  const std::lock_guard lock(shared().mutex);
  std::erase(shared().scopes, this);
}

std::map<TransferKey, TransferTotal> TransferScope::totals() const {
  const std::lock_guard lock(shared().mutex);
  return totals_;
}

TransferTotal TransferScope::total(std::optional<Purpose> purpose) const {
  TransferTotal sum;
  for (const auto& [key, total] : totals())
    if (key.purpose == purpose.value_or(key.purpose)) add(sum, total);
  return sum;
}

nlohmann::json TransferScope::to_json() const {
  auto rows = nlohmann::json::array();
  for (const auto& [key, total] : totals())
    rows.push_back({{"from", to_string(key.from)},
                    {"to", to_string(key.to)},
                    {"purpose", to_string(key.purpose)},
                    {"count", total.count},
                    {"bytes", total.bytes},
                    {"largest", total.largest}});
  return rows;
}

}  // namespace emend::devices
