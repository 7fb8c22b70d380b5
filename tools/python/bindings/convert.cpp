#include <emend/core/error_parts.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"

namespace emend::python {
namespace {

constexpr int kDeepest = 64;

nlohmann::json json_of(const py::handle& object, const std::string& where, int depth) {
  if (depth > kDeepest)
    throw Error(ErrorClass::kInvalidArgument, {where, "values nested deeper than 64 levels", "plain data", ""});
  if (object.is_none()) return nullptr;
  if (py::isinstance<py::bool_>(object)) return object.cast<bool>();
  if (py::isinstance<py::int_>(object)) return object.cast<int64_t>();
  if (py::isinstance<py::float_>(object)) return object.cast<double>();
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  if (py::hasattr(object, "__fspath__")) return py::str(object).cast<std::string>();
  if (py::isinstance<py::dict>(object)) {
    auto json = nlohmann::json::object();
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object))
      json[py::str(key).cast<std::string>()] = json_of(value, where, depth + 1);
    return json;
  }
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    auto json = nlohmann::json::array();
    for (const auto& value : py::reinterpret_borrow<py::sequence>(object))
      json.push_back(json_of(value, where, depth + 1));
    return json;
  }
  throw Error(ErrorClass::kInvalidArgument,
              {where, "a value of type " + py::str(py::type::of(object).attr("__name__")).cast<std::string>(),
               "None, bool, int, float, str, list, tuple or dict", "convert it first"});
}

}  // namespace

py::object to_python(const nlohmann::json& json) {
  if (json.is_boolean()) return py::bool_(json.get<bool>());
  if (json.is_number_unsigned()) return py::int_(json.get<uint64_t>());
  if (json.is_number_integer()) return py::int_(json.get<int64_t>());
  if (json.is_number_float()) return py::float_(json.get<double>());
  if (json.is_string()) return py::str(json.get_ref<const std::string&>());
  if (json.is_array()) {
    py::list list;
    for (const auto& value : json) list.append(to_python(value));
    return list;
  }
  if (!json.is_object()) return py::none();
  py::dict dict;
  for (const auto& [key, value] : json.items()) dict[py::str(key)] = to_python(value);
  return dict;
}

nlohmann::json to_json(const py::handle& object, const std::string& where) {
  return json_of(object, where, 0);
}

void register_errors(py::module_& module) {
  module.attr("Error") = py::module_::import("emend._errors").attr("Error");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const ErrorParts parts = parts_of(error);
      const py::object type = py::module_::import("emend._errors").attr("Error");
      const py::object value = type(error.what(), std::string(to_string(error.error_class())), parts.where, parts.got,
                                    parts.expected, parts.advice);
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

at::ScalarType dtype_of(const py::object& dtype) {
  std::string name = py::str(dtype).cast<std::string>();
  if (name.starts_with("torch.")) name = name.substr(6);
  if (name == "float32" || name == "float") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float64" || name == "double") return at::kDouble;
  throw Error(ErrorClass::kInvalidArgument,
              {"dtype", name, "float32, bfloat16 or float64", "float16 checkpoints are computed in float32"});
}

std::vector<std::vector<int64_t>> rows_of(const models::Model& model, const py::object& inputs) {
  const auto encode = [&](const py::handle& text) {
    return model.tokenizer().encode_ids(text.cast<std::string>(), true);
  };
  if (py::isinstance<py::str>(inputs)) return {encode(inputs)};
  std::vector<std::vector<int64_t>> rows;
  const py::list items = THPVariable_Check(inputs.ptr()) ? py::list(inputs.attr("tolist")()) : py::list(inputs);
  if (!items.empty() && py::isinstance<py::int_>(items[0])) return {items.cast<std::vector<int64_t>>()};
  for (const auto& item : items)
    rows.push_back(py::isinstance<py::str>(item) ? encode(item) : item.cast<std::vector<int64_t>>());
  return rows;
}

std::function<bool(const ProgressUpdate&)> progress_of(const py::object& callable) {
  if (callable.is_none() || callable.is(py::bool_(false))) return {};
  if (callable.is(py::bool_(true)))
    return [draw = make_progress(2)](const ProgressUpdate& update) {
      const py::gil_scoped_acquire lock;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      draw(update);
      return true;
    };
  // Shared, and let go of with the lock held: the last copy may go on a thread without it.
  const std::shared_ptr<py::object> held(new py::object(callable), [](py::object* object) {
    const py::gil_scoped_acquire lock;
    delete object;
  });
  return [held](const ProgressUpdate& update) {
    const py::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const py::object answer = (*held)(update.phase, update.done, update.total, update.detail);
    return answer.is_none() || answer.cast<bool>();
  };
}

}  // namespace emend::python
