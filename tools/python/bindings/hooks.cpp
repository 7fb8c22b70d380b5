#include <emend/hooks/hook_session.h>

#include "bindings.h"

namespace emend::python {
namespace {

using hooks::parse_site;

// A HookSession as a context manager. Sites are named by texts: "layers.3.mlp_down_in", "embedding".
class Hooks {
 public:
  explicit Hooks(std::shared_ptr<models::Model> model)
      : model_(std::move(model)), session_(std::make_unique<hooks::HookSession>(model_->hooks())) {}

  Hooks& capture(const std::string& site, const std::optional<std::vector<int64_t>>& tokens, bool reference) {
    require_outside("capture");
    session_->capture(parse_site(site), {.reference = reference, .tokens = tokens});
    return *this;
  }
  Hooks& edit(const std::string& site, const py::function& function) {
    require_outside("edit");
    callables.push_back(callable_of(function));
    session_->edit(parse_site(site), hook_of(callables.back()));
    return *this;
  }
  Hooks& stop_after(const std::string& site) {
    require_outside("stop_after");
    session_->stop_after(parse_site(site));
    return *this;
  }
  Hooks& enter() {
    session_->attach();
    attached_ = true;
    return *this;
  }
  // A hook that did not fire is an error, unless another one is on its way already.
  void exit(const py::object& type, const py::object&, const py::object&) {
    attached_ = false;
    if (type.is_none())
      session_->finish();
    else
      session_->detach();
  }
  [[nodiscard]] at::Tensor captured(const std::string& site) const { return session_->captured(parse_site(site)); }

  std::vector<Callable> callables;

 private:
  // What is asked for is attached when the `with` begins.
  void require_outside(const char* what) const {
    if (attached_) refuse({std::string("Hooks.") + what, "asked for inside `with`", "before it", ""});
  }

  std::shared_ptr<models::Model> model_;
  std::unique_ptr<hooks::HookSession> session_;
  bool attached_ = false;
};

std::vector<std::string> sites(const models::Model& model) {
  std::vector<std::string> names;
  for (const auto site : hooks::all_sites()) {
    if (!model.has_site(site)) continue;
    if (!hooks::is_layer_site(site)) {
      names.push_back(to_string(hooks::SiteRef{site}));
      continue;
    }
    for (int layer = 0; layer < model.n_layers(); ++layer) names.push_back(to_string(hooks::SiteRef{site, layer}));
  }
  return names;
}

}  // namespace

hooks::HookFn hook_of(const Callable& function) {
  return [function](const at::Tensor& value) {
    const py::gil_scoped_acquire lock;
    if (function->is_none()) return at::Tensor();
    const py::object result = (*function)(value);
    if (result.is_none()) return at::Tensor();
    try {
      return dense_of(result, "what the function at a site gives back");
    } catch (const py::error_already_set&) {
      throw unexpected("what the function at a site gives back", result, "None or a tensor");
    }
  };
}

void bind_hooks(py::module_& module) {
  py::class_<Hooks>(module, "Hooks", collected<Hooks>(),
                    "A scoped set of captures, edits and stops:\n\n"
                    "    with emend.Hooks(model).capture(\"layers.1.mlp_out\") as hooks:\n"
                    "        model.forward(\"The Eiffel Tower\")\n"
                    "        value = hooks.captured(\"layers.1.mlp_out\")\n\n"
                    "A hook that did not fire by the end of the scope is an error.")
      .def(py::init<std::shared_ptr<models::Model>>(), py::arg("model").none(false))
      .def("capture", &Hooks::capture, py::arg("site"), py::arg("tokens") = py::none(), py::arg("reference") = false,
           py::return_value_policy::reference_internal,
           "Keeps a copy of the tensor at a site (of some packed tokens); with reference=True the tensor itself, with "
           "its gradient history.")
      .def("edit", &Hooks::edit, py::arg("site"), py::arg("function"), py::return_value_policy::reference_internal,
           "Calls function(tensor) at a site. It returns None, or a new tensor of the same shape, dtype and device.")
      .def("stop_after", &Hooks::stop_after, py::arg("site"), py::return_value_policy::reference_internal,
           "Ends the forward pass after this site.")
      .def("captured", &Hooks::captured, py::arg("site"), "What was captured in the latest pass that reached the site.")
      .def("__enter__", &Hooks::enter, py::return_value_policy::reference_internal)
      .def("__exit__", &Hooks::exit);
  module.def("sites", &sites, py::arg("model"), "The names of all places in a model where hooks can be attached.");
}

}  // namespace emend::python
