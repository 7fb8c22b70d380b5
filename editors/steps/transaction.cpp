#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/transaction.h>

namespace emend::editors {

// Bit for bit: a NaN equals itself, and 0 is not −0.
static bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

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
  if (parent_ && same_bytes(copy, parent_->originals_.at(weight))) {
    originals_.emplace(weight, parent_->originals_.at(weight));
    return;
  }
  if (copy.is_alias_of(current)) copy = copy.clone();
  bytes_held_ += static_cast<int64_t>(copy.nbytes());
  originals_.emplace(weight, std::move(copy));
}

void EditTransaction::restore() {
  const at::NoGradGuard no_grad;
  for (const auto& [weight, original] : originals_) {
    model_->set_weight(weight, devices::route_like(original, model_->weight(weight), devices::Purpose::kSnapshot));
  }
}

void EditTransaction::swap() {
  const at::NoGradGuard no_grad;
  for (auto& [weight, original] : originals_) {
    at::Tensor present = devices::to_host(model_->weight(weight).detach(), devices::Purpose::kSnapshot).clone();
    model_->set_weight(weight, devices::route_like(original, model_->weight(weight), devices::Purpose::kSnapshot));
    original = std::move(present);
  }
}

void EditTransaction::commit() noexcept {
  committed_ = true;
  originals_.clear();
  bytes_held_ = 0;
}

std::vector<std::string> EditTransaction::changed() const {
  std::vector<std::string> names;
  for (const auto& [weight, original] : originals_) {
    const at::Tensor current = devices::to_host(model_->weight(weight).detach());
    if (!at::equal(current, original)) names.push_back(weight);
  }
  return names;
}

TransactionRef::operator EditTransaction*() const {
  if (transaction_ && life_.expired())
    throw Error(ErrorClass::kInvalidArgument,
                {"edit", "a transaction that has ended", "one that lives as long as the edit",
                 "set EditContext::transaction anew for every call, or leave it empty"});
  return transaction_;
}

}  // namespace emend::editors
