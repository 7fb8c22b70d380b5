// Independent pieces of work side by side on the cores of a machine.
//
// Operators that share a product of a few hundred rows among threads spend their time meeting, the more the more
// cores there are, and wait long for a thread whose core another program holds. Facts, batches and texts do not depend
// on each other: each takes one core and meets nobody.
#pragma once

#include <cstddef>
#include <functional>

namespace emend::devices {

/// Processors that this process may use: its affinity, and what its control group grants.
[[nodiscard]] int usable_processors();

/// Runs work(0) … work(items - 1), in this order but as many at once as LibTorch has threads (at::set_num_threads) and
/// `most` allows (0: no limit). Each runs in a thread whose operators have that one thread, so its numbers depend
/// neither on how many run at once nor on what came before. Grad and inference mode are the caller's. Items of a
/// run inside an item run on that item's thread. Items must not write to what others use: a model's hook points, for
/// one (models/compute_copy.h, shared_view). Throws what the item with the lowest number threw (or a function handed to
/// on_caller), after all that had begun have ended; none begins meanwhile.
void run_on_lanes(size_t items, const std::function<void(size_t)>& work, size_t most = 0);

/// Inside an item: `fn` runs on the thread that called run_on_lanes while that waits, in the order in which they are
/// handed over; for progress and other callbacks. Elsewhere: `fn` runs now.
void on_caller(std::function<void()> fn);

}  // namespace emend::devices
