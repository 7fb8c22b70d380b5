// The edit packs of a server: NAME.safetensors in one folder, and which of them are in force.
//
// Goals: what is on disk is always one whole state. state.json is written to a temporary and renamed, a pack's file
// before the state that names it, so that after a crash the packs in force are those from before or from after.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/core/log.h>
#include <emend/editors/packs/pack.h>
#include <emend/workflow/packs.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace emend::tools::serve {

struct ServedPack {
  std::string name;
  std::shared_ptr<const editors::EditPack> pack;        ///< at this strength
  std::shared_ptr<const editors::EditPack> whole = {};  ///< at strength 1, where `pack` is at another
  double strength = 1;
};
/// In the order in which they are applied.
using PackSet = std::vector<ServedPack>;
/// Equal for sets with the same packs in the same order.
[[nodiscard]] std::string key_of(const PackSet& packs);

/// A set in a model, as long as it lives.
struct InForce : workflow::PackScope {
  InForce(models::Model& model, const PackSet& packs);
  const std::string key;
};

/// Letters, digits, "-", "_" and ".", not first; at most 64. Throws HttpError 400.
void require_pack_name(const std::string& name);

/// May be used by several threads at once.
class PackFolder {
 public:
  /// Reads what is there; a pack that is damaged or does not fit the model, which must outlive this, is left out with a
  /// warning. Throws Error(kInvalidArgument) if another server has the folder, Error(kCorruption) for a state.json that
  /// no server can have written.
  PackFolder(std::filesystem::path folder, const models::Model& model, const Log& log);

  [[nodiscard]] PackSet in_force() const;
  /// Throws HttpError 404 for a name that is none, 400 for one given twice, and Error(kInvalidArgument) if they do not
  /// go together.
  [[nodiscard]] PackSet named(const std::vector<std::string>& names) const;
  [[nodiscard]] nlohmann::ordered_json list() const;
  [[nodiscard]] nlohmann::ordered_json describe(const std::string& name) const;
  [[nodiscard]] std::vector<std::string> names() const;
  /// Whether a new pack cannot have this name: there is one, or a file that was left out.
  [[nodiscard]] bool taken(const std::string& name) const;

  /// Takes over the file of a new pack. Throws HttpError 409 for a name that is taken, and what load_pack throws.
  void add(const std::string& name, const std::filesystem::path& file);
  struct Change {
    std::optional<bool> active = {};      ///< put in force, last or at `position`, or taken out of force
    std::optional<size_t> position = {};  ///< only beside active: true
    std::optional<double> strength = {};  ///< how strongly a pack of directions (emend direct) acts from now on
  };
  /// All of it or nothing. Throws HttpError 404, 400 for a strength of another pack, 409 if the pack does not go
  /// together with those in force.
  void change(const std::string& name, const Change& change);
  void remove(const std::string& name);
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_ / (name + ".safetensors"); }

 private:
  void read_state(const Log& log);
  [[nodiscard]] const ServedPack* search(const std::string& name) const;
  [[nodiscard]] const ServedPack& find(const std::string& name) const;
  /// As they go with each other and with what the model's folder holds (editors::move_apart).
  [[nodiscard]] PackSet collect(const std::vector<std::string>& names) const;
  [[nodiscard]] ServedPack load(const std::string& name, const std::filesystem::path& path) const;
  [[nodiscard]] nlohmann::ordered_json describe(const ServedPack& one) const;
  void keep(std::vector<std::string> active);
  void scale(ServedPack& one, double strength) const;

  const std::filesystem::path folder_;
  const models::Model& model_;
  const std::string fingerprint_;
  const editors::Lineage lineage_;
  std::vector<editors::NamedPack> held_;  ///< in force in the model's own folder
  Descriptor lock_;
  mutable std::mutex mutex_;
  std::vector<ServedPack> packs_;
  std::vector<std::string> active_;
  mutable std::map<std::string, PackSet> placed_;  ///< what collect() gave
};

}  // namespace emend::tools::serve
