#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/hparams/detail/preset_files.h>
#include <emend/hparams/preset.h>
#include <emend/hparams/schema.h>

#include <algorithm>

namespace emend::hparams {
namespace {

/// "meta-llama/Llama-2-7b_hf" -> {"meta", "llama", "llama", "2", "7b", "hf"}. A dot between digits stays: "3.1" is one
/// piece.
std::vector<std::string> pieces(std::string_view text) {
  const auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  return words_in(text, [&](size_t i) { return text[i] == '.' && i > 0 && digit(i - 1) && digit(i + 1); });
}

bool contains_pieces(const std::vector<std::string>& whole, const std::vector<std::string>& part) {
  return !part.empty() && std::search(whole.begin(), whole.end(), part.begin(), part.end()) != whole.end();
}

/// 0 if the model contradicts or says too little, else higher for better matches.
int score(const PresetModel& preset, const ModelHints& model) {
  const bool family_known = !preset.family.empty() && !model.family.empty();
  const bool layers_known = preset.layers > 0 && model.n_layers > 0;
  const bool hidden_known = preset.hidden > 0 && model.hidden > 0;
  if (family_known && preset.family != model.family) return 0;
  if (layers_known && preset.layers != model.n_layers) return 0;
  if (hidden_known && preset.hidden != model.hidden) return 0;
  if (preset.mlp > 0 && model.mlp > 0 && preset.mlp != model.mlp) return 0;
  size_t best = 0;
  for (const std::string& name : preset.names) {
    const auto wanted = pieces(name);
    for (const std::string& hint : model.names)
      if (contains_pieces(pieces(hint), wanted)) best = std::max(best, name.size());
  }
  if (best > 0) return 10 + static_cast<int>(best);
  return family_known && layers_known && hidden_known ? 1 : 0;
}

std::string text_of(const RawValue* value) {
  return value && value->kind == RawValue::Kind::kScalar ? value->text : "";
}

int64_t integer_of(const RawValue* value) {
  int64_t number = 0;
  if (value) (void)detail::read_value(*value, {}, number);
  return number;
}

PresetModel read_model(const RawValue& value) {
  PresetModel model;
  if (const RawValue* names = value.find("names"))
    for (const RawValue& name : names->items) model.names.push_back(text_of(&name));
  model.family = text_of(value.find("family"));
  model.layers = integer_of(value.find("layers"));
  model.hidden = integer_of(value.find("hidden"));
  model.mlp = integer_of(value.find("mlp"));
  return model;
}

// What `own` says, then what it leaves to `common`.
RawHparams read_values(const std::string& path, const RawValue& own, const RawValue* common) {
  RawHparams raw(path);
  const auto take = [&](const RawValue& map) {
    for (size_t i = 0; i < map.keys.size(); ++i)
      if (!raw.find(map.keys[i]))
        raw.add({map.keys[i], map.items[i], path + ":" + std::to_string(map.items[i].line), /*bundled=*/true});
  };
  take(own);
  if (common) take(*common);
  return raw;
}

// All presets of an editor: a map from "common" and from their names to values.
void read_editor(const detail::PresetFile& file, const RawValue& models, std::vector<Preset>& list) {
  const std::string editor(file.editor), path = "hparams/" + editor + ".yaml";
  const RawValue root = parse_yaml(file.text, {path, "preset"});
  for (size_t i = 0; i < root.keys.size(); ++i) {
    if (root.keys[i] == "common") continue;
    const RawValue* section = root.items[i].find("preset");
    EMEND_CHECK(section != nullptr, path + ": " + root.keys[i] + " has no preset: section");
    Preset preset{editor, root.keys[i], path, text_of(section->find("source")), {}, {}};
    preset.values = read_values(path, root.items[i], root.find("common"));
    if (!section->find("variant_of")) {
      const RawValue* model = models.find(preset.name);
      EMEND_CHECK(model != nullptr, path + ": hparams/models.yaml has no " + preset.name);
      preset.model = read_model(*model);
    }
    list.push_back(std::move(preset));
  }
}

}  // namespace

bool same_editor(std::string_view a, std::string_view b) {
  const auto plain = [](std::string_view name) {
    std::string text = lower(name);
    std::erase_if(text, [](char c) { return c == '-' || c == '_'; });
    return text;
  };
  return plain(a) == plain(b);
}

const std::vector<Preset>& all_presets() {
  static const std::vector<Preset> presets = [] {
    std::vector<Preset> list;
    const auto& files = detail::preset_files();
    const auto table = std::ranges::find(files, "models", &detail::PresetFile::editor);
    EMEND_CHECK(table != files.end(), "hparams/models.yaml is not built in");
    const RawValue models = parse_yaml(table->text, {"hparams/models.yaml", "model"});
    for (const auto& file : files)
      if (&file != &*table) read_editor(file, models, list);
    return list;
  }();
  return presets;
}

const Preset* find_preset(std::string_view editor, const ModelHints& model) {
  const Preset* best = nullptr;
  int best_score = 0;
  for (const Preset& preset : all_presets()) {
    if (!same_editor(preset.editor, editor)) continue;
    if (const int value = preset.model ? score(*preset.model, model) : 0; value > best_score) {
      best = &preset;
      best_score = value;
    }
  }
  return best;
}

const Preset* find_preset_by_name(std::string_view editor, std::string_view name) {
  if (const size_t slash = name.find('/'); slash != std::string_view::npos) {
    editor = name.substr(0, slash);
    name.remove_prefix(slash + 1);
  }
  for (const Preset& preset : all_presets())
    if (same_editor(preset.editor, editor) && preset.name == name) return &preset;
  return nullptr;
}

RawHparams load_file_or_preset(std::string_view editor, const std::string& file_or_name) {
  std::error_code failure;
  if (std::filesystem::is_regular_file(file_or_name, failure)) return load_hparams(file_or_name);
  if (const Preset* preset = find_preset_by_name(editor, file_or_name)) return preset->values;
  std::vector<std::string> names;
  for (const Preset& preset : all_presets())
    if (same_editor(preset.editor, editor)) names.push_back(preset.name);
  throw Error(ErrorClass::kNotFound,
              {setting("hparams", file_or_name), "neither a file nor a preset of " + std::string(editor),
               "a YAML or JSON file" + (names.empty() ? "" : ", or one of " + join(names)),
               did_you_mean(file_or_name, names, "check the path")});
}

}  // namespace emend::hparams
