#include "http.h"

#include <emend/core/text.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace emend::tools::serve {
namespace {

using nlohmann::json;

std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  return value.is_array() ? "a list of " + std::to_string(value.size()) : shorten(value.dump(), 60);
}

// 5.0 is the integer 5, as in JSON Schema, and becomes it.
bool is_of(json& value, const std::string& type) {
  if (type != "integer") return type == value.type_name();
  constexpr double kEnd = 9223372036854775808.0;  // 2^63
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (number != std::floor(number) || number < -kEnd || number >= kEnd) return false;
    value = static_cast<int64_t>(number);
  }
  return value.is_number_integer() &&
         !(value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()});
}

std::string spelled(const std::string& type) {
  if (type == "integer") return "a whole number of at most 64 bits";
  if (type == "boolean") return "true or false";
  if (type == "object") return "an object";
  return type == "array" ? "a list" : type == "string" ? "a text" : "a number";
}

// "a whole number from 0 to 200"
std::string spelled(const json& schema, const char* least, const char* most) {
  const json type = schema.value("type", json("array"));
  std::string text = type.is_array() ? join(type.get<std::vector<std::string>>(), " or ",
                                            [](const std::string& one) { return spelled(one); })
                                     : spelled(type.get<std::string>());
  if (schema.contains(least)) text += " from " + schema[least].dump();
  if (schema.contains(most)) text += (schema.contains(least) ? " to " : " of at most ") + schema[most].dump();
  return schema.contains(least) && !schema.contains(most) ? text + " on" : text;
}

std::optional<SchemaFault> fault_of_list(json& list, const json& schema, const std::string& where) {
  const size_t size = list.size();
  if (size < schema.value("minItems", size) || size > schema.value("maxItems", size))
    return SchemaFault{where, shown(list), spelled(schema, "minItems", "maxItems")};
  std::set<json> seen;
  for (size_t i = 0; i < size; ++i) {
    const std::string place = where + "[" + std::to_string(i) + "]";
    if (schema.contains("items"))
      if (auto fault = schema_fault(list[i], schema["items"], place)) return fault;
    if (schema.value("uniqueItems", false) && !seen.insert(list[i]).second)
      return SchemaFault{place, shown(list[i]), "each of them once"};
  }
  return {};
}

std::optional<SchemaFault> fault_of_object(json& object, const json& schema, const std::string& where) {
  std::set<std::string> nulls;
  for (auto it = object.begin(); it != object.end();) {
    if (it->is_null()) nulls.insert(it.key());
    it = it->is_null() ? object.erase(it) : std::next(it);
  }
  const auto path = [&](const std::string& name) { return where.empty() ? name : where + "." + name; };
  static const json none = json::object();
  const auto part = [](const json& of, const std::string& name) -> const json& {
    return of.contains(name) ? of[name] : none;
  };
  const json& properties = part(schema, "properties");
  for (auto& [name, value] : object.items()) {  // what a text is comes before what a text must not have
    const json& rule = properties.contains(name) ? properties[name] : part(schema, "additionalProperties");
    if (auto fault = schema_fault(value, rule, path(name))) return fault;
  }
  for (const auto& name : schema.value("required", std::vector<std::string>()))
    if (!object.contains(name))
      return SchemaFault{path(name), nulls.contains(name) ? "null" : "missing",
                         spelled(part(properties, name), "minimum", "maximum")};
  for (const auto& [name, value] : object.items()) {
    if (!properties.contains(name) && !properties.empty()) {
      std::vector<std::string> names;
      for (const auto& [one, unused] : properties.items()) names.push_back(one);
      const std::string close = closest_name(name, names);
      return SchemaFault{path(name), "no such field", close.empty() ? "one of " + join(names) : "\"" + close + "\""};
    }
  }
  return {};
}

}  // namespace

json object_schema(const std::string& text) {
  return json::parse(R"({"type":"object",)" + text + "}");
}

std::optional<SchemaFault> schema_fault(json& value, const json& schema, const std::string& where) {
  if (const auto choices = schema.find("enum"); choices != schema.end()) {
    if (std::find(choices->begin(), choices->end(), value) != choices->end()) return {};
    return SchemaFault{where, shown(value),
                       join(*choices, " or ", [](const json& one) { return one.dump(); }) + " (no other is offered)"};
  }
  if (const auto type = schema.find("type"); type != schema.end()) {
    const json types = type->is_array() ? *type : json::array({*type});
    const bool fits = std::ranges::any_of(types, [&](const json& one) { return is_of(value, one); });
    const double number = value.is_number() ? value.get<double>() : 0;
    if (!fits || number < schema.value("minimum", number) || number > schema.value("maximum", number))
      return SchemaFault{where, shown(value), spelled(schema, "minimum", "maximum")};
  }
  if (value.is_array()) return fault_of_list(value, schema, where);
  return value.is_object() ? fault_of_object(value, schema, where) : std::nullopt;
}

}  // namespace emend::tools::serve
