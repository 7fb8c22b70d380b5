// An adapter folder that PEFT loads.
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

SaveFormat save_peft() {
  SaveFormat format{"peft", "adapter", "adapter", "adapter folder, for PEFT"};
  format.adapter = true;
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    auto layers = nlohmann::ordered_json::array();
    for (const auto& layer : editors::export_peft(request.out, request.pack, request.model, request.peft))
      layers.push_back({{"weight", layer.weight}, {"rank", layer.rank()}, {"relative_error", layer.error}});
    return {{"folder", request.out.string()}, {"layers", layers}};
  };
  return format;
}

}  // namespace emend::workflow
