// The rewritten matrices as they were before the first batch, for methods that refer to them (NSE, PRUNE).
#pragma once

#include <emend/editors/transaction.h>
#include <emend/models/model.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emend::editors {

class OriginalWeights {
 public:
  /// Copies the rewritten matrix of each layer to the host; nothing if that was done before.
  void keep(const models::Model& model, const std::vector<int64_t>& layers);
  /// keep(), then `work`; forgets again what it kept for a first batch that throws.
  template <class Work>
  auto during(const models::Model& model, const std::vector<int64_t>& layers, Work&& work) {
    const bool first = weights_.empty();
    keep(model, layers);
    try {
      return work();
    } catch (...) {
      if (first) weights_.clear();
      throw;
    }
  }
  void clear() { weights_.clear(); }
  [[nodiscard]] bool empty() const noexcept { return weights_.empty(); }
  /// By checkpoint name, in the stored orientation and dtype.
  [[nodiscard]] const std::map<std::string, at::Tensor>& weights() const noexcept { return weights_; }
  /// Puts the originals into the model; the transaction's end gives the present weights back.
  void write_into(EditTransaction& transaction) const;

  /// "original.NAME". load() takes those entries out of `state` and leaves the others.
  void save(std::map<std::string, at::Tensor>& state) const;
  void load(std::map<std::string, at::Tensor>& state);

 private:
  std::map<std::string, at::Tensor> weights_;
};

}  // namespace emend::editors
