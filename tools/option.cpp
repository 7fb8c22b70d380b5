#include "option.h"

#include <emend/core/text.h>
#include <emend/core/text_table.h>

#include <sstream>
#include <stdexcept>

namespace emend::tools {
namespace {

std::string text_of(const bool*) {
  return "";
}

template <class Value>
std::string text_of(const Value* value) {
  std::ostringstream text;
  text << *value;
  return text.str();
}

template <class Value>
std::string text_of(const std::vector<Value>* values) {
  return join(*values, ",", [](const Value& value) { return text_of(&value); });
}

std::string text_of(const CountOrAuto& count) {
  return *count.value == count.automatic ? "auto" : std::to_string(*count.value);
}

}  // namespace

std::vector<std::string> Option::spellings() const {
  std::vector<std::string> list;
  std::istringstream text(names);
  for (std::string name; std::getline(text, name, ',');) list.push_back(name);
  return list;
}

std::string Option::text() const {
  return std::visit([](const auto& slot) { return text_of(slot); }, value);
}

OptionGroup& OptionGroup::add(std::string names, OptionValue value, std::string meaning, OptionForm form) {
  options_.list_.push_back({std::move(form), std::move(names), heading_, std::move(meaning), std::move(value)});
  return *this;
}

Option& Options::at(const std::string& name) {
  for (auto& option : list_)
    for (const auto& spelling : option.spellings())
      if (spelling == name) return option;
  throw std::out_of_range("no option " + name + " was declared");
}

}  // namespace emend::tools
