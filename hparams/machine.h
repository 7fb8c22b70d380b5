// Machine settings that EasyEdit writes into hyper-parameter files. They say nothing about the edit, so no schema has
// them: but for the editor's name they are ignored, and one warning lists them and what to use instead.
#pragma once

#include <emend/hparams/raw.h>

#include <optional>

namespace emend::hparams {

/// What a file says of the machine.
struct MachineSettings {
  std::optional<std::string> alg_name;  ///< the editor that the file was written for
  std::vector<std::string> notes;       ///< a line for each key: "device: 0 ignored (use device_map)", …
};

/// True for keys that belong to the machine, not to the edit.
[[nodiscard]] bool is_machine_key(std::string_view key);
/// Reads them. Never throws for odd values: they are reported in notes and ignored.
[[nodiscard]] MachineSettings machine_settings(const RawHparams& raw);

}  // namespace emend::hparams
