// The changes of a loaded model's weights by several parties: any of them can be taken out, whatever came after it.
//
// Like the ledger of a folder: weights are recomputed from originals and deltas, in the order of the deltas. What
// others wrote is kept only while somebody has older originals, so that a session that is alone keeps nothing.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/editors/steps/transaction.h>

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>

namespace emend::workflow {

/// What one party (a session, a pack) changed. The model must outlive it and must not move.
class Changes {
 public:
  using Neurons = std::map<std::string, std::vector<int64_t>>;
  /// What is known of a model's changes by all parties. It lives as long as one of them, or whoever else holds it.
  struct Order;
  [[nodiscard]] static std::shared_ptr<Order> order_of(const models::Model& model);

  /// Whether a pack is in force, changes of any party are in the weights (also of those that have ended, as far as the
  /// order is held), or something is attached beside them.
  [[nodiscard]] static bool any_in(const models::Model& model);

  explicit Changes(models::Model& model);
  /// The changes stay.
  ~Changes();

  /// Writes a pack, its neurons moved away from those of others; the only change of this party. Throws what apply_pack
  /// throws, and Error(kInvalidArgument) naming `where` if the same pack is in force, or one that a party has made of
  /// its own changes (made), or if neurons cannot be moved and options.allow_conflicts is not set.
  void put_in(const editors::EditPack& pack, const editors::ApplyPackOptions& options, const std::string& where);
  /// Has to be said after every use of transaction(): the deltas that were written and kept.
  void wrote(std::span<const editors::WeightDelta> deltas);
  /// Has to be said of a pack that was made of what this party wrote: it is in force as long as that is.
  void made(const editors::EditPack& pack);
  /// The weights are as if this party had never been there; a second time there is nothing left to do. Originals come
  /// back bit for bit, and what others wrote since is added to them again.
  void take_out();

  /// Whether others than this party have changed the model's weights, or a pack of theirs is in force.
  [[nodiscard]] bool others_in() const;
  /// Places that others than this party have written as whole neurons, by the name of W_down.
  [[nodiscard]] Neurons neurons_of_others() const;

  /// Holds the originals.
  [[nodiscard]] editors::EditTransaction& transaction() const noexcept { return *transaction_; }

 private:
  void rebase(const std::string& weight);
  void forget_unchanged();

  std::shared_ptr<Order> order_;
  std::unique_ptr<editors::EditTransaction> transaction_;
  std::map<std::string, int64_t> since_;  // weight → place of its original in the order
  std::string pack_;                      // put_in: what tells packs apart
  std::set<std::string> made_;            // packs of its own changes, by the same
  Neurons neurons_;                       // that it wrote
};

}  // namespace emend::workflow
