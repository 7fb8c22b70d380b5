#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/transaction.h>

namespace emend::editors {

EditTransaction::EditTransaction(models::Model& model, EditTransaction* parent) : model_(&model), parent_(parent) {}

EditTransaction::~EditTransaction() {
  if (!committed_) restore();
}

void EditTransaction::keep(const std::string& weight) {
  if (parent_) parent_->keep(weight);
  if (originals_.contains(weight)) return;
  const at::NoGradGuard no_grad;
  const at::Tensor current = model_->weight(weight);
  at::Tensor copy = devices::to_host(current.detach(), devices::Purpose::kSnapshot);
  if (copy.is_alias_of(current)) copy = copy.clone();
  originals_.emplace(weight, std::move(copy));
}

void EditTransaction::restore() {
  const at::NoGradGuard no_grad;
  for (const auto& [weight, original] : originals_) {
    model_->set_weight(weight, devices::route_like(original, model_->weight(weight), devices::Purpose::kSnapshot));
  }
}

void EditTransaction::commit() noexcept {
  committed_ = true;
  originals_.clear();
}

std::vector<std::string> EditTransaction::changed() const {
  std::vector<std::string> names;
  for (const auto& [weight, original] : originals_) {
    const at::Tensor current = devices::to_host(model_->weight(weight).detach());
    if (!at::equal(current, original)) names.push_back(weight);
  }
  return names;
}

}  // namespace emend::editors
