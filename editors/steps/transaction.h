// Scoped change of weights: originals are kept first and come back, bit for bit, unless the scope commits.
#pragma once

#include <emend/models/model.h>

#include <map>

namespace emend::editors {

/// Nested use: a transaction with a parent also makes the parent keep each original before the first write, so that the
/// parent can undo what its children committed. Where the parent holds the same bytes, its copy serves both. The model
/// and the parent must outlive it.
class EditTransaction {
 public:
  explicit EditTransaction(models::Model& model, EditTransaction* parent = nullptr);
  /// Restores unless committed.
  ~EditTransaction();
  EditTransaction(const EditTransaction&) = delete;
  EditTransaction& operator=(const EditTransaction&) = delete;

  /// Keeps the weight's bytes in host memory; nothing if they are kept already. Throws Error(kNotFound).
  void keep(const std::string& weight);
  /// Lets the original of a weight go that is as it was.
  void forget(const std::string& weight) { originals_.erase(weight); }
  /// Puts all kept originals back, now. The transaction stays open.
  void restore();
  /// Exchanges the kept originals with what the model has now: the model is unedited until the next call, which gives
  /// every byte of the edit back.
  void swap();
  /// Keeps the changes; the originals are released.
  void commit() noexcept;

  [[nodiscard]] models::Model& model() const noexcept { return *model_; }
  [[nodiscard]] const std::map<std::string, at::Tensor>& originals() const noexcept { return originals_; }
  /// Names of the kept weights whose bytes now differ from the original.
  [[nodiscard]] std::vector<std::string> changed() const;

 private:
  friend class TransactionRef;
  models::Model* model_;
  EditTransaction* parent_;
  std::map<std::string, at::Tensor> originals_;
  bool committed_ = false;
  std::shared_ptr<const bool> life_ = std::make_shared<const bool>(true);  // seen by references
};

/// Names a transaction, or none, without owning it. To use one that has ended is an error, never a stray pointer.
class TransactionRef {
 public:
  TransactionRef(EditTransaction* transaction = nullptr) : transaction_(transaction) {
    if (transaction) life_ = transaction->life_;
  }
  /// Throws Error(kInvalidArgument) if the transaction has ended.
  operator EditTransaction*() const;

 private:
  EditTransaction* transaction_;
  std::weak_ptr<const bool> life_;
};

}  // namespace emend::editors
