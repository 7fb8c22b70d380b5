// What a JSON document must be, in the part of JSON Schema that /openapi.json speaks: requests, and the server's own
// files.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>

namespace emend::tools::serve {

struct SchemaFault {
  std::string where, got, expected;  ///< "prompts[2].targets"
};

/// {"type": "object", …} of the keywords in `text`. Known are type, enum, minimum, maximum, minItems, maxItems,
/// uniqueItems, items, properties, required, additionalProperties; where there are properties there are no others.
[[nodiscard]] nlohmann::json object_schema(const std::string& text);

/// The first fault of a value; fields that are null are taken away first. Integers are written as such and fit 64 bits.
[[nodiscard]] std::optional<SchemaFault> schema_fault(nlohmann::json& value, const nlohmann::json& schema,
                                                      const std::string& where = "");

}  // namespace emend::tools::serve
