// Scoped change of weights: originals are kept first and come back, bit for bit, unless the scope commits.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/models/model.h>

#include <map>
#include <string>
#include <vector>

namespace emend::editors {

/// Nested use: a transaction with a parent also makes the parent keep each original before the first write, so that the
/// parent can undo what its children committed. The model and the parent must outlive it.
class EditTransaction {
 public:
  explicit EditTransaction(models::Model& model, EditTransaction* parent = nullptr);
  /// Restores unless committed.
  ~EditTransaction();
  EditTransaction(const EditTransaction&) = delete;
  EditTransaction& operator=(const EditTransaction&) = delete;

  /// Keeps a copy of the weight's bytes in host memory; nothing if it is kept already. Throws Error(kNotFound).
  void keep(const std::string& weight);
  /// Puts all kept originals back, now. The transaction stays open.
  void restore();
  /// Keeps the changes; the originals are released.
  void commit() noexcept;
  [[nodiscard]] bool committed() const noexcept { return committed_; }

  [[nodiscard]] models::Model& model() const noexcept { return *model_; }
  [[nodiscard]] const std::map<std::string, at::Tensor>& originals() const noexcept { return originals_; }
  /// Names of the kept weights whose bytes now differ from the original.
  [[nodiscard]] std::vector<std::string> changed() const;

 private:
  models::Model* model_;
  EditTransaction* parent_;
  std::map<std::string, at::Tensor> originals_;
  bool committed_ = false;
};

}  // namespace emend::editors
