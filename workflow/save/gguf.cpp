// A GGUF file in which only the edited tensors differ. They get eight bits where the base has fewer.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

// The original with what the pack changes of the weight, or nothing if that is none of its.
static std::optional<at::Tensor> edited(const SaveRequest& request, const std::string& name,
                                        const at::Tensor& original) {
  std::optional<at::Tensor> value;
  for (const auto& delta : request.pack.deltas)
    if (request.model.weight(delta.weight).data_ptr() == request.model.weight(name).data_ptr())
      value = value.value_or(original.to(at::kDouble)) + devices::to_host(delta.stored(), devices::Purpose::kDelta);
  if (value) value = value->to(at::kFloat);
  return value;
}

SaveFormat save_gguf() {
  SaveFormat format{"gguf", "model.gguf", "edited GGUF file", "the edited model, for llama.cpp"};
  format.whole = true;
  format.check = [](const models::Model& model, const std::string& option) {
    models::require_gguf_architecture(model.config().model_type, option + " gguf");
  };
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    if (request.edited && !request.pack.runtime.empty())
      throw Error(
          ErrorClass::kUnsupported,
          {setting("save"), "gguf, with a part of the edit beside the weights (" + request.pack.runtime_kinds() + ")",
           "pack or model", "emend loads such an edit with " + setting("pack")});
    if (!request.base.empty() && !editors::lineage_of(request.model.checkpoint().path()).edits.empty())
      refuse({setting("base"), "a file beside a model folder that holds edits, whose weights would be taken from it",
              "a model folder without edits in force",
              "leave " + setting("base") + " out, or merge the packs and export the result for the unedited model"});
    const auto scope = request.with_edit();
    models::GgufWriteOptions options;
    if (!request.type.empty()) options.type = models::parse_ggml_type(request.type);
    options.base = request.base;
    std::vector<std::string> left_out;
    options.edits = editors::edits_in_weights(request.model.checkpoint().path(), left_out);
    for (const auto& text : left_out) request.lent.log.warning("save.gguf", text);
    options.edits.push_back(editors::describe_edit(request.pack));
    options.exact = [&](const std::string& name, const at::Tensor& original) {
      return edited(request, name, original);
    };
    options.log = &request.lent.log;
    options.progress = request.lent.progress;
    const auto report = models::write_gguf(request.model, request.out, options);
    auto changed = nlohmann::ordered_json::array();
    const models::GgufWrittenTensor* worst = nullptr;
    for (const auto& tensor : report.tensors) {
      if (!tensor.changed) continue;
      if (!worst || tensor.error_of_change > worst->error_of_change) worst = &tensor;
      changed.push_back({{"tensor", tensor.name},
                         {"type", models::to_string(tensor.type)},
                         {"rounding_relative_to_edit", tensor.error_of_change}});
      if (tensor.error_of_change > 0.5)
        request.lent.log.warning("save.gguf", tensor.name + ": rounding to " +
                                                  std::string(models::to_string(tensor.type)) + " takes away " +
                                                  whole_percent(tensor.error_of_change) + " of the size of the edit");
    }
    if (worst && worst->error_of_change > 0)
      request.lent.log.info("save.gguf", "rounding takes at most " + whole_percent(worst->error_of_change) +
                                             " of the size of the edit (" + worst->name + ", " +
                                             std::string(models::to_string(worst->type)) + ")");
    return {{"file", request.out.string()}, {"bytes", report.bytes}, {"changed", changed}, {"notes", report.notes}};
  };
  return format;
}

}  // namespace emend::workflow
