// A flag that asks long work to stop at the next safe point.
#pragma once

#include <emend/core/error.h>

#include <atomic>
#include <memory>

namespace emend {

/// Copyable; copies share the flag. request() is safe in a signal handler.
class CancelToken {
 public:
  CancelToken() : flag_(std::make_shared<std::atomic<bool>>(false)) {}
  void request() const noexcept { flag_->store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool requested() const noexcept { return flag_->load(std::memory_order_relaxed); }
  /// Throws Error(kCancelled) once request() was called. `where` names the phase for the message.
  void check(const char* where) const {
    if (requested()) throw Error(ErrorClass::kCancelled, {where, "interrupted", "", ""});
  }

 private:
  std::shared_ptr<std::atomic<bool>> flag_;
};

}  // namespace emend
