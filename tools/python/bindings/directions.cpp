#include <emend/core/text.h>
#include <emend/workflow/direct/job.h>

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
  auto values = to_json(given, "keyword arguments");
  if (values.contains("raise_")) {
    values["raise"] = values["raise_"];
    values.erase("raise_");
  }
  if (!directions.is_none()) values["dir"] = to_json(directions, "directions");
  set_options(declared, action, values);
  options.action = action;
  const workflow::Handles lent{.progress = workflow::stopping(progress_of(progress))};
  return to_python(unlocked([&] { return workflow::DirectJob(std::move(options)).run(*model, lent).document; }));
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
