#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/changed_by.h>
#include <emend/models/family.h>

#include <cmath>

namespace emend::editors {
namespace {

constexpr int64_t kChunkElements = int64_t{1} << 24;  // bounds the float64 copies, 128 MiB each

std::string show_shape(at::IntArrayRef shape) {
  return join(shape, "×", [](int64_t size) { return std::to_string(size); });
}

void require_shape(const std::string& weight, at::IntArrayRef got, at::IntArrayRef expected) {
  if (got == expected) return;
  throw Error(ErrorClass::kInvalidArgument,
              {weight, "a change of shape " + show_shape(got), "shape " + show_shape(expected),
               "use the change on the model it was made for"});
}

struct Sums {
  double weight = 0, delta = 0, projection = 0, rounding = 0;
};

// Adds to one block of rows and accumulates squared norms.
void add_rows(at::Tensor rows_DF, const at::Tensor& delta_DF, const std::string& name, Sums& sums) {
  const at::Tensor before = rows_DF.to(at::kDouble);
  const at::Tensor after = (before + delta_DF).to(rows_DF.scalar_type());
  const at::Tensor written = after.to(at::kDouble) - before;
  const at::Tensor figures = at::stack({before.square().sum(), delta_DF.square().sum(), (written * delta_DF).sum(),
                                        (written - delta_DF).square().sum()});
  const at::Tensor host = devices::to_host(figures);
  const double* values = host.const_data_ptr<double>();
  if (!std::isfinite(values[3])) {
    throw Error(ErrorClass::kNumeric, {name, "the changed weight has NaN or infinite entries", "finite numbers",
                                       "lower v_lr or the clamp, or take more tokens for the statistics"});
  }
  rows_DF.copy_(after);
  sums.weight += values[0];
  sums.delta += values[1];
  sums.projection += values[2];
  sums.rounding += values[3];
}

ApplyReport report_of(const Sums& sums) {
  ApplyReport report;
  report.weight_norm = std::sqrt(sums.weight);
  report.delta_norm = std::sqrt(sums.delta);
  if (sums.delta > 0) {
    report.survived = sums.projection / sums.delta;
    report.rounding = std::sqrt(sums.rounding / sums.delta);
  }
  return report;
}

// Calls `take` with blocks of rows of a weight, as it acts, and what is to be added to them in float64.
template <typename Take>
void each_block(const at::Tensor& weight_DF, const WeightDelta& delta, const Take& take) {
  const auto route = [&](const at::Tensor& x) {
    return devices::route_like(x.to(at::kDouble), weight_DF, devices::Purpose::kDelta);
  };
  if (weight_DF.dim() != 2) return take(weight_DF, route(delta.dense_DF));
  const int64_t step = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, weight_DF.size(1)));
  const at::Tensor right_RF = delta.low_rank() ? route(delta.right_FR).t() : at::Tensor();
  for (int64_t row = 0; row < weight_DF.size(0); row += step) {
    const int64_t count = std::min(step, weight_DF.size(0) - row);
    take(weight_DF.narrow(0, row, count), delta.low_rank() ? route(delta.left_DR.narrow(0, row, count)).mm(right_RF)
                                                           : route(delta.dense_DF.narrow(0, row, count)));
  }
}

}  // namespace

at::Tensor changed_by(const WeightDelta& delta, const at::Tensor& weight_DF) {
  const at::NoGradGuard no_grad;
  require_shape(delta.weight, delta.shape(), weight_DF.sizes());
  std::vector<at::Tensor> blocks;
  each_block(weight_DF, delta, [&](const at::Tensor& rows, const at::Tensor& change) {
    blocks.push_back((rows.to(at::kDouble) + change).to(rows.scalar_type()));
  });
  return blocks.size() == 1 ? blocks[0] : at::cat(blocks);
}

ApplyReport apply_delta(const WeightDelta& delta, EditTransaction& transaction) {
  const at::NoGradGuard no_grad;
  at::Tensor weight = transaction.model().weight(delta.weight);
  if (weight.dim() == 2 && delta.orientation == models::Orientation::kInOut) weight = weight.t();
  require_shape(delta.weight, delta.shape(), weight.sizes());
  delta.require_finite();
  transaction.keep(delta.weight);

  Sums sums;
  each_block(weight, delta,
             [&](const at::Tensor& rows, const at::Tensor& change) { add_rows(rows, change, delta.weight, sums); });
  return report_of(sums);
}

void write_weight(const std::string& name, const at::Tensor& value, EditTransaction& transaction) {
  const at::NoGradGuard no_grad;
  at::Tensor weight = transaction.model().weight(name);
  require_shape(name, value.sizes(), weight.sizes());
  if (!at::isfinite(value).all().item<bool>())
    throw Error(ErrorClass::kNumeric,
                {name, "the new value has NaN or infinite entries", "finite numbers", "lower the learning rate"});
  transaction.keep(name);
  transaction.model().set_weight(
      name, devices::route_like(value.detach(), weight, devices::Purpose::kDelta));  // all copies of a tied weight
}

void note_write(LayerFigures& figures, const ApplyReport& report) {
  figures.update_norm = report.delta_norm;
  figures.relative_update_norm = report.weight_norm > 0 ? report.delta_norm / report.weight_norm : 0;
  figures.survived = report.survived;
}

LayerFigures figures_of_write(int layer, const std::string& weight, const ApplyReport& report) {
  LayerFigures figures;
  figures.layer = layer;
  figures.weight = weight;
  note_write(figures, report);
  return figures;
}

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
