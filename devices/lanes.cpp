#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <emend/devices/lanes.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace emend::devices {
namespace {

class Run;
thread_local Run* t_run = nullptr;  // whose item this thread works on

class Run {
 public:
  Run(size_t items, const std::function<void(size_t)>& work) : items_(items), work_(work) {}

  void operator()(size_t lanes) {
    const at::ThreadLocalState state;
    {
      std::vector<std::jthread> threads;
      try {
        while (threads.size() < lanes) threads.emplace_back([&] { lane(state); });
      } catch (const std::system_error&) {  // fewer threads do the same work
        if (threads.empty()) throw;
      }
      serve(threads.size());
    }
    if (error_) std::rethrow_exception(error_);
  }

  void post(std::function<void()> fn) {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(fn));
    changed_.notify_one();
  }

 private:
  void lane(const at::ThreadLocalState& state) {
    (void)at::get_num_threads();  // a thread's first question sets its number to the program's
    at::set_num_threads(1);
    count(begun_);
    {
      const at::ThreadLocalStateGuard guard(state);
      t_run = this;
      for (std::optional<size_t> item; (item = next());) {
        try {
          work_(*item);
        } catch (...) {
          fail(*item);
        }
      }
    }
    count(ended_);
  }

  // On the calling thread until all lanes have ended.
  void serve(size_t lanes) {
    const int wide = at::get_num_threads();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ == lanes; });
    at::set_num_threads(wide);  // for threads that others begin: the lanes' 1 went to the whole program as well
    while (ended_ < lanes || !posted_.empty()) {
      changed_.wait(lock, [&] { return ended_ == lanes || !posted_.empty(); });
      while (!posted_.empty()) {
        const auto fn = std::move(posted_.front());
        posted_.pop_front();
        lock.unlock();
        try {
          fn();
        } catch (...) {
          fail(0);
        }
        lock.lock();
      }
    }
  }

  std::optional<size_t> next() {
    const std::lock_guard lock(mutex_);
    return next_ < items_ ? std::optional(next_++) : std::nullopt;
  }

  void fail(size_t item) {
    const std::lock_guard lock(mutex_);
    if (!error_ || item < failed_) {
      error_ = std::current_exception();
      failed_ = item;
    }
    next_ = items_;
  }

  void count(size_t& lanes) {
    const std::lock_guard lock(mutex_);
    ++lanes;
    changed_.notify_one();
  }

  const size_t items_;
  const std::function<void(size_t)>& work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> posted_;
  size_t next_ = 0, begun_ = 0, ended_ = 0, failed_ = 0;
  std::exception_ptr error_;
};

}  // namespace

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  double quota = 0, period = 0;
  std::ifstream both("/sys/fs/cgroup/cpu.max");  // "max 100000" without a quota
  if (!both) {                                   // the older kind
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  if ((!both || both >> quota >> period) && quota > 0 && period > 0)
    count = std::min(count, static_cast<int>(std::ceil(quota / period)));
  return std::max(count, 1);
}

void run_on_lanes(size_t items, const std::function<void(size_t)>& work, size_t most) {
  const auto threads = static_cast<size_t>(at::get_num_threads());
  if (items > 0 && threads > 1 && !t_run) return Run(items, work)(std::min({items, threads, most > 0 ? most : items}));
  for (size_t item = 0; item < items; ++item) work(item);
}

void on_caller(std::function<void()> fn) {
  if (t_run) return t_run->post(std::move(fn));
  fn();
}

}  // namespace emend::devices
