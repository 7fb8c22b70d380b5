#include <emend/core/text.h>
#include <emend/workflow/direct/job.h>

#include <algorithm>
#include <map>

#include "bindings.h"

namespace emend::python {
namespace {

// "int" or "list[str]", as the stubs say it.
std::string type_of(const Option& option) {
  return std::visit(
      []<class Slot>(const Slot&) -> std::string {
        if constexpr (std::is_same_v<Slot, bool*>) return "bool";
        if constexpr (std::is_same_v<Slot, double*>) return "float";
        if constexpr (std::is_same_v<Slot, std::string*>) return "str";
        return std::is_same_v<Slot, std::vector<std::string>*> ? "list[str]" : "int";
      },
      option.value);
}

// "raise" is a word of Python's own.
std::string argument_name(const Option& option) {
  const std::string name = field_name(option.names);
  return name == "raise" ? "raise_" : name;
}

bool is_argument(const Option& option, const std::string& action) {
  return is_of(option, action) && option.names.starts_with("--");
}

bool fits(const std::string& type, const nlohmann::json& value) {
  if (type == "bool") return value.is_boolean();
  if (type == "int") return value.is_number_integer();
  if (type == "float") return value.is_number();
  return value.is_string() || (type != "str" && value.is_array() &&
                               std::ranges::all_of(value, [](const auto& each) { return each.is_string(); }));
}

// The keyword arguments by the names that the options have as fields.
nlohmann::json values_of(const Options& declared, const std::string& action, const py::kwargs& given) {
  static const std::map<std::string, std::string> kWords = {{"bool", "True or False"},
                                                            {"int", "a whole number"},
                                                            {"float", "a number"},
                                                            {"str", "a text or a path"},
                                                            {"list[str]", "a text, or a list of texts"}};
  std::map<std::string, const Option*> known;
  for (const Option& option : declared.all())
    if (is_argument(option, action)) known[argument_name(option)] = &option;
  auto values = nlohmann::json::object();
  for (const auto& [key, value] : given) {
    const auto name = taken<std::string>(key, "direct_" + action, "the name of an argument");
    const auto found = known.find(name);
    if (found == known.end())
      throw ArgumentError(ErrorClass::kInvalidArgument,
                          {name, "no argument of direct_" + action, "one of " + join(known, ", ", key_of),
                           did_you_mean(name, known, "", key_of)});
    auto json = to_json(value, name);
    const std::string type = type_of(*found->second);
    if (!fits(type, json)) throw unexpected(name, value, kWords.at(type));
    values[field_name(found->second->names)] = std::move(json);
  }
  return values;
}

// What the action does, and a line for each of its keyword arguments: made from the options that programs have.
std::string documented(const std::string& action) {
  Options declared;
  workflow::DirectOptions options;
  workflow::declare_direct(declared, options);
  std::string text = "emend direct " + action + ": writes a folder, and returns what the program prints with JSON.\n";
  for (const Option& option : declared.all())
    if (is_argument(option, action))
      text += "\n:param " + type_of(option) + " " + argument_name(option) + ": " + option.meaning +
              (option.choices.empty() ? "" : " {" + join(option.choices) + "}") +
              (option.required         ? " (required)"
               : option.text().empty() ? ""
                                       : " [" + option.text() + "]");
  return text;
}

py::object direct(const std::string& action, const std::shared_ptr<models::Model>& model, const py::object& directions,
                  const py::object& progress, const py::kwargs& given) {
  Options declared;
  workflow::DirectOptions options;
  workflow::declare_direct(declared, options);
  auto values = values_of(declared, action, given);
  if (!directions.is_none()) {
    values["dir"] = to_json(directions, "directions");
    if (!fits("list[str]", values["dir"])) throw unexpected("directions", directions, "a path, or a list of paths");
  }
  set_options(declared, action, values);
  options.action = action;
  const workflow::Handles lent{.log = warnings(), .progress = workflow::stopping(progress_of(progress))};
  return to_python(unlocked([&] {
    const PlainTensors plain;
    return workflow::DirectJob(std::move(options)).run(*model, lent).document;
  }));
}

}  // namespace

void bind_directions(py::module_& module) {
  for (const auto& action : workflow::direct_actions()) {
    const std::string name = "direct_" + action, text = documented(action);
    if (action == "fit")
      module.def(
          name.c_str(),
          [action](const std::shared_ptr<models::Model>& model, const py::object& progress, const py::kwargs& given) {
            return direct(action, model, py::none(), progress, given);
          },
          py::arg("model").none(false), py::kw_only(), py::arg("progress") = true, text.c_str());
    else
      module.def(
          name.c_str(),
          [action](const std::shared_ptr<models::Model>& model, const py::object& directions,
                   const py::object& progress,
                   const py::kwargs& given) { return direct(action, model, directions, progress, given); },
          py::arg("model").none(false), py::arg("directions"), py::kw_only(), py::arg("progress") = true, text.c_str());
  }
}

}  // namespace emend::python
