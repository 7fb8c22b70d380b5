// Adam and AdamW, with the arithmetic of the published training loops.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace emend::editors {

struct AdamOptions {
  double lr = 1e-3;
  double weight_decay = 0;  ///< 0 disables it
  /// false: weight_decay·w is added to the gradient (Adam); true: the weight shrinks by lr·weight_decay (AdamW)
  bool decoupled = false;
};

class Adam {
 public:
  explicit Adam(AdamOptions options) : options_(options) {}
  /// One update of all variables, in place and without history; moments live beside each variable in its dtype. An
  /// undefined gradient leaves its variable alone. The list must be the same every time.
  void step(const std::vector<at::Tensor>& variables, const std::vector<at::Tensor>& gradients);
  /// For schedules.
  void set_learning_rate(double lr) noexcept { options_.lr = lr; }

 private:
  AdamOptions options_;
  int64_t steps_ = 0;
  std::vector<at::Tensor> first_, second_;
};

}  // namespace emend::editors
