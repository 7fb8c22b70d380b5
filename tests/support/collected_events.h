// What a log is told.
#pragma once

#include <emend/core/log.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace emend::testing {

class CollectedEvents final : public LogSink {
 public:
  void write(const LogEvent& event) override {
    const std::lock_guard lock(mutex_);
    events.push_back(event);
  }
  [[nodiscard]] int64_t count(const std::string& name) const {
    return std::ranges::count(events, name, &LogEvent::name);
  }
  std::vector<LogEvent> events;

 private:
  std::mutex mutex_;
};

}  // namespace emend::testing
