#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/devices/placement.h>
#include <emend/devices/route.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <tuple>

namespace emend::devices {
namespace {

constexpr std::array<std::string_view, 16> kPurposeNames = {
    "input", "hidden", "table",    "labels", "loss",   "delta",     "keys", "statistics",
    "solve", "weight", "snapshot", "cache",  "logits", "optimiser", "host", "other"};

auto order(c10::Device device) {
  return std::make_pair(static_cast<int>(device.type()), device.index());
}

/// The scopes that are alive. Only real transfers look here, so one mutex is cheap enough.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<TransferScope::State>> scopes;
  std::atomic<int> alive{0};
};
Registry& registry() {
  static Registry instance;
  return instance;
}

/// Pairs whose direct copies are not to be trusted.
struct StagedPairs {
  std::mutex mutex;
  std::set<std::pair<std::pair<int, int>, std::pair<int, int>>> pairs;
  std::atomic<bool> any{false};
};
StagedPairs& staged_pairs() {
  static StagedPairs instance;
  return instance;
}

}  // namespace

struct TransferScope::State {
  std::map<TransferKey, TransferTotal> totals;  // guarded by the registry's mutex
};

namespace {

void add(TransferTotal& total, const TransferTotal& more) {
  total.count += more.count;
  total.bytes += more.bytes;
  total.largest = std::max(total.largest, more.largest);
}

void count(c10::Device from, c10::Device to, Purpose purpose, int64_t bytes) {
  auto& all = registry();
  if (all.alive.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(all.mutex);
  for (const auto& scope : all.scopes) add(scope->totals[{from, to, purpose}], {1, bytes, bytes});
}

}  // namespace

std::string_view to_string(Purpose purpose) noexcept {
  return kPurposeNames[static_cast<size_t>(purpose)];
}

bool operator<(const TransferKey& a, const TransferKey& b) noexcept {
  return std::make_tuple(order(a.from), order(a.to), a.purpose) <
         std::make_tuple(order(b.from), order(b.to), b.purpose);
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
    count(from, to, purpose, bytes);
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
  auto& all = staged_pairs();
  const std::lock_guard lock(all.mutex);
  if (staged)
    all.pairs.insert({order(from), order(to)});
  else
    all.pairs.erase({order(from), order(to)});
  all.any = !all.pairs.empty();
}

bool is_staged(c10::Device from, c10::Device to) {
  auto& all = staged_pairs();
  if (!all.any.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(all.mutex);
  return all.pairs.count({order(from), order(to)}) > 0;
}

TransferScope::TransferScope() : state_(std::make_shared<State>()) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.scopes.push_back(state_);
  ++all.alive;
}

TransferScope::~TransferScope() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase(all.scopes, state_);
  --all.alive;
}

std::map<TransferKey, TransferTotal> TransferScope::totals() const {
  const std::lock_guard lock(registry().mutex);
  return state_->totals;
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
