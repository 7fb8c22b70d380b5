// YAML and JSON files that people write by hand, read so that every message can name a line.
//
// Goals: safe for hostile text (at most 64 levels, no anchors, aliases or tags, no key twice, one document); scalars
// keep their spelling, as only their users know whether 5e-1 is a number. Non-goal: large documents (json.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace emend {

/// A value of YAML or JSON.
struct YamlValue {
  enum class Kind { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  std::string text;               ///< scalar text
  bool quoted = false;            ///< written as a string (quotes, block scalar)
  bool json = false;              ///< from JSON, where types are explicit
  std::vector<YamlValue> items;   ///< sequence items or map values
  std::vector<std::string> keys;  ///< map keys, parallel to items
  int line = 0;                   ///< of the key, for map values

  /// The value of a map key, or nullptr.
  [[nodiscard]] const YamlValue* find(std::string_view key) const;
  /// Short text for messages: 0.5, "abc", [4, 5], {…}; long values are cut.
  [[nodiscard]] std::string show() const;
};

/// Names for messages.
struct YamlNames {
  std::string where;  ///< the file
  std::string thing;  ///< what a key stands for: "hyper-parameter"
  bool lines = true;  ///< messages name the line; not for one value of a command line, which is always YAML
};

/// Reads one document: JSON if its first character is '{', else YAML. Throws Error(kInvalidArgument) "WHERE:LINE: …".
[[nodiscard]] YamlValue parse_yaml(std::string_view text, const YamlNames& names);

}  // namespace emend
