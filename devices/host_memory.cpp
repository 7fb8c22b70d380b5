#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <emend/devices/host_memory.h>
#include <emend/devices/runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace emend::devices {
namespace {

constexpr size_t kAlignment = 64;  // of LibTorch's own allocator: a cache line, and a register of AVX-512
constexpr int kSmallestBlock = 17, kLargestBlock = 26;  // powers of two: from 128 KiB to 64 MiB a tensor has a block
constexpr int kStepBits = 3;                            // eight sizes of blocks to a power of two: 1/8 is lost at most

// What stands in front of the data.
struct Header {
  void* origin;  // what malloc returned, or the block
  size_t block;  // bytes of the block; 0: of malloc
};
static_assert(sizeof(Header) <= alignof(std::max_align_t), "malloc's alignment is the least that lies in front");

// The bytes of a tensor and its header, rounded up to the next size of a block; 0 if they are malloc's.
size_t block_of(size_t bytes) {
  if (bytes <= size_t{1} << kSmallestBlock || bytes > size_t{1} << kLargestBlock) return 0;
  const size_t step = std::bit_floor(bytes - 1) >> kStepBits;
  return (bytes + step - 1) / step * step;
}

// Mapped blocks of few sizes, so that the next tensor fits where the last one was. Those that were dropped longest ago
// go back to the system, so that blocks never take more than tensors once needed at the same time.
class Blocks {
 public:
  void* take(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      used_bytes_ += bytes;
      most_used_ = std::max(most_used_, used_bytes_);
      auto& idle = idle_[bytes];
      if (!idle.empty()) {
        void* const block = idle.back().address;
        idle.pop_back();
        idle_bytes_ -= bytes;
        return block;
      }
      unmap_surplus();
    }
    void* const block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block != MAP_FAILED) return block;
    const std::lock_guard lock(mutex_);
    used_bytes_ -= bytes;
    return nullptr;
  }

  void give(void* block, size_t bytes) {
    const std::lock_guard lock(mutex_);
    idle_[bytes].push_back({block, ++dropped_});
    idle_bytes_ += bytes;
    used_bytes_ -= bytes;
    unmap_surplus();
  }

  void unmap_all() {
    const std::lock_guard lock(mutex_);
    while (idle_bytes_ > 0) unmap_oldest();
    most_used_ = used_bytes_;
  }

 private:
  struct Idle {
    void* address;
    uint64_t dropped;  // when, in drops
  };

  void unmap_surplus() {
    while (idle_bytes_ > 0 && (idle_bytes_ > limit_ || used_bytes_ + idle_bytes_ > most_used_)) unmap_oldest();
  }
  void unmap_oldest() {
    const auto oldest = std::ranges::min_element(
        idle_, {}, [](const auto& one) { return one.second.empty() ? UINT64_MAX : one.second.front().dropped; });
    munmap(oldest->second.front().address, oldest->first);
    oldest->second.pop_front();
    idle_bytes_ -= oldest->first;
  }

  std::mutex mutex_;
  std::map<size_t, std::deque<Idle>> idle_;  // by bytes, the last dropped at the back
  size_t idle_bytes_ = 0, used_bytes_ = 0;
  size_t most_used_ = 0;  // at once, since unmap_all
  uint64_t dropped_ = 0;
  const size_t limit_ = static_cast<size_t>(visible_devices().front().total_bytes) / 16;  // of the CPU's memory
};

Blocks& blocks() {
  static auto* const all = new Blocks;  // never destroyed: tensors of static storage are dropped later
  return *all;
}

void release(void* data) {
  if (!data) return;
  const Header header = static_cast<const Header*>(data)[-1];
  if (header.block > 0)
    blocks().give(header.origin, header.block);
  else
    std::free(header.origin);
}

// Null where there is no memory left.
void* allocated(size_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  bytes += kAlignment;
  const size_t block = block_of(bytes);
  void* const origin = block > 0 ? blocks().take(block) : std::malloc(bytes);
  if (!origin) return nullptr;
  // malloc aligns to 16: there are 16 to 64 bytes in front of the next multiple of 64, enough for the header.
  const auto address = (reinterpret_cast<uintptr_t>(origin) + kAlignment) / kAlignment * kAlignment;
  auto* const data = reinterpret_cast<Header*>(address);
  data[-1] = {origin, block};
  return data;
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      data = allocated(bytes);
      if (!data) {
        blocks().unmap_all();
        data = allocated(bytes);
      }
      TORCH_CHECK(data, "cannot allocate memory on the host: ", bytes, " bytes");
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void reuse_host_memory() {
  static HostAllocator allocator;  // lives as long as the process: LibTorch keeps the pointer
  c10::SetCPUAllocator(&allocator);
}

void return_host_memory() {
  blocks().unmap_all();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace emend::devices
