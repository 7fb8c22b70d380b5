#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <emend/devices/host_memory.h>

#include <cstdint>
#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace emend::devices {
namespace {

constexpr uintptr_t kAlignment = 64;  // of LibTorch's own allocator: a cache line, and a register of AVX-512

// What malloc returned stands in front of the data.
void*& origin(void* data) {
  return static_cast<void**>(data)[-1];
}

void release(void* data) {
  if (data) std::free(origin(data));
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      void* const piece = bytes <= SIZE_MAX - kAlignment ? std::malloc(bytes + kAlignment) : nullptr;
      TORCH_CHECK(piece, "cannot allocate memory on the host: ", bytes, " bytes");
      // malloc aligns to 16: there are 16 to 64 bytes in front of the next multiple.
      const auto address = (reinterpret_cast<uintptr_t>(piece) + kAlignment) / kAlignment * kAlignment;
      data = reinterpret_cast<void*>(address);
      origin(data) = piece;
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
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace emend::devices
