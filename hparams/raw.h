// Hyper-parameters as they stand in a file: an ordered list of keys with values and their file:line, not yet typed.
//
// Two notations are read: YAML (EasyEdit's files, our presets) and JSON (the MEMIT repository's files). The schema of
// an editor (hparams/schema.h) turns the result into a typed struct.
//
// Reading is safe for hostile files: at most 256 KiB, 64 levels, no anchors or aliases, no duplicate keys.
#pragma once

#include <emend/core/yaml.h>

#include <filesystem>

namespace emend::hparams {

/// A value as it is spelled: only the field knows whether 5e-1 is a number.
using RawValue = YamlValue;

struct RawEntry {
  std::string key;
  RawValue value;
  std::string where;     ///< "hparams/memit/foo.yaml:12" or "set v_lr=0.1" (setting())
  bool bundled = false;  ///< of a preset that emend has with it
};

/// Ordered key -> value. Keys are unique.
class RawHparams {
 public:
  RawHparams() = default;
  explicit RawHparams(std::string source) : source_(std::move(source)) {}

  /// "KEY=VALUE" as given to --set; VALUE is read as YAML and replaces an earlier one. Throws Error(kInvalidArgument).
  void set(std::string_view assignment);
  /// Adds an entry. Throws Error(kInvalidArgument) if the key exists.
  void add(RawEntry entry);

  [[nodiscard]] const std::vector<RawEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const RawEntry* find(std::string_view key) const;  ///< null if there is none
  /// "file:line" of a key; the file's name if the key is absent. For errors after parsing (a layer the model lacks).
  [[nodiscard]] std::string where(std::string_view key) const;
  [[nodiscard]] const std::string& source() const noexcept { return source_; }

 private:
  std::string source_;
  std::vector<RawEntry> entries_;
};

/// Reads a file; JSON if its first character is '{', else YAML. Throws Error(kNotFound, kIo) for the file,
/// Error(kInvalidArgument) with file:line for text that is not a map of hyper-parameters.
[[nodiscard]] RawHparams load_hparams(const std::filesystem::path& path);
/// The same from text; `source` stands for the file in messages.
[[nodiscard]] RawHparams parse_hparams(std::string_view text, const std::string& source);

}  // namespace emend::hparams
