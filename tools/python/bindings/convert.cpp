#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/run_directory.h>

#include "bindings.h"

namespace emend::python {
Log warnings() {
  return Log({workflow::make_sink([](const LogEvent& event) {
    if (event.level < LogLevel::kWarning) return;
    const py::gil_scoped_acquire lock;
    // 2: who called the function of _errors.py that stands around each of ours.
    if (PyErr_WarnEx(PyExc_UserWarning, repair_utf8(event.text).c_str(), 2) != 0) throw py::error_already_set();
  })});
}

ArgumentError unexpected(const std::string& where, const py::handle& got, const std::string& expected) {
  const auto type = py::str(py::type::handle_of(got).attr("__name__")).cast<std::string>();
  if (PyUnicode_Check(got.ptr()) && PyUnicode_AsUTF8(got.ptr()) == nullptr) {
    PyErr_Clear();
    return {ErrorClass::kInvalidArgument,
            {where, "a lone surrogate in " + shorten(py::repr(got).cast<std::string>(), 60), "whole characters",
             "text.encode(\"utf-8\", \"replace\").decode() replaces the halves"}};
  }
  return {ErrorClass::kInvalidArgument,
          {where, "a value of type " + type + ", " + shorten(py::repr(got).cast<std::string>(), 60), expected, ""}};
}

std::string path_text(const py::object& value, const std::string& where, const std::string& expected) {
  if (!py::isinstance<py::str>(value) && !py::hasattr(value, "__fspath__")) throw unexpected(where, value, expected);
  try {
    return py::module_::import("os").attr("fsencode")(value).cast<py::bytes>();  // also names that are no UTF-8
  } catch (const py::error_already_set&) {
    throw unexpected(where, value, expected);
  }
}

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

nlohmann::json to_json(const py::handle& object, const std::string& where, int depth) {
  if (depth > 64) refuse({where, "values nested deeper than 64 levels", "plain data", ""});
  if (object.is_none()) return nullptr;
  if (py::isinstance<py::bool_>(object)) return object.cast<bool>();
  if (py::isinstance<py::int_>(object)) return taken<int64_t>(object, where, "a whole number of at most 64 bits");
  if (py::isinstance<py::float_>(object)) return object.cast<double>();
  if (py::isinstance<py::str>(object)) return taken<std::string>(object, where, "a text");
  if (py::hasattr(object, "__fspath__")) return path_text(py::reinterpret_borrow<py::object>(object), where);
  if (py::isinstance<py::dict>(object)) {
    auto json = nlohmann::json::object();
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object))
      json[taken<std::string>(py::str(key), "a key of " + where, "a text")] = to_json(value, where, depth + 1);
    return json;
  }
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    auto json = nlohmann::json::array();
    for (const auto& value : py::reinterpret_borrow<py::sequence>(object))
      json.push_back(to_json(value, where, depth + 1));
    return json;
  }
  if (py::hasattr(object, "tolist")) return to_json(object.attr("tolist")(), where, depth + 1);  // NumPy, torch
  if (PyRange_Check(object.ptr())) return to_json(py::list(py::reinterpret_borrow<py::object>(object)), where, depth);
  throw unexpected(where, object, "None, bool, int, float, str, list, tuple or dict");
}

void register_errors(py::module_& module) {
  module.attr("Error") = py::module_::import("emend._errors").attr("Error");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const ErrorParts parts = parts_of(error);
      const bool of_arguments = dynamic_cast<const ArgumentError*>(&error) != nullptr;
      const py::object type = py::module_::import("emend._errors").attr(of_arguments ? "ArgumentError" : "Error");
      // What a damaged file holds may be no UTF-8.
      const py::object value =
          type(repair_utf8(error.what()), std::string(to_string(error.error_class())), repair_utf8(parts.where),
               repair_utf8(parts.got), repair_utf8(parts.expected), repair_utf8(parts.advice));
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

at::ScalarType dtype_of(const py::object& dtype) {
  static const std::string expected = "float32, bfloat16 or float64, as text or torch.dtype";
  std::string name = taken<std::string>(py::str(dtype), "dtype", expected);
  if (!py::isinstance<py::str>(dtype) && !name.starts_with("torch.")) throw unexpected("dtype", dtype, expected);
  if (name.starts_with("torch.")) name = name.substr(6);
  if (name == "float32" || name == "float") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float64" || name == "double") return at::kDouble;
  refuse({"dtype", name, "float32, bfloat16 or float64", "float16 checkpoints are computed in float32"});
}

models::Prompts prompts_of(const py::object& inputs) {
  static const std::string expected = "a text, texts, token ids, or rows of token ids";
  const auto plain_of = [](const py::object& value) {
    return py::hasattr(value, "tolist") ? py::object(value.attr("tolist")()) : value;
  };
  if (py::isinstance<py::str>(inputs)) return taken<std::string>(inputs, "inputs", expected);
  const py::object plain = plain_of(inputs);
  const bool loose = py::isinstance<py::dict>(plain) || py::isinstance<py::set>(plain);  // of keys, or without order
  if (loose || PyBytes_Check(plain.ptr()) || !py::isinstance<py::iterable>(plain))
    throw unexpected("inputs", inputs, expected);
  py::list items;
  for (const auto& item : py::list(plain)) items.append(plain_of(py::reinterpret_borrow<py::object>(item)));
  using Row = std::vector<int64_t>;
  if (!items.empty() && py::isinstance<py::int_>(items[0])) return {{taken<Row>(items, "inputs", expected)}};
  std::vector<std::string> texts;
  std::vector<Row> rows;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string where = "inputs[" + std::to_string(i) + "]";
    if (py::isinstance<py::str>(items[0]))
      texts.push_back(taken<std::string>(items[i], where, "a text, as the first is"));
    else
      rows.push_back(taken<Row>(items[i], where, expected));
  }
  return texts.empty() ? models::Prompts(std::move(rows)) : models::Prompts(std::move(texts));
}

std::vector<std::vector<int64_t>> rows_of(const models::Model& model, models::Prompts inputs) {
  for (const auto& text : inputs.texts) inputs.ids.push_back(model.tokenizer().encode_prompt(text).ids);
  return std::move(inputs.ids);
}

void check_signals() {
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// The last copy may go on a thread without the lock.
Callable callable_of(const py::object& callable) {
  return {new py::object(callable), [](py::object* object) {
            const py::gil_scoped_acquire lock;
            delete object;
          }};
}

std::function<bool(const ProgressUpdate&)> progress_of(const py::object& callable, std::vector<Callable>* kept) {
  if (callable.is_none() || py::isinstance<py::bool_>(callable))
    return [draw = callable.is(py::bool_(true)) ? make_progress(2) : ProgressFn()](const ProgressUpdate& update) {
      check_signals();
      if (draw) draw(update);
      return true;
    };
  static const std::string expected = "None, True, False, or a function that returns one of them";
  if (!PyCallable_Check(callable.ptr())) throw unexpected("progress", callable, expected);
  const Callable held = callable_of(callable);
  if (kept) kept->push_back(held);
  return [held](const ProgressUpdate& update) {
    const py::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (held->is_none()) return true;
    const py::object answer = (*held)(update.phase, update.done, update.total, update.detail);
    return answer.is_none() || taken<bool>(answer, "progress", expected);
  };
}

void require_dense(const at::Tensor& value, const std::string& where, const std::string& name) {
  if (value.layout() != at::kStrided) refuse({where, "a sparse tensor", "a dense one", "give " + name + ".to_dense()"});
  if (value.is_meta()) refuse({where, "a tensor on the meta device, which holds no numbers", "one with numbers", ""});
  if (value.is_complex()) refuse({where, "complex numbers", "real ones", ""});
}

at::Tensor dense_of(const py::object& value, const std::string& where) {
  const auto tensor = py::module_::import("torch").attr("as_tensor")(value).cast<at::Tensor>();
  require_dense(tensor, where, "tensor");
  return tensor;
}

}  // namespace emend::python
