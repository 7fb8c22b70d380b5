#include "bindings.h"

PYBIND11_MODULE(_emend, module) {
  module.doc() = "Editing what language models know: the C++ library behind the package emend.";
  emend::python::register_errors(module);
  emend::python::bind_facts(module);
  emend::python::bind_models(module);
  emend::python::bind_hooks(module);
  emend::python::bind_editing(module);
  emend::python::bind_evaluation(module);
}
