#include <c10/core/impl/alloc_cpu.h>
#include <emend/core/error.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/placement.h>
#include <emend/devices/simulated.h>

#include <array>
#include <atomic>

namespace emend::devices {
namespace detail {
namespace {

struct Account {
  std::atomic<int64_t> bytes{0}, peak{0}, limit{0}, kept{0};
};
std::atomic<bool> g_keep{false};
std::array<Account, kMaxSimulated> g_accounts;
thread_local c10::DeviceIndex t_current = 0;

void raise_peak(Account& account, int64_t now) {
  auto peak = account.peak.load();
  while (now > peak && !account.peak.compare_exchange_weak(peak, now)) {
  }
}

/// Adds `bytes` to (or, negative, takes them from) the device's account; past a limit that stays as it is.
void account(c10::DeviceIndex device, int64_t bytes) {
  auto& of = g_accounts.at(static_cast<size_t>(device));
  const int64_t now = of.bytes += bytes;
  if (g_keep) of.kept = std::max<int64_t>(of.kept - bytes, 0);
  if (bytes <= 0) return;
  const int64_t limit = of.limit;
  if (limit > 0 && now + of.kept > limit) of.kept = 0;  // the blocks go first
  if (limit > 0 && now > limit) {
    of.bytes -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on sim:", static_cast<int>(device), ": tried to allocate ",
                     bytes, " bytes with ", now - bytes, " of ", limit, " in use");
  }
  raise_peak(of, now);
}

/// What a simulated DataPtr owns: its own host memory, or a CPU storage that it adopted.
struct Block {
  void* memory;
  int64_t bytes;
  c10::DeviceIndex device;
  c10::Storage adopted;
};

void free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  account(block->device, -block->bytes);
  if (block->memory) c10::free_cpu(block->memory);
}

void drop_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

class SimulatedAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = t_current;
    account(device, static_cast<int64_t>(bytes));
    void* memory = nullptr;
    try {
      if (bytes > 0) memory = c10::alloc_cpu(bytes);
    } catch (...) {
      account(device, -static_cast<int64_t>(bytes));
      throw;
    }
    return {memory, new Block{memory, static_cast<int64_t>(bytes), device, {}}, &free_block,
            c10::Device(kSimulated, device)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& of : g_accounts) of.kept = 0;
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto& of = g_accounts.at(static_cast<size_t>(device));
    stats.allocated_bytes[kAll].current = of.bytes;
    stats.allocated_bytes[kAll].peak = of.peak;
    stats.reserved_bytes[kAll].current = of.bytes + of.kept;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& of = g_accounts.at(static_cast<size_t>(device));
    of.peak = of.bytes.load();
  }
};

}  // namespace

void keep_simulated_blocks(bool on) {
  g_keep = on;
  if (!on) simulated_allocator().emptyCache({});
}
int64_t reserved_by_simulated(c10::DeviceIndex device) {
  const auto& account = g_accounts.at(static_cast<size_t>(device));
  return account.bytes + account.kept;
}

c10::DeviceIndex current_simulated_device() noexcept {
  return t_current;
}
void set_current_simulated_device(c10::DeviceIndex device) noexcept {
  t_current = device;
}

c10::DeviceAllocator& simulated_allocator() {
  static auto* allocator = new SimulatedAllocator;  // tensors may outlive every static
  return *allocator;
}

c10::Storage host_alias(const c10::Storage& simulated) {
  c10::DataPtr pointer(const_cast<void*>(simulated.data()), new c10::Storage(simulated), &drop_storage, c10::kCPU);
  return {c10::Storage::use_byte_size_t(), simulated.nbytes(), std::move(pointer), c10::GetAllocator(c10::kCPU), true};
}

c10::Storage adopt_host_storage(const c10::Storage& host, c10::DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  account(device, bytes);
  c10::DataPtr pointer(const_cast<void*>(host.data()), new Block{nullptr, bytes, device, host}, &free_block,
                       c10::Device(kSimulated, device));
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(pointer), &simulated_allocator(), true};
}

}  // namespace detail

static detail::Account& account_of(int index) {
  if (index < 0 || index >= kMaxSimulated)
    refuse({"simulated device", "index " + std::to_string(index), "0 to " + std::to_string(kMaxSimulated - 1), ""});
  return detail::g_accounts[static_cast<size_t>(index)];
}

void set_simulated_memory_limit(int index, int64_t bytes) {
  if (bytes < 0)
    refuse(
        {"memory limit of sim:" + std::to_string(index), std::to_string(bytes) + " bytes", "0 (no limit) or more", ""});
  account_of(index).limit = bytes;
}

int64_t simulated_memory_limit(int index) {
  return account_of(index).limit;
}

}  // namespace emend::devices
