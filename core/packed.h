// Values as bytes, every number exact: how results go from one process to another.
#pragma once

#include <emend/core/error.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace emend {

/// `value` in MessagePack, as nlohmann::json converts it.
template <class Value>
[[nodiscard]] std::string packed(const Value& value) {
  const auto bytes = nlohmann::json::to_msgpack(value);
  return {bytes.begin(), bytes.end()};
}

/// What packed() was given. Throws Error(kCorruption) for what is none of it.
template <class Value>
[[nodiscard]] Value unpacked(std::string_view bytes) {
  try {
    return nlohmann::json::from_msgpack(bytes.begin(), bytes.end()).template get<Value>();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption, {"results of another process", error.what(), "what this program sends",
                                          "run the same version of emend in every process"});
  }
}

}  // namespace emend
