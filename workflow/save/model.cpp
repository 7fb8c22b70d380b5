// A Hugging Face folder that transformers loads. Its ledger is that of the source
// with the new edit, so that any can be taken out again.
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/convert.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

// The folder before the edit.
static void write_base(const SaveRequest& request, const std::filesystem::path& folder) {
  const auto& checkpoint = request.model.checkpoint();
  if (const int64_t spare = checkpoint.spare_neurons(); spare > 0) {
    (void)models::convert_model(checkpoint.path().string(), folder, {.spare_neurons = spare});
    return;
  }
  if (checkpoint.format() == "huggingface") return editors::copy_model_folder(checkpoint.path(), folder);
  const auto swap = [edit = request.edited](void*) {
    if (edit) edit->swap();
  };
  swap(nullptr);
  const std::shared_ptr<void> edited_again(nullptr, swap);
  models::save_model(request.model, folder);
}

SaveFormat save_model() {
  SaveFormat format{"model", "model", "edited model", "the edited model, for transformers", true};
  format.whole = true;
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    auto pack = request.pack_file;
    const auto write = [&](const std::filesystem::path& folder) {
      write_base(request, folder);
      if (request.pack_file.empty()) editors::save_pack(pack = folder / "edit.pack", request.pack);
    };
    const auto change = [&](editors::Ledger& ledger) {
      ledger.apply({pack},
                   {.force = request.judged, .accepted_bases = {request.model.fingerprint()}, .allow_conflicts = true});
      if (request.pack_file.empty()) std::filesystem::remove(pack);
    };
    editors::write_edited_folder(request.out, write, change, /*replace=*/true, request.lent.log,
                                 request.model.checkpoint().path());
    nlohmann::ordered_json weights = nlohmann::ordered_json::array();
    for (const auto& delta : request.pack.deltas) weights.push_back(delta.weight);
    return {{"folder", request.out.string()}, {"changed", weights}};
  };
  return format;
}

}  // namespace emend::workflow
