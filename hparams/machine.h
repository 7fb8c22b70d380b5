// Machine settings that EasyEdit writes into hyper-parameter files. They say nothing about the edit, so no schema has
// them: each is ignored or turned into a suggestion for the command line, and one warning lists them.
#pragma once

#include <emend/hparams/raw.h>

#include <cstdint>
#include <optional>

namespace emend::hparams {

/// What a file suggests; absent where it is silent. A program uses these only where the user gave no option.
struct MachineSettings {
  std::optional<std::string> device_map;  ///< model_parallel: true -> "auto"
  std::optional<std::string> dtype;       ///< fp16/bf16: true -> "bfloat16" (float16 is not offered)
  std::optional<int64_t> batch_size;      ///< facts per batch
  std::optional<std::string> model;       ///< model_name
  std::optional<std::string> alg_name;    ///< the editor that the file was written for
  std::vector<std::string> notes;         ///< a line for each key: "device: 0 ignored (use device_map)", …
};

/// True for keys that belong to the machine, not to the edit.
[[nodiscard]] bool is_machine_key(std::string_view key);
/// Reads them. Never throws for odd values: they are reported in notes and left out.
[[nodiscard]] MachineSettings machine_settings(const RawHparams& raw);

}  // namespace emend::hparams
