#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <emend/devices/cores.h>
#include <emend/devices/kernels.h>

#include <atomic>

namespace emend::devices {

void each_on_a_core(int64_t n, const std::function<void(int64_t)>& work) {
  const int64_t threads = at::get_num_threads();
  if (n < threads || threads == 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
  const at::ThreadLocalState callers;
  const bool plain = PlainOperators::on();
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {  // inside, LibTorch, MKL and oneDNN use one thread
    const at::ThreadLocalStateGuard as_caller(callers);
    const PlainOperators operators(plain);
    try {
      for (int64_t i = next++; i < n; i = next++) work(i);
    } catch (...) {
      next = n;
      throw;
    }
  });
}

int64_t parts_for_cores(int64_t items, int64_t most, int64_t least) {
  if (items < least) return 1;
  const int64_t parts = (items + most - 1) / most;
  return parts <= 2 ? 2 : (parts + 3) / 4 * 4;
}

}  // namespace emend::devices
