// The Python module emend._emend: one function a part of the API, each in a file of its own.
//
// Goals: tensors cross without copies (torch's own casters, the same LibTorch); long work releases the interpreter's
// lock; errors arrive as emend.Error with their four parts. Non-goals: a second API; names follow the C++ ones.
#pragma once

#include <c10/core/InferenceMode.h>
#include <emend/core/error.h>
#include <emend/core/log.h>
#include <emend/datasets/fact.h>
#include <emend/models/model.h>
#include <emend/models/trace.h>
#include <emend/workflow/changes.h>
#include <pybind11/functional.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emend::python {

namespace py = pybind11;

/// Dictionaries, lists, numbers, texts and None; the other way throws Error(kInvalidArgument) naming `where`.
[[nodiscard]] py::object to_python(const nlohmann::json& json);
[[nodiscard]] nlohmann::json to_json(const py::handle& object, const std::string& where, int depth = 0);

/// Arguments that no call takes: in Python a TypeError too.
struct ArgumentError : Error {
  using Error::Error;
};

/// Every model that Python has, with what is known of its changes and what lies beside its weights.
struct HeldModel : models::Model {
  explicit HeldModel(models::Model&& model) : Model(std::move(model)), order(workflow::Changes::order_of(*this)) {}
  std::shared_ptr<workflow::Changes::Order> order;
  std::set<std::shared_ptr<void>> beside;
};

/// Warnings become Python's, UserWarning. What a filter of warnings raises ends the work as an exception of a callback.
[[nodiscard]] Log warnings();

/// Turns emend::Error into emend.Error.
void register_errors(py::module_& module);

/// "float32", "bfloat16", "float64", or a torch.dtype of these.
[[nodiscard]] at::ScalarType dtype_of(const py::object& dtype);

/// `where` was given something of the type of `got`, or a text that no UTF-8 has.
[[nodiscard]] ArgumentError unexpected(const std::string& where, const py::handle& got, const std::string& expected);

/// `value` as a T; throws unexpected(where, value, expected).
template <class T>
[[nodiscard]] T taken(const py::handle& value, const std::string& where, const std::string& expected) {
  try {
    if (!(std::is_same_v<T, std::string> && PyBytes_Check(value.ptr()))) return value.cast<T>();
  } catch (const py::cast_error&) {  // said below
  }
  throw unexpected(where, value, expected);
}

/// A text, or what has __fspath__, as text; throws unexpected(where, value, expected).
[[nodiscard]] std::string path_text(const py::object& value, const std::string& where,
                                    const std::string& expected = "a path");

/// What `work` returns, done without the interpreter's lock.
template <class Work>
auto unlocked(const Work& work) {
  const py::gil_scoped_release lock;
  return work();
}

/// Tensors as the toolkit makes them, also inside torch.autocast and torch.inference_mode, for a scope.
class PlainTensors {
 public:
  PlainTensors() {
    if (c10::InferenceMode::is_enabled()) normal_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> normal_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

/// Throws Error(kInvalidArgument) at `where` for a tensor that is sparse, complex or without numbers, which the
/// argument `name` may not be.
void require_dense(const at::Tensor& value, const std::string& where, const std::string& name);
/// What torch.as_tensor makes of a value, where that has numbers. Throws as require_dense, and what Python throws.
[[nodiscard]] at::Tensor dense_of(const py::object& value, const std::string& where);

/// What Python has as inputs: a text, a list of texts, a list of ids, or a list of lists of ids.
[[nodiscard]] models::Prompts prompts_of(const py::object& inputs);
/// The same as rows of token ids.
[[nodiscard]] std::vector<std::vector<int64_t>> rows_of(const models::Model& model, models::Prompts inputs);

/// A path to a facts file, a FactSet, or a list of Fact or dict.
[[nodiscard]] datasets::FactSet facts_of(const py::object& facts);

/// Throws what Ctrl-C raises in Python, if it was pressed.
void check_signals();

/// Python's callables as C++ keeps them: let go of with the lock held. None after the collector took one.
using Callable = std::shared_ptr<py::object>;
[[nodiscard]] Callable callable_of(const py::object& callable);

/// For a class that owns its `callables`: Python's collector sees them, and ends the cycles that they are part of.
template <class T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap) {
    static const auto callables = [](PyObject* self) -> const std::vector<Callable>* {
      auto* instance = reinterpret_cast<py::detail::instance*>(self);
      if (!instance->simple_layout || !instance->simple_holder_constructed) return nullptr;  // not made yet
      return &instance->get_value_and_holder().template value_ptr<T>()->callables;
    };
    heap->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    heap->ht_type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (const auto* held = callables(self))
        for (const auto& one : *held) Py_VISIT(one->ptr());
      return 0;
    };
    heap->ht_type.tp_clear = [](PyObject* self) {
      if (const auto* held = callables(self))
        for (const auto& one : *held) (void)std::exchange(*one, py::none());
      return 0;
    };
  });
}

/// A Python callable as a progress callback. True draws on standard error; None and False only look at signals. False
/// ends the work, None and True go on; an exception ends it too and reaches the caller.
/// What is kept of it goes into `kept` too.
[[nodiscard]] std::function<bool(const ProgressUpdate&)> progress_of(const py::object& callable,
                                                                     std::vector<Callable>* kept = nullptr);

/// A Python callable at a site: it returns None or a tensor (or what torch.as_tensor takes).
[[nodiscard]] hooks::HookFn hook_of(const Callable& function);

void bind_models(py::module_& module);
void bind_hooks(py::module_& module);
void bind_traces(py::module_& module);
void bind_facts(py::module_& module);
void bind_editing(py::module_& module);
void bind_evaluation(py::module_& module);
void bind_directions(py::module_& module);

}  // namespace emend::python
