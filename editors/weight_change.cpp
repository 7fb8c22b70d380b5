#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/weight_change.h>
#include <emend/models/family.h>

namespace emend::editors {

WeightChange weight_change(const EditTransaction& transaction, const std::string& weight, int layer) {
  const at::NoGradGuard no_grad;
  const models::Model& model = transaction.model();
  const at::Tensor original = transaction.originals().at(weight).to(at::kDouble);
  const at::Tensor now = devices::to_host(model.weight(weight).detach()).to(at::kDouble);
  WeightChange change;
  change.delta = WeightDelta::as_stored(weight, layer, now - original);
  if (now.dim() == 2 && model.family().orientation == models::Orientation::kInOut) {
    change.delta.orientation = models::Orientation::kInOut;
    change.delta.dense_DF = change.delta.dense_DF.t().contiguous();
  }
  const double norm = original.norm().item<double>();
  change.figures.layer = layer;
  change.figures.weight = weight;
  change.figures.update_norm = change.delta.norm();
  change.figures.relative_update_norm = norm > 0 ? change.figures.update_norm / norm : 0;
  return change;
}

}  // namespace emend::editors
