#include <emend/core/text.h>
#include <emend/editors/registry.h>
#include <emend/hparams/preset.h>

namespace emend::editors {

#define EMEND_EDITOR(file, factory) EditorInfo factory();
#include <emend/editors/methods.def>
#undef EMEND_EDITOR

namespace {

std::vector<EditorInfo>& table() {
  static std::vector<EditorInfo> editors = {
#define EMEND_EDITOR(file, factory) factory(),
#include <emend/editors/methods.def>
#undef EMEND_EDITOR
  };
  return editors;
}

}  // namespace

const std::vector<EditorInfo>& all_editors() {
  return table();
}

void register_editor(EditorInfo info) {
  if (info.name.empty() || !info.make)
    refuse({"register_editor", info.name.empty() ? "an editor without a name" : info.name + " has no make()",
            "a name and a function that makes the editor", "build the entry with editor_entry()"});
  for (const auto& editor : table())
    if (hparams::same_editor(editor.name, info.name))
      refuse({"register_editor", "there is an editor \"" + editor.name + "\" already", "a new name", ""});
  table().push_back(std::move(info));
}

const EditorInfo& find_editor(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& editor : all_editors()) {
    if (hparams::same_editor(editor.name, name)) return editor;
    names.push_back(editor.name);
  }
  refuse({"editor", "unknown editor \"" + std::string(name) + "\"", "one of " + join(names),
          did_you_mean(lower(name), names)});
}

std::unique_ptr<Editor> make_editor(std::string_view name, const hparams::RawHparams& raw, const models::Model& model,
                                    const Log& log) {
  return find_editor(name).make(raw, model, log);
}

}  // namespace emend::editors
