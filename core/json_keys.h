// Keys that stand twice in one JSON object: readers differ in which of the two they take.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace emend {

/// For the callback of nlohmann::json::parse, which tells it every event.
class RepeatedKeys {
 public:
  /// True if `value` is a key that its object has had before.
  [[nodiscard]] bool operator()(nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    return event == Event::key && !open_.back().insert(value.get<std::string>()).second;
  }

 private:
  std::vector<std::set<std::string>> open_;  // keys of the objects that are open
};

}  // namespace emend
