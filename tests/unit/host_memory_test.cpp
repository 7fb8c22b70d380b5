#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <emend/devices/host_memory.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace emend {
namespace host_memory_test {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMallocReplaced = true;
#elif defined(__has_feature)
constexpr bool kMallocReplaced = __has_feature(address_sanitizer);
#else
constexpr bool kMallocReplaced = false;
#endif

// The allocator is the process's: other tests get theirs back.
class HostMemory : public ::testing::Test {
 protected:
  HostMemory() { devices::reuse_host_memory(); }
  void SetUp() override {
    if (kMallocReplaced) GTEST_SKIP() << "the address sanitizer's malloc keeps what is freed, and ends the process";
  }
  ~HostMemory() override { c10::SetCPUAllocator(before_); }

  c10::Allocator* const before_ = c10::GetCPUAllocator();
};

TEST_F(HostMemory, TensorsLieAsLibTorchsDo) {
  std::vector<at::Tensor> tensors;
  for (int64_t n = 0; n < 300; ++n) {
    tensors.push_back(at::full({n}, n, at::kShort));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors.back().const_data_ptr()) % 64, 0u) << n;
  }
  // none of them lies in another
  for (int64_t n = 0; n < 300; ++n) EXPECT_EQ(tensors[n].sum().item<int64_t>(), n * n);
  auto grown = at::ones({3});
  grown.resize_({5000});
  EXPECT_EQ(grown.slice(0, 0, 3).sum().item<float>(), 3);
}

TEST_F(HostMemory, TheNextTensorOfASizeTakesThePlaceOfTheLast) {
  constexpr int64_t kBytes = 100 * 1024;  // above what a thread keeps for itself, below what is mapped by itself
  std::vector<at::Tensor> stay;
  for (int i = 0; i < 8; ++i) {
    auto dropped = at::empty({kBytes}, at::kByte);
    stay.push_back(at::empty({kBytes}, at::kByte));  // so that what is dropped grows into nothing
    const void* const place = dropped.const_data_ptr();
    dropped.reset();
    stay.push_back(at::empty({kBytes}, at::kByte));
    EXPECT_EQ(stay.back().const_data_ptr(), place) << i;
  }
}

TEST_F(HostMemory, TensorsOutliveTheChange) {
  auto of_ours = at::arange(1000);
  c10::SetCPUAllocator(before_);
  auto of_theirs = at::arange(1000);
  devices::reuse_host_memory();
  EXPECT_TRUE(of_ours.equal(of_theirs));
  of_ours.reset();
  of_theirs.reset();  // each by the allocator that it came from
}

TEST_F(HostMemory, MoreThanThereIsIsAnErrorThatSaysSo) {
  for (const int64_t bytes : {int64_t{1} << 60, INT64_MAX}) {
    try {
      (void)c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
      ADD_FAILURE() << bytes << " bytes were given";
    } catch (const c10::Error& error) {
      const std::string what = error.what_without_backtrace();
      EXPECT_NE(what.find("cannot allocate memory on the host: " + std::to_string(bytes)), what.npos) << what;
    }
  }
}

}  // namespace host_memory_test
}  // namespace emend
