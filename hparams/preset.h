// Presets: published and measured hyper-parameters for an editor and a model. The YAML files hparams/<editor>.yaml are
// compiled into the library, so that they are found from the build tree and from an installed prefix alike.
//
// A preset states algorithm facts only (no devices, dtypes or sizes of a run's batches):
//   common:                        # what these presets say unless they say otherwise
//     v_lr: 0.5
//   gpt2-xl:                       # the model, an entry of hparams/models.yaml, which says how it is recognised
//     preset: {source: "where the figures come from"}
//     layers: [17]
//   gpt2-xl-easyedit:              # another one for that model, found by name only
//     preset: {source: "EasyEdit", variant_of: gpt2-xl}
#pragma once

#include <emend/hparams/raw.h>

#include <optional>

namespace emend::hparams {

/// One entry of hparams/models.yaml.
struct PresetModel {
  std::vector<std::string> names;  ///< "gpt2-xl", compared piece by piece with the model's names
  std::string family;
  int64_t layers = 0, hidden = 0, mlp = 0;  ///< blocks, model width, MLP width; 0: not said
};

struct Preset {
  std::string editor;  ///< "memit"
  std::string name;    ///< "gpt2-xl"; "gpt2-xl-easyedit" is a variant of it
  std::string path;    ///< "hparams/memit.yaml", for messages
  std::string source;
  std::optional<PresetModel> model;  ///< none for variants, which are only found by name
  RawHparams values;                 ///< its own and the common ones, as load_hparams would give them
};

/// What is known of the model at hand. Empty and 0 mean unknown.
struct ModelHints {
  std::vector<std::string> names;  ///< path, folder name, ORG/NAME, _name_or_path of config.json
  std::string family;              ///< "gpt2", "llama", …
  int64_t n_layers = 0, hidden = 0, mlp = 0;
};

/// memit-seq, memit_seq and MEMIT_seq are one editor.
[[nodiscard]] bool same_editor(std::string_view a, std::string_view b);

/// All presets, ordered by editor and name. Editors that this build does not have are listed too.
[[nodiscard]] const std::vector<Preset>& all_presets();

/// The preset that fits best, or nullptr. A preset fits if its `model` agrees with every structural hint that both
/// state and either a name matches or family, layers and hidden size are all known and equal. A name matches if it
/// occurs in a hint as whole pieces ("gpt2-xl" in "models/gpt2-xl", not in "gpt2-xl2"); case and "-_ /" do not matter.
/// Names win over structure, longer names over shorter ones. `editor` is compared without regard to case, "-" and "_".
[[nodiscard]] const Preset* find_preset(std::string_view editor, const ModelHints& model);

/// By editor and name ("memit", "gpt2-xl-easyedit"); "memit/gpt2-xl" as name overrides `editor`. nullptr if there is
/// none.
[[nodiscard]] const Preset* find_preset_by_name(std::string_view editor, std::string_view name);

/// What --hparams takes: an existing file, else a preset's name. Throws Error(kNotFound) listing presets of the editor.
[[nodiscard]] RawHparams load_file_or_preset(std::string_view editor, const std::string& file_or_name);

}  // namespace emend::hparams
