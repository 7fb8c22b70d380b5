#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/trace.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"

namespace emend::python {
namespace {

using hooks::SiteRef;
using models::Model;
using models::Patch;
using models::Trace;

/// A change without its site: what Python calls a Patch.
struct PyPatch {
  std::vector<Callable> callables;  ///< its value, whatever that is: None after the collector took it
  bool add = false;
  std::optional<std::vector<int64_t>> tokens, heads;
};

// A trace of one text keeps that in mind: its tokens are one list.
struct PyTrace {
  Trace trace;
  bool single = false;
};

at::Tensor number_or_tensor(const SiteRef& site, const py::object& value) {
  try {
    return dense_of(value, "patch at " + to_string(site));
  } catch (const py::error_already_set&) {
    throw unexpected("patch at " + to_string(site), value,
                     "a function, \"zero\", \"mean\", a tensor or number, a Trace, a Patch, or a list of these");
  }
}

Patch patch_of(const SiteRef& site, const PyPatch& how) {
  const py::object& value = *how.callables.front();
  if (py::isinstance<PyTrace>(value)) {
    const Patch swapped = Patch::swap(site, value.cast<const PyTrace&>().trace);
    return how.add ? swapped.added() : swapped;
  }
  // Tensors can be called for other reasons than being functions.
  const bool is_function = PyCallable_Check(value.ptr()) != 0 && !THPVariable_Check(value.ptr());
  if (how.add && (is_function || py::isinstance<py::str>(value)))
    refuse({"patch at " + to_string(site), "add=True with " + std::string(is_function ? "a function" : "a word"),
            "a tensor, a number or a Trace to add", is_function ? "a function can add by itself" : ""});
  if (py::isinstance<py::str>(value)) {
    const auto name = value.cast<std::string>();
    if (name == "zero") return Patch::zero(site);
    if (name == "mean") return Patch::mean(site);
    refuse({"patch at " + to_string(site), "\"" + name + "\"", "\"zero\" or \"mean\"", ""});
  }
  if (is_function) return {site, hook_of(callable_of(value))};
  const at::Tensor tensor = number_or_tensor(site, value);
  return how.add ? Patch::add(site, tensor) : Patch::set(site, tensor);
}

void append_patches(std::vector<Patch>& patches, const SiteRef& site, const py::object& value) {
  if (py::isinstance<py::list>(value)) {
    for (const auto& each : value) append_patches(patches, site, py::reinterpret_borrow<py::object>(each));
    return;
  }
  const PyPatch given =
      py::isinstance<PyPatch>(value) ? value.cast<const PyPatch&>() : PyPatch{{callable_of(value)}, false, {}, {}};
  Patch patch = patch_of(site, given);
  if (given.tokens) patch = patch.tokens(*given.tokens);
  if (given.heads) patch = patch.heads(*given.heads);
  patches.push_back(std::move(patch));
}

SiteRef site_of(const py::handle& name) {
  return hooks::parse_site(taken<std::string>(name, "site", "a name such as \"layers.3.attn_pattern\""));
}

std::unique_ptr<PyTrace> trace(const Model& model, const py::object& inputs, const py::object& sites,
                               const py::dict& edit) {
  std::vector<SiteRef> refs;
  if (py::isinstance<py::str>(sites) || !py::isinstance<py::iterable>(sites)) {
    refs.push_back(site_of(sites));
  } else {
    for (const auto& name : sites) refs.push_back(site_of(name));
  }
  const models::Prompts prompts = prompts_of(inputs);
  std::vector<Patch> patches;
  for (const auto& [site, value] : edit)
    append_patches(patches, site_of(site), py::reinterpret_borrow<py::object>(value));
  auto made = std::make_unique<PyTrace>();
  made->single = py::isinstance<py::str>(inputs);
  const py::gil_scoped_release unlocked;
  made->trace = model.trace(prompts, refs, patches);
  return made;
}

py::object tokens(const PyTrace& self) {
  return self.single ? py::cast(self.trace.tokens.at(0)) : py::cast(self.trace.tokens);
}

std::vector<std::vector<int64_t>> ids(const PyTrace& self) {
  return mapped(self.trace.encodings, &models::Encoding::ids);
}

std::vector<std::string> captured_sites(const PyTrace& self) {
  std::vector<std::string> names;
  for (const auto& [site, value] : self.trace.captures) names.push_back(to_string(site));
  return names;
}

py::list next_tokens(const Model& model, const py::object& inputs, int64_t count) {
  const models::Prompts prompts = prompts_of(inputs);
  if (const size_t rows = std::max(prompts.texts.size(), prompts.ids.size()); rows != 1)
    refuse({"next_tokens", std::to_string(rows) + " texts", "one text", "ask for each of them"});
  py::list list;
  for (const auto& token : unlocked([&] { return model.next_tokens(prompts, count); }))
    list.append(py::make_tuple(token.text, token.probability, token.id));
  return list;
}

void bind_model_methods(py::module_& module) {
  auto model = py::class_<Model, std::shared_ptr<Model>>(module.attr("Model"));
  model.def(
      "trace", &trace, py::arg("inputs"), py::arg("sites") = py::list(), py::arg("edit") = py::dict(),
      "One pass that shows what lies at sites, with changes on the way.\n\n"
      "inputs: a text, texts, or rows of token ids.\n"
      "sites: names as \"layers.3.attn_pattern\"; emend.sites(model) lists them.\n"
      "edit: {site: change}. A change is a function of the tensor (in the layout of Trace; it returns a new one "
      "or changes the one it gets), \"zero\", \"mean\" (over all tokens; of scores and patterns over those that see "
      "a key), a tensor or number that is put there, another Trace whose value is put there, a Patch, or a list of "
      "these.");
  model.def("next_tokens", &next_tokens, py::arg("inputs"), py::arg("count") = 10,
            "The likeliest tokens behind a text, the likeliest first: (text, probability, id).");
  model.def(
      "project",
      [](const Model& self, const at::Tensor& hidden) {
        require_dense(hidden, "hidden", "hidden");
        return unlocked([&] { return self.project(hidden); });
      },
      py::arg("hidden"),
      "Final norm and head on [rows, width] of the residual stream: logits, as if it were the last layer's.");
  model.def("embedding", &Model::embedding, "The table of token embeddings; shares memory with the model.");
  model.def(
      "weight_at", [](const Model& self, const std::string& site) { return self.weight_at(hooks::parse_site(site)); },
      py::arg("site"),
      "The matrix that a site's tensor comes out of, [out, in] whatever the checkpoint's layout; [heads, size, width] "
      "for attn_q, attn_k and attn_v. To be read: it shares memory with the model, but for attn_q where groups of "
      "heads are fused (InternLM2, Falcon).");
}

}  // namespace

void bind_traces(py::module_& module) {
  py::class_<PyPatch>(module, "Patch", collected<PyPatch>(),
                      "A change at a site of some tokens or heads, for Model.trace(edit=…).")
      .def(py::init([](const py::object& value, const std::optional<std::vector<int64_t>>& tokens,
                       const std::optional<std::vector<int64_t>>& heads, bool add) {
             return PyPatch{{callable_of(value)}, add, tokens, heads};
           }),
           py::arg("value"), py::kw_only(), py::arg("tokens") = py::none(), py::arg("heads") = py::none(),
           py::arg("add") = false,
           "value: \"zero\", \"mean\", a function, a tensor or number, or a Trace to take the value from.\n"
           "tokens: positions in each row, negative ones from its end. heads: heads, or experts.\n"
           "add: a tensor, a number or what a Trace had is added instead of put there.");
  py::class_<PyTrace>(
      module, "Trace",
      "What Model.trace showed. Tensors begin with [rows, tokens]: hidden states [rows, tokens, width], what has heads "
      "[rows, tokens, heads, size], but scores and patterns [rows, heads, tokens, keys]; zero where a row is shorter. "
      "They are torch tensors; .numpy() shares their memory.")
      .def_property_readonly(
          "logits", [](const PyTrace& self) { return self.trace.logits; }, "[rows, tokens, vocabulary]")
      .def_property_readonly("tokens", &tokens, "The tokens as texts: a list for one text, else a list a row.")
      .def_property_readonly("ids", &ids, "Token ids of every row.")
      .def_property_readonly("sites", &captured_sites, "What was captured.")
      .def(
          "__getitem__",
          [](const PyTrace& self, const std::string& site) { return self.trace[hooks::parse_site(site)]; },
          py::arg("site"))
      .def(
          "__contains__",
          [](const PyTrace& self, const py::object& site) { return py::cast(captured_sites(self)).contains(site); },
          py::arg("site"))
      .def("__iter__", [](const PyTrace& self) { return py::iter(py::cast(captured_sites(self))); })
      .def("__repr__",
           [](const PyTrace& self) {
             return "<emend.Trace of " + counted(self.trace.tokens.size(), "row") + ": " +
                    shorten(join(captured_sites(self)), 200) + ">";
           })
      .def(
          "at",
          [](const PyTrace& self, const std::string& site, int64_t row, int64_t token) {
            return self.trace.at(hooks::parse_site(site), row, token);
          },
          py::arg("site"), py::arg("row"), py::arg("token"),
          "A site's tensor at one token of a row; a negative token counts from the row's end.")
      .def(
          "span", [](const PyTrace& self, const std::string& part, int64_t row) { return self.trace.span(part, row); },
          py::arg("part"), py::arg("row") = 0,
          "(first, one past the last) token of a part of a row's text, such as its subject.");
  bind_model_methods(module);
}

}  // namespace emend::python
