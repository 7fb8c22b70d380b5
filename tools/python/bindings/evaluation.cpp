#include <emend/core/text.h>
#include <emend/evaluation/evaluation.h>
#include <emend/workflow/handles.h>

#include "bindings.h"

namespace emend::python {
namespace {

using evaluation::Evaluation;

Evaluation evaluate(const models::Model& model, const py::object& facts, const std::vector<std::string>& metrics,
                    const Evaluation* before, const py::object& progress, uint64_t seed, int bootstrap,
                    const std::string& free_style, const std::filesystem::path& health_data,
                    const std::optional<py::function>& front) {
  if (bootstrap < 0) refuse({"bootstrap", std::to_string(bootstrap), "0 (no interval of the score) or more", ""});
  const auto set = facts_of(facts);
  evaluation::EvaluateOptions options;
  options.before = before;
  options.seed = seed;
  options.bootstrap = bootstrap;
  options.free_style = free_style;
  options.health_data = health_data;
  options.log = warnings();
  if (front)
    options.front = [&front](std::string_view prompt) {
      const py::gil_scoped_acquire lock;
      return taken<std::string>((*front)(py::str(std::string(prompt))), "front", "a text");
    };
  options.progress = workflow::stopping(progress_of(progress));
  const py::gil_scoped_release unlocked;
  const PlainTensors plain;
  return evaluation::evaluate(model, set, metrics, options);
}

}  // namespace

void bind_evaluation(py::module_& module) {
  // Another evaluation can compare with it.
  py::class_<Evaluation>(module, "Evaluation", "The outcome for one state of a model.")
      .def_property_readonly(
          "summary", [](const Evaluation& self) { return to_python(self.summary); },
          "a dictionary for each family of metrics; percentages are 0 to 100")
      .def_property_readonly(
          "cases", [](const Evaluation& self) { return to_python(nlohmann::json(self.cases)); },
          "the raw values of every fact")
      .def("__repr__", [](const Evaluation& self) {
        return "<emend.Evaluation of " + counted(self.cases.size(), "fact") + ": " +
               join(self.summary.items(), ", ", [](const auto& item) { return item.key(); }) + ">";
      });
  module.def("evaluate", &evaluate, py::arg("model"), py::arg("facts"),
             py::arg("metrics") = std::vector<std::string>{"auto"}, py::kw_only(), py::arg("before") = py::none(),
             py::arg("progress") = true, py::arg("seed") = 0, py::arg("bootstrap") = 1000,
             py::arg("free_style") = "plain", py::arg("health_data") = "", py::arg("front") = py::none(),
             "Judges a model by facts. before: the evaluation of the unedited model, which locality compares with.\n"
             "free_style: how the metric \"free\" asks: plain, chat (in the model's chat template) or both.\n"
             "health_data: folder of health_*.json, lambada*.jsonl and text for the metric \"health\".\n"
             "front: gives what stands in front of each prompt that it is called with, as Session.prefix and "
             "Applied.prefix do for IKE.");
}

}  // namespace emend::python
