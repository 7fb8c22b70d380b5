// Edit packs in force in a model: for good, for programs that work with what others edited, or for a while.
#pragma once

#include <emend/core/log.h>
#include <emend/editors/packs/merge.h>
#include <emend/editors/packs/runtime.h>
#include <emend/models/checkpoint.h>
#include <emend/models/model.h>

#include <memory>
#include <string>
#include <vector>

namespace emend::workflow {

/// Warns where edits in force in the folder of a checkpoint lie beside its weights, as work that reads those alone has
/// to.
void warn_of_edits_beside(const models::Checkpoint& checkpoint, const std::string& event, const Log& log);

/// Packs in force: changes of weights are written into the model for good, what lies beside them stays attached as long
/// as this object lives.
class Packs {
 public:
  Packs() = default;
  /// What the ledger of the model's own folder holds beside the weights (its weights are in the files already), and the
  /// `packs`, as load() gives them. Throws as add().
  explicit Packs(models::Model& model, const std::vector<editors::NamedPack>& packs = {});
  /// The packs at `paths` as they may be added to the model of this checkpoint, which need not be loaded: as they are,
  /// or, where they were made for another model and are accepted all the same, as ones for this. Throws what
  /// editors::load_pack throws; Error(kInvalidArgument) naming the file if one is for another model, or does not go
  /// with another one or with what is in force.
  [[nodiscard]] static std::vector<editors::NamedPack> load(const models::Checkpoint& checkpoint,
                                                            const std::vector<std::string>& paths,
                                                            const editors::ApplyPackOptions& options = {},
                                                            const std::string& where = "packs");
  /// Adds packs that load() gave, for this model. Throws as editors::apply_pack and make_runtime.
  void add(models::Model& model, const std::vector<editors::NamedPack>& packs);
  /// The same of one that nobody has judged: also throws Error(kInvalidArgument) if it is for another model.
  void add(models::Model& model, const editors::EditPack& pack, const std::string& name);
  [[nodiscard]] const editors::RuntimeScope& runtime() const noexcept { return runtime_; }

 private:
  editors::RuntimeScope runtime_;
};

/// Packs in the model's own weights and beside them, as long as this lives; then every byte is as it was.
class PackScope {
 public:
  explicit PackScope(models::Model& model) : model_(model) {}
  /// Takes the last one out first, so that every byte comes back.
  ~PackScope();
  PackScope(const PackScope&) = delete;
  PackScope& operator=(const PackScope&) = delete;
  /// Throws what apply_pack and make_runtime throw; what was added before stays.
  void add(const editors::EditPack& pack, const std::string& name);
  [[nodiscard]] const editors::RuntimeScope& runtime() const noexcept { return runtime_; }

 private:
  models::Model& model_;
  editors::RuntimeScope runtime_;
  std::vector<std::unique_ptr<editors::EditTransaction>> applied_;
};

}  // namespace emend::workflow
