#include <emend/core/error.h>
#include <emend/hparams/detail/preset_files.h>
#include <emend/hparams/preset.h>
#include <emend/hparams/schema.h>

#include <algorithm>
#include <filesystem>

namespace emend::hparams {

namespace {

/// "meta-llama/Llama-2-7b_hf" -> {"meta", "llama", "llama", "2", "7b", "hf"}. A dot between digits stays: "3.1" is one
/// piece.
std::vector<std::string> pieces(std::string_view text) {
  std::vector<std::string> result(1);
  const auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool inner_dot = c == '.' && i > 0 && digit(i - 1) && digit(i + 1);
    if (std::isalnum(c) || c >= 0x80 || inner_dot) {
      result.back() += static_cast<char>(std::tolower(c));
    } else if (!result.back().empty()) {
      result.emplace_back();
    }
  }
  if (result.back().empty()) result.pop_back();
  return result;
}

/// memit-seq, memit_seq and MEMIT_seq are one editor.
bool same_editor(std::string_view a, std::string_view b) {
  const auto plain = [](std::string_view name) {
    std::string text;
    for (const char c : name)
      if (c != '-' && c != '_') text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text;
  };
  return plain(a) == plain(b);
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

Preset read_preset(const detail::PresetFile& file) {
  Preset preset;
  const std::string path(file.path);
  preset.editor = path.substr(0, path.find('/'));
  preset.name = std::filesystem::path(path).stem().string();
  preset.path = "hparams/" + path;
  preset.text = file.text;
  const RawHparams raw = parse_hparams(file.text, preset.path);
  const RawEntry* section = raw.find("preset");
  EMEND_CHECK(section != nullptr, preset.path + " has no preset: section");
  preset.source = text_of(section->value.find("source"));
  if (const RawValue* models = section->value.find("models"))
    for (const RawValue& item : models->items) {
      PresetModel model;
      if (const RawValue* names = item.find("names"))
        for (const RawValue& name : names->items) model.names.push_back(text_of(&name));
      model.family = text_of(item.find("family"));
      model.layers = integer_of(item.find("layers"));
      model.hidden = integer_of(item.find("hidden"));
      model.mlp = integer_of(item.find("mlp"));
      preset.models.push_back(std::move(model));
    }
  return preset;
}

}  // namespace

const std::vector<Preset>& all_presets() {
  static const std::vector<Preset> presets = [] {
    std::vector<Preset> list;
    for (const auto& file : detail::preset_files()) list.push_back(read_preset(file));
    return list;
  }();
  return presets;
}

const Preset* find_preset(std::string_view editor, const ModelHints& model) {
  const Preset* best = nullptr;
  int best_score = 0;
  for (const Preset& preset : all_presets()) {
    if (!same_editor(preset.editor, editor)) continue;
    for (const PresetModel& candidate : preset.models)
      if (const int value = score(candidate, model); value > best_score) {
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

RawHparams load_preset(const Preset& preset) {
  return parse_hparams(preset.text, preset.path);
}

RawHparams load_file_or_preset(std::string_view editor, const std::string& file_or_name) {
  std::error_code failure;
  if (std::filesystem::is_regular_file(file_or_name, failure)) return load_hparams(file_or_name);
  if (const Preset* preset = find_preset_by_name(editor, file_or_name)) return load_preset(*preset);
  std::vector<std::string> names;
  std::string list;
  for (const Preset& preset : all_presets())
    if (same_editor(preset.editor, editor)) {
      names.push_back(preset.name);
      list += (list.empty() ? "" : ", ") + preset.name;
    }
  const std::string closest = closest_name(file_or_name, names);
  throw Error(ErrorClass::kNotFound,
              {"--hparams " + file_or_name, "neither a file nor a preset of " + std::string(editor),
               "a YAML or JSON file" + (list.empty() ? std::string() : ", or one of " + list),
               closest.empty() ? "check the path" : "did you mean \"" + closest + "\"?"});
}

}  // namespace emend::hparams
