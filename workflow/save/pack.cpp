// The change alone, in emend's own form.
#include <emend/core/staged.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

SaveFormat save_pack() {
  SaveFormat format{"pack", "edit.safetensors", "edit pack", "the change alone, for emend", true};
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    if (request.pack_file.empty() || request.pack_file == request.out)
      editors::save_pack(request.out, request.pack);
    else
      clone_file(request.pack_file, request.out);
    return {{"file", request.out.string()}};
  };
  return format;
}

}  // namespace emend::workflow
