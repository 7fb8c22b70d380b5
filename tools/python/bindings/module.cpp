#include <emend/core/setting.h>

#include <map>

#include "bindings.h"

// The arguments of Session and run, where they are not named as the library's fields.
static std::string argument(std::string_view name) {
  static const std::map<std::string, std::string, std::less<>> kNames = {{"set", "overrides"},
                                                                         {"dir", "directions"},
                                                                         {"stats_tokens", "statistics_tokens"},
                                                                         {"stats_cache", "cache"},
                                                                         {"eval", "metrics"}};
  const auto found = kNames.find(name);
  return found == kNames.end() ? std::string(name) : found->second;
}

PYBIND11_MODULE(_emend, module) {
  module.doc() = "Editing what language models know: the C++ library behind the package emend.";
  emend::spell_settings(argument);
  emend::python::register_errors(module);
  emend::python::bind_facts(module);
  emend::python::bind_models(module);
  emend::python::bind_hooks(module);
  emend::python::bind_traces(module);
  emend::python::bind_editing(module);
  emend::python::bind_evaluation(module);
  emend::python::bind_directions(module);
}
