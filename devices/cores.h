// Work on the host that cores do side by side, each a part of its own, instead of meeting after every product.
#pragma once

#include <cstdint>
#include <functional>

namespace emend::devices {

/// work(0) … work(n−1), each computed by a single thread, on as many threads as LibTorch has; who comes first takes the
/// next. With fewer parts than threads they are done one after the other by all threads together. Gradient mode and
/// PlainOperators are the caller's. The first exception ends it and is thrown here. Parts must not write what others
/// read.
void each_on_a_core(int64_t n, const std::function<void(int64_t)>& work);

/// Into how many parts of at most `most` so many items go, the same for any number of cores: one where there are fewer
/// than `least`, else an even number, so that no core waits for the last part of another.
[[nodiscard]] int64_t parts_for_cores(int64_t items, int64_t most, int64_t least);

/// Calls each of LibTorch's functions that MKL computes once, on one number and one thread; later calls do nothing.
/// MKL chooses a function's code at its first call, and where several threads make that call together one of them may
/// get code of low precision for its part (sines off by 10⁻⁴: pytorch issue 188792). Loading a model does this.
void choose_functions();

}  // namespace emend::devices
