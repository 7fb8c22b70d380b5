#include <ATen/core/grad_mode.h>
#include <emend/core/safetensors.h>
#include <emend/core/text.h>
#include <emend/devices/placement.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/generation.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/card.h>
#include <emend/workflow/packs.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>

#include "bindings.h"

namespace emend::python {
namespace {

using models::Model;

// A text, or a dict as Model.device_map gives it.
std::string device_map_text(const py::object& map) {
  if (py::isinstance<py::dict>(map)) return to_json(map, "device_map").dump();
  return path_text(map, "device_map", "a text, a path, or a dict of module names and devices");
}

// {0: "10GiB", "cpu": "30GiB"} as "0=10GiB,cpu=30GiB".
std::string max_memory_text(const py::object& limits) {
  if (limits.is_none()) return "";
  if (!py::isinstance<py::dict>(limits))
    return taken<std::string>(limits, "max_memory",
                              "None, a text, or a dict such as {0: \"10GiB\", \"cpu\": \"30GiB\"}");
  std::string text;
  for (const auto& [device, size] : py::reinterpret_borrow<py::dict>(limits))
    append_item(text, taken<std::string>(py::str("{}={}").format(device, size), "max_memory", "devices and sizes"),
                ",");
  return text;
}

std::shared_ptr<Model> load(const py::object& named, const py::object& device_map, const py::object& max_memory,
                            const py::object& dtype) {
  const models::PlaceOptions options{device_map_text(device_map), max_memory_text(max_memory), dtype_of(dtype),
                                     warnings()};
  const auto path = path_text(named, "path");
  const py::gil_scoped_release unlocked;
  const PlainTensors plain;
  auto held = std::make_shared<HeldModel>(models::load_placed(path, options));
  workflow::warn_of_edits_beside(held->checkpoint(), "load.beside", options.log);
  return held;
}

at::Tensor weight(const Model& model, const std::string& name) {
  if (model.has_weight(name)) return model.weight(name);
  const auto distance = [&](const std::string& other) { return edit_distance(name, other); };
  throw Error(ErrorClass::kNotFound,
              {"weight", "no weight \"" + name + "\"", "a name of Model.parameters()",
               "did you mean \"" + *std::ranges::min_element(model.weight_names(), {}, distance) + "\"?"});
}

void set_weight(Model& model, const std::string& name, const at::Tensor& value) {
  if (const at::Tensor old = weight(model, name); value.sizes() != old.sizes())
    refuse({"value of \"" + name + "\"", "the shape " + shape_text(value.sizes()), shape_text(old.sizes()), ""});
  require_dense(value, "value of \"" + name + "\"", "value");
  unlocked([&] { model.set_weight(name, value); });
}

std::string decode(const Model& model, const std::vector<int64_t>& ids, bool skip_special) {
  const int64_t known = std::max(model.vocab_size(), model.tokenizer().vocab_size());
  for (const int64_t id : ids)
    if (id < 0 || id >= known)
      refuse({"decode", "token id " + std::to_string(id), "0 to " + std::to_string(known - 1), ""});
  return model.tokenizer().decode(ids, skip_special);
}

py::dict parameters(const Model& model) {
  py::dict dict;
  for (const auto& name : model.weight_names()) dict[py::str(name)] = model.weight(name);
  return dict;
}

models::ForwardResult forward(const Model& model, const py::object& inputs,
                              const std::optional<std::vector<int64_t>>& logit_tokens, int end_layer) {
  const auto batch = models::TokenBatch::from_rows(rows_of(model, prompts_of(inputs)));
  models::ForwardOptions options;
  options.logit_tokens = logit_tokens;
  options.end_layer = end_layer;
  const py::gil_scoped_release unlocked;
  return model.forward(batch, options);
}

at::Tensor logits(const Model& model, const py::object& inputs) {
  const auto batch = models::TokenBatch::from_rows(rows_of(model, prompts_of(inputs)));
  return unlocked([&] { return batch.unpack(model.forward(batch).needed_logits()); });
}

std::vector<std::string> generate(const Model& model, const py::object& prompts, int64_t max_new_tokens,
                                  double temperature, int64_t top_k, double top_p, uint64_t seed) {
  const auto rows = rows_of(model, prompts_of(prompts));
  for (const auto& row : rows) models::require_room(model, row, "prompts");
  models::GenerateOptions options;
  options.max_new_tokens = max_new_tokens;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.seed = seed;
  options.stop_ids = model.tokenizer().eos_ids();
  if (rows.size() == 1)  // several are shared out over the cores, whose threads see no signals
    options.ends = [](int64_t, int64_t) {
      check_signals();
      return false;
    };
  const py::gil_scoped_release unlocked;
  const at::NoGradGuard no_gradients;
  std::vector<std::string> texts;
  for (const auto& ids : models::generate(model, rows, options))
    texts.push_back(model.tokenizer().decode_more(ids, /*skip_special=*/true));
  return texts;
}

}  // namespace

void bind_models(py::module_& module) {
  py::class_<models::ForwardResult>(module, "ForwardResult", "What a forward pass gives back.")
      .def_readonly(
          "hidden", &models::ForwardResult::hidden,
          "[tokens, width]: output of the last layer that ran, before the final norm; None if a hook ended the pass")
      .def_readonly("logits", &models::ForwardResult::logits, "[projected tokens, vocabulary], or None")
      .def_readonly("stopped", &models::ForwardResult::stopped, "True if a hook ended the pass")
      .def("__repr__", [](const models::ForwardResult& self) {
        return "<emend.ForwardResult: hidden " + (self.hidden.defined() ? shape_text(self.hidden.sizes()) : "None") +
               (self.logits.defined() ? ", logits " + shape_text(self.logits.sizes()) : "") +
               (self.stopped ? ", stopped>" : ">");
      });

  py::class_<Model, std::shared_ptr<Model>>(module, "Model", "A decoder-only language model spread over devices.")
      .def_property_readonly("family", [](const Model& model) { return model.family().name; })
      .def_property_readonly(
          "config", [](const Model& model) { return to_python(model.checkpoint().config()); },
          "config.json as a dictionary; a GGUF file's metadata under the same names")
      .def_property_readonly("n_layers", &Model::n_layers)
      .def_property_readonly("hidden_size", &Model::hidden_size)
      .def_property_readonly("vocab_size", &Model::vocab_size)
      .def_property_readonly("parameter_count", &Model::parameter_count)
      .def_property_readonly(
          "device_map",
          [](const Model& model) {
            const auto names = models::device_module_names(model.family(), model.config());
            return to_python(nlohmann::json(model.placement().to_json(names)));
          },
          "which device holds which part, as Hugging Face's hf_device_map")
      .def("parameters", &parameters,
           "Every weight by its name in the checkpoint. The tensors share memory with the model: an in-place change "
           "is a change of the model.")
      .def("weight", &weight, py::arg("name"), "One weight; shares memory with the model.")
      .def("set_weight", &set_weight, py::arg("name"), py::arg("value"),
           "Replaces a weight by a tensor of the same shape on the same device.")
      .def("forward", &forward, py::arg("inputs"), py::arg("logit_tokens") = py::none(), py::arg("end_layer") = -1,
           "Runs a text, texts, or rows of token ids. Tensors are packed: the tokens of all rows one after the other. "
           "Gradients follow torch's grad mode.")
      .def("logits", &logits, py::arg("inputs"),
           "[rows, longest row, vocabulary]; zeros where a row is shorter than the longest.")
      .def("generate", &generate, py::arg("prompts"), py::kw_only(), py::arg("max_new_tokens") = 64,
           py::arg("temperature") = 0.0, py::arg("top_k") = 0, py::arg("top_p") = 1.0, py::arg("seed") = 0,
           "Continues every prompt; returns the new text of each. Greedy at temperature 0.")
      .def(
          "encode",
          [](const Model& model, const std::string& text, bool add_special) {
            return model.tokenizer().encode_ids(text, add_special);
          },
          py::arg("text"), py::arg("add_special") = true, "Token ids of a text.")
      .def("decode", &decode, py::arg("ids"), py::arg("skip_special") = false, "Text of token ids.")
      .def(
          "edit_site",
          [](const Model& model, int layer) {
            const auto site = model.edit_site(layer);
            return to_python({{"layer", site.layer},
                              {"weight", site.weight_name},
                              {"in_features", site.in_features},
                              {"out_features", site.out_features}});
          },
          py::arg("layer"), "The matrix that locate-then-edit methods rewrite in a layer.")
      .def(
          "fingerprint", [](const Model& model) { return unlocked([&] { return model.fingerprint(); }); },
          "sha256 of the checkpoint: what packs name as their base.")
      .def(
          "current_fingerprint",
          [](const Model& model) { return unlocked([&] { return model.current_fingerprint(); }); },
          "sha256 of the weights as they are now; to be compared with an earlier one.")
      .def(
          "save",
          [](const Model& model, const std::filesystem::path& path) {
            if (!model.hooks().idle())
              warnings().warning("save.beside",
                                 "something is attached beside the weights (hooks, or the part of an edit): it is not "
                                 "in what is saved; Session.save(path, \"model\") keeps an edit's part");
            const py::gil_scoped_release unlocked;
            const bool gguf = path.extension() == ".gguf";
            workflow::require_own_kind(workflow::save_format(gguf ? "gguf" : "model"), path);
            std::vector<std::string> changed;
            if (gguf)
              models::write_gguf(model, path, {});
            else
              changed = models::save_model(model, path);
            workflow::remove_card(path, {});
            return changed;
          },
          py::arg("path"),
          "Writes a Hugging Face folder, or a GGUF file if the name ends in .gguf. Returns the names of the changed "
          "weights (folders).")
      .def("__repr__", [](const Model& model) {
        return "<emend.Model " + model.family().name + ", " + std::to_string(model.n_layers()) + " layers, width " +
               std::to_string(model.hidden_size()) + ", " + std::to_string(model.parameter_count()) + " parameters>";
      });

  module.def("load", &load, py::arg("path"), py::kw_only(), py::arg("device_map") = "auto", py::arg("max_memory") = "",
             py::arg("dtype") = "float32",
             "Loads a model: a Hugging Face folder, a .gguf file, or ORG/NAME in the Hugging Face cache.\n\n"
             "device_map: cpu, auto, balanced, sequential, cuda:0, sim:K (K simulated devices), a JSON/YAML file, or a "
             "dict as Model.device_map gives it.\n"
             "max_memory: such as \"0=10GiB,cpu=30GiB\" or {0: \"10GiB\", \"cpu\": \"30GiB\"}; None: what is free.\n"
             "dtype: float32, bfloat16 or float64, as text or torch.dtype.");
}

}  // namespace emend::python
