#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/json_view.h>

namespace emend::models::detail {

using nlohmann::json;

bool JsonView::has(const std::string& key) const {
  if (!value_->is_object()) return false;
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonView JsonView::at(const std::string& key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  const std::string path = path_.empty() ? key : path_ + "." + shorten(key);
  if (found == value_->end())
    throw Error(ErrorClass::kCorruption,
                {file_, "the key \"" + path + "\" is missing", "a complete tokenizer file", "get the file again"});
  return {*found, file_, path};
}

std::vector<JsonView> JsonView::elements() const {
  if (!value_->is_array()) fail("an array");
  std::vector<JsonView> views;
  for (size_t i = 0; i < value_->size(); ++i) views.push_back(element(i));
  return views;
}

const std::string& JsonView::string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get_ref<const std::string&>();
}

int64_t JsonView::integer(int64_t lowest, int64_t highest) const {
  const bool fits = value_->is_number_unsigned() ? value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)
                                                 : value_->is_number_integer();
  if (!fits || value_->get<int64_t>() < lowest || value_->get<int64_t>() > highest)
    fail("an integer from " + std::to_string(lowest) + " to " + std::to_string(highest));
  return value_->get<int64_t>();
}

bool JsonView::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

void JsonView::fail(const std::string& expected) const {
  std::string got = value_->dump(-1, ' ', false, json::error_handler_t::replace);
  if (got.size() > 60) got = std::string(value_->type_name()) + " of " + std::to_string(value_->size()) + " elements";
  throw Error(ErrorClass::kCorruption, {where(), "got " + got, expected, "get the file again"});
}

void JsonView::unsupported(const std::string& what, const std::string& expected) const {
  throw Error(ErrorClass::kUnsupported, {where(), what, expected, "use another model, or report this one"});
}

}  // namespace emend::models::detail
