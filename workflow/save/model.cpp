// A Hugging Face folder that transformers loads. A run's has a ledger, so that the edit can be taken out of it again.
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {
namespace {

// The unedited folder, into which the ledger then puts the pack.
void write_base(const SaveRequest& request) {
  if (std::filesystem::exists(request.out)) std::filesystem::remove_all(request.out);  // left by an interrupted run
  if (request.model.checkpoint().format() == "huggingface")
    return editors::Ledger::copy_model_folder(request.model.checkpoint().path(), request.out);
  struct Unedited {
    explicit Unedited(editors::EditTransaction& edit) : edit(edit) { edit.swap(); }
    ~Unedited() { edit.swap(); }
    editors::EditTransaction& edit;
  } const unedited(*request.edited);
  models::save_model(request.model, request.out);
}

}  // namespace

SaveFormat save_model() {
  SaveFormat format{"model", "model", "edited model", "the edited model, for transformers", true};
  format.write = [](const SaveRequest& request) -> nlohmann::ordered_json {
    if (!request.edited) {
      const auto scope = request.with_edit();
      return {{"folder", request.out.string()}, {"changed", models::save_model(request.model, request.out)}};
    }
    write_base(request);
    editors::Ledger(request.out).apply(request.pack_file, {.accepted_bases = {request.model.fingerprint()}});
    return {{"folder", request.out.string()}};
  };
  return format;
}

}  // namespace emend::workflow
