#include <emend/core/error.h>
#include <emend/models/config_reader.h>

#include <cmath>

namespace emend::models {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLargestSize = int64_t{1} << 31;
const Json kNothing = Json::object();

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 77) + "…" : text;
}

std::string spelled(const ConfigReader::Names& names) {
  std::string text = names.front();
  for (size_t i = 1; i < names.size(); ++i) text += " (or " + names[i] + ")";
  return text;
}

}  // namespace

ConfigReader::ConfigReader(const Json& object, std::string where) : object_(&object), where_(std::move(where)) {
  if (!object.is_object())
    throw Error(ErrorClass::kCorruption, {where_, "found " + shown(object), "a JSON object",
                                          "compare with the published config.json of the model"});
}

bool ConfigReader::has(const std::string& key) const {
  return find({key}) != nullptr;
}

bool ConfigReader::is_null(const std::string& key) const {
  const auto it = object_->find(key);
  return it != object_->end() && it->is_null();
}

const Json* ConfigReader::find(const Names& names) const {
  for (const auto& name : names)
    if (const auto it = object_->find(name); it != object_->end() && !it->is_null()) return &*it;
  return nullptr;
}

int64_t ConfigReader::integer(const Names& names, int64_t least) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "an integer");
  const bool fits =
      value->is_number_integer() && !(value->is_number_unsigned() && value->get<uint64_t>() > kLargestSize);
  const int64_t n = fits ? value->get<int64_t>() : least - 1;
  if (!fits || n < least || n > kLargestSize)
    fail(spelled(names), shown(*value), "an integer from " + std::to_string(least) + " to 2^31");
  return n;
}

int64_t ConfigReader::integer_or(const Names& names, int64_t otherwise, int64_t least) const {
  return find(names) ? integer(names, least) : otherwise;
}

double ConfigReader::number(const Names& names) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "a number");
  const double x = value->is_number() ? value->get<double>() : 0;
  if (!(x > 0) || !std::isfinite(x)) fail(spelled(names), shown(*value), "a positive number");
  return x;
}

double ConfigReader::number_or(const Names& names, double otherwise) const {
  return find(names) ? number(names) : otherwise;
}

bool ConfigReader::flag_or(const Names& names, bool otherwise) const {
  const Json* value = find(names);
  if (!value) return otherwise;
  if (!value->is_boolean()) fail(spelled(names), shown(*value), "true or false");
  return value->get<bool>();
}

std::string ConfigReader::text_or(const Names& names, const std::string& otherwise) const {
  const Json* value = find(names);
  if (!value) return otherwise;
  if (!value->is_string()) fail(spelled(names), shown(*value), "a string");
  return value->get<std::string>();
}

std::vector<double> ConfigReader::numbers(const Names& names) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "a list of numbers");
  std::vector<double> list;
  if (value->is_array())
    for (const Json& x : *value)
      if (x.is_number() && x.get<double>() > 0 && std::isfinite(x.get<double>())) list.push_back(x.get<double>());
  if (!value->is_array() || list.size() != value->size())
    fail(spelled(names), shown(*value), "a list of positive numbers");
  return list;
}

std::vector<std::string> ConfigReader::texts(const Names& names) const {
  const Json* value = find(names);
  std::vector<std::string> list;
  if (!value) return list;
  if (value->is_array())
    for (const Json& x : *value)
      if (x.is_string()) list.push_back(x.get<std::string>());
  if (!value->is_array() || list.size() != value->size()) fail(spelled(names), shown(*value), "a list of strings");
  return list;
}

ConfigReader ConfigReader::object(const Names& names) const {
  for (const auto& name : names) {
    const Json* value = find({name});
    if (!value) continue;
    if (!value->is_object()) fail(name, shown(*value), "an object or null");
    return {*value, where_ + ": " + name};
  }
  return {kNothing, where_};
}

void ConfigReader::fail(const std::string& key, const std::string& got, const std::string& expected,
                        const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where_ + ": " + key, got, expected, advice});
}

void ConfigReader::unsupported(const std::string& key, const std::string& got, const std::string& expected,
                               const std::string& advice) const {
  throw Error(ErrorClass::kUnsupported, {where_ + ": " + key, got, expected, advice});
}

}  // namespace emend::models
