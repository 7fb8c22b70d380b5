#include <emend/core/setting.h>
#include <emend/hparams/machine.h>
#include <emend/hparams/schema.h>

#include <algorithm>
#include <array>

namespace emend::hparams {
namespace {

/// Where a machine setting goes instead.
struct MachineKey {
  std::string_view name;
  std::string_view instead;
  std::string_view setting = {};  // ends `instead`
};

constexpr std::array kMachineKeys{
    MachineKey{"alg_name", ""},
    MachineKey{"model_name", "give ", "model"},
    MachineKey{"model_class", "the model's config.json says what it is"},
    MachineKey{"tokenizer_class", "the model's own tokenizer is used"},
    MachineKey{"tokenizer_name", "the model's own tokenizer is used"},
    MachineKey{"cache_dir", "give ", "model"},
    MachineKey{"device", "use ", "device_map"},
    MachineKey{"enable_thinking", "prompts are no turns of a chat"},
    MachineKey{"model_parallel", "use ", "device_map"},
    MachineKey{"fp16", "use ", "dtype"},
    MachineKey{"bf16", "use ", "dtype"},
    MachineKey{"half", "use ", "dtype"},
    MachineKey{"stats_dir", "use ", "stats_cache"},
    MachineKey{"P_loc", "the projector is made from the statistics"},
    MachineKey{"batch_size", "use ", "batch_size"},
    MachineKey{"max_length", "prompts are never cut"},
    MachineKey{"results_dir", "use ", "out"},
    MachineKey{"silent", "use ", "quiet"},
    MachineKey{"archive", "edits are kept as packs"},
    MachineKey{"sequential_edit", "use ", "batch_size"},
    MachineKey{"keep_original_weight", "edits stay; revert them with emend revert"},
    MachineKey{"use_chat_template", "prompts are used as they are"},
    MachineKey{"evaluation_type", "use ", "eval"},
    MachineKey{"api_key", ""},
};

const MachineKey* find_key(std::string_view key) {
  const auto* found = std::ranges::find(kMachineKeys, key, &MachineKey::name);
  return found == kMachineKeys.end() ? nullptr : found;
}

}  // namespace

bool is_machine_key(std::string_view key) {
  return find_key(key) != nullptr;
}

MachineSettings machine_settings(const RawHparams& raw) {
  MachineSettings settings;
  for (const RawEntry& entry : raw.entries()) {
    const MachineKey* key = find_key(entry.key);
    if (!key) continue;
    const bool editor = key->name == "alg_name";
    if (std::string name; editor && detail::read_value(entry.value, {}, name).empty()) settings.alg_name = name;
    const std::string shown = entry.key == "api_key" ? "(not shown)" : entry.value.show();
    std::string note = entry.key + ": " + shown + (editor && settings.alg_name ? " names the editor" : " ignored");
    if (!key->instead.empty())
      note += " (" + std::string(key->instead) + (key->setting.empty() ? "" : setting(key->setting)) + ")";
    settings.notes.push_back(std::move(note));
  }
  return settings;
}

}  // namespace emend::hparams
