// The table of editors. Adding one: editors/methods/<name>.cpp and a line in methods.def (docs/adding-an-editor.md).
#pragma once

#include <emend/editors/editor.h>
#include <emend/hparams/schema.h>

namespace emend::editors {

struct EditorInfo {
  std::string name;             ///< "memit"
  std::string summary;          ///< one line for lists and help
  std::string paper;            ///< citation
  bool batch = true;            ///< solves for many facts together; false: edit() goes through them one after the other
  bool changes_weights = true;  ///< false: the result lies beside the weights (RuntimePart)
  bool trains = false;          ///< follows gradients of what it changes, instead of solving for targets
  std::optional<RuntimeKind> runtime;  ///< how the parts of such an editor come to life
  std::string compute_dtype;           ///< EditChoices::compute_dtype where none is chosen
  bool copies_model = false;           ///< reads all of a small model in that arithmetic (models::writing_dtype)
  /// True if it changes biases or norms of this model with these effective values, for which adapters have no place;
  /// empty: matrices alone.
  std::function<bool(const models::Model&, const nlohmann::json& hparams)> changes_vectors;
  /// Optimises a target for each fact, then solves for the change of each layer.
  [[nodiscard]] bool solves() const { return changes_weights && !trains; }
  /// Changes nothing in the model: it speaks through the prompt, so there is nothing to take back.
  [[nodiscard]] bool prompts() const { return !changes_weights && !trains; }
  /// Neurons of its own that it takes, a layer, for these facts; empty: it takes none.
  std::function<std::map<int, int64_t>(const nlohmann::json& hparams, std::span<const datasets::Fact>, size_t batch)>
      neurons;
  /// Whether it needs second moments of keys with these effective values.
  [[nodiscard]] bool reads_moments(const nlohmann::json& hparams) const {
    return solves() && !neurons && hparams.value("mom2_adjustment", true);
  }
  std::function<std::vector<hparams::FieldInfo>()> fields;
  /// Effective values of a file, without a model.
  std::function<nlohmann::json(const hparams::RawHparams&, const Log&)> effective;
  /// Throws Error(kInvalidArgument) with file:line if the values do not fit the editor or the model.
  std::function<std::unique_ptr<Editor>(const hparams::RawHparams&, const models::Model&, const Log&)> make;
};

/// In the order of methods.def.
[[nodiscard]] const std::vector<EditorInfo>& all_editors();
/// Names are matched without case, "_" and "-" ("R_ROME" finds r-rome). Throws Error(kInvalidArgument) with the
/// closest name and the list.
[[nodiscard]] const EditorInfo& find_editor(std::string_view name);
/// Adds an editor of a program's own, to be found by name like any other; said in its main(), as static libraries drop
/// objects that register themselves. To be called before the table is used: references that all_editors() or
/// find_editor() gave earlier are no longer valid, and no other thread may use the table meanwhile. Throws
/// Error(kInvalidArgument) if the name is taken or empty, or the entry lacks `make`.
void register_editor(EditorInfo info);
[[nodiscard]] std::unique_ptr<Editor> make_editor(std::string_view name, const hparams::RawHparams& raw,
                                                  const models::Model& model, const Log& log = {});

/// What an editor is made from beside its hyper-parameters.
struct RecipeInputs {
  const std::string& editor;
  nlohmann::json values;  ///< the effective ones, for the record
  const models::Model& model;
  const hparams::RawHparams& raw;  ///< the file, for messages
  const Log& log;
};

/// An editor that keeps its name and its effective hyper-parameters as they are given.
class NamedEditor : public Editor {
 public:
  explicit NamedEditor(const RecipeInputs& in) : name_(in.editor), values_(in.values) {}
  [[nodiscard]] const std::string& name() const final { return name_; }
  [[nodiscard]] nlohmann::json hparams() const final { return values_; }

 private:
  std::string name_;
  nlohmann::json values_;
};

/// Builds the entry of an editor from its schema; `make` is called with parsed values and what goes with them.
template <class H>
[[nodiscard]] EditorInfo editor_entry(
    std::string name, std::string summary, std::string paper, const hparams::Schema<H>& schema,
    std::type_identity_t<std::function<std::unique_ptr<Editor>(const H&, const RecipeInputs&)>> make) {
  EditorInfo info;
  info.name = name;
  info.summary = std::move(summary);
  info.paper = std::move(paper);
  const hparams::Schema<H>* fields = &schema;  // schemas are function-local statics: they outlive the table
  info.fields = [fields] { return fields->fields(); };
  info.effective = [fields](const hparams::RawHparams& raw, const Log& log) {
    return fields->dump(fields->parse(raw, log));
  };
  info.make = [fields, name = std::move(name), make = std::move(make)](const hparams::RawHparams& raw,
                                                                       const models::Model& model, const Log& log) {
    const H h = fields->parse(raw, log);
    return make(h, {name, fields->dump(h), model, raw, log});
  };
  return info;
}
/// The same of an editor E that trains what it changes.
template <class E, class H>
[[nodiscard]] EditorInfo training_entry(std::string name, std::string summary, std::string paper,
                                        const hparams::Schema<H>& schema) {
  EditorInfo info = editor_entry(std::move(name), std::move(summary), std::move(paper), schema,
                                 [](const H& h, const RecipeInputs& in) { return std::make_unique<E>(h, in); });
  info.trains = true;
  return info;
}

}  // namespace emend::editors
