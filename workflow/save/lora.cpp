// An adapter in a GGUF file, for llama.cpp.
#include <emend/models/config.h>
#include <emend/models/gguf/gguf_lora.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

SaveFormat save_lora() {
  SaveFormat format{"lora", "lora.gguf", "GGUF adapter", "GGUF adapter, for llama.cpp"};
  format.adapter = true;
  format.check = [](const models::Model& model, const std::string& option) {
    models::require_gguf_architecture(model.config().model_type, option + " lora");
  };
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    std::vector<models::LoraFactors> factors;
    for (const auto& one : editors::adapter_factors(request.pack, request.peft))
      factors.push_back({one.weight, one.a_RI, one.b_OR});
    return {{"file", request.out.string()}, {"tensors", models::write_gguf_lora(request.model, factors, request.out)}};
  };
  return format;
}

}  // namespace emend::workflow
