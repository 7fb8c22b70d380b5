#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/cores.h>
#include <emend/devices/kernels.h>

#include <array>
#include <atomic>
#include <mutex>

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

void choose_functions() {
  using Function = at::Tensor (*)(const at::Tensor&);
  constexpr std::array<Function, 15> functions = {at::acos, at::asin,   at::atan, at::cos, at::erf,
                                                  at::erfc, at::erfinv, at::exp,  at::log, at::log10,
                                                  at::log2, at::sin,    at::sqrt, at::tan, at::tanh};
  static std::once_flag once;
  std::call_once(once, [&] {
    const at::NoGradGuard no_grad;
    for (const auto dtype : {at::kFloat, at::kDouble})
      for (const Function function : functions) (void)function(at::full({1}, 0.5, dtype));
  });
}

}  // namespace emend::devices
