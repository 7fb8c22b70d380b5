#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <emend/devices/host_memory.h>
#include <emend/devices/runtime.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/sanitizer.h"

namespace emend {
namespace host_memory_test {

// The allocator is the process's: other tests get theirs back.
class HostMemory : public ::testing::Test {
 protected:
  HostMemory() { devices::reuse_host_memory(); }
  void SetUp() override {
    if (testing::kAddressSanitizer)
      GTEST_SKIP()
          << "the address sanitizer's malloc keeps what is freed, and ends the process; they run in every other build";
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
  // Above what a thread keeps for itself: of malloc, and in blocks.
  for (const int64_t bytes : {100 << 10, 300 << 10, 5 << 20}) {
    std::vector<at::Tensor> stay;
    for (int i = 0; i < 8; ++i) {
      auto dropped = at::empty({bytes}, at::kByte);
      stay.push_back(at::empty({bytes}, at::kByte));  // so that what is dropped grows into nothing
      const void* const place = dropped.const_data_ptr();
      dropped.reset();
      stay.push_back(at::empty({bytes}, at::kByte));
      EXPECT_EQ(stay.back().const_data_ptr(), place) << bytes << " bytes, " << i;
    }
  }
}

// Every size of a block, to the byte: each tensor holds what was written, to its end, while all others are written.
TEST_F(HostMemory, BlocksHoldTheWholeOfATensor) {
  std::vector<at::Tensor> tensors;
  for (int64_t power = int64_t{1} << 17; power <= int64_t{1} << 26; power *= 2)
    for (int64_t eighth = 8; eighth < 16; ++eighth)
      for (const int64_t more : {-65, -64, -63, 0, 1}) {
        auto tensor = at::empty({power / 8 * eighth + more}, at::kByte);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64, 0u) << tensor.numel();
        const auto mark = static_cast<int64_t>(tensors.size() % 251);
        tensor[0].fill_(mark);
        tensor[-1].fill_(mark);
        tensors.push_back(std::move(tensor));
      }
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const int64_t at : {0, -1}) EXPECT_EQ(tensors[i][at].item<int64_t>(), i % 251) << tensors[i].numel();
}

TEST_F(HostMemory, IdleBlocksGoBackToTheSystem) {
  constexpr int64_t kBytes = 40 << 20;
  devices::return_host_memory();
  const int64_t before = devices::device_memory_stats(c10::kCPU).allocated;
  for (int i = 0; i < 5; ++i) (void)at::ones({kBytes}, at::kByte);  // each in the block of the last
  const int64_t idle = devices::device_memory_stats(c10::kCPU).allocated;
  EXPECT_GE(idle - before, kBytes / 2);
  EXPECT_LE(idle - before, 2 * kBytes);
  devices::return_host_memory();
  EXPECT_LE(devices::device_memory_stats(c10::kCPU).allocated - before, kBytes / 2);

  // By themselves, before blocks take more than tensors once needed at the same time, whatever their sizes,
  for (int64_t bytes = kBytes / 4; bytes <= kBytes; bytes += kBytes / 20) (void)at::ones({bytes}, at::kByte);
  EXPECT_LE(devices::device_memory_stats(c10::kCPU).allocated - before, 3 * kBytes / 2);
  devices::return_host_memory();

  // and when a sixteenth of the machine's memory is idle.
  const int64_t limit = devices::visible_devices().front().total_bytes / 16;
  std::vector<at::Tensor> many;
  for (int64_t held = 0; held < limit + 4 * kBytes; held += kBytes) many.push_back(at::zeros({kBytes}, at::kByte));
  many.clear();
  EXPECT_LE(devices::device_memory_stats(c10::kCPU).allocated - before, limit + kBytes);
  devices::return_host_memory();
}

TEST_F(HostMemory, ThreadsTakeAndDropAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 1; t <= 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const auto tensor = at::full({(128 << 10) + 1000 * (i % 50)}, t, at::kByte);
        if (tensor.min().item<int>() != t || tensor.max().item<int>() != t) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
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
