#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/steps/apply.h>
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
  refuse({weight, "a change of shape " + show_shape(got), "shape " + show_shape(expected),
          "use the change on the model it was made for"});
}

struct Sums {
  double weight = 0, delta = 0, projection = 0;
};

// Adds to one block of rows and accumulates squared norms.
void add_rows(at::Tensor rows_DF, const at::Tensor& delta_DF, const std::string& name, Sums& sums) {
  const at::Tensor before = rows_DF.to(at::kDouble);
  const at::Tensor after = (before + delta_DF).to(rows_DF.scalar_type());
  const at::Tensor written = after.to(at::kDouble) - before;
  // The last one only tells whether all that was written is finite.
  const at::Tensor figures =
      at::stack({before.square().sum(), delta_DF.square().sum(), (written * delta_DF).sum(), written.sum()});
  const at::Tensor host = devices::to_host(figures);
  const double* values = host.const_data_ptr<double>();
  if (!std::isfinite(values[3])) {
    throw Error(ErrorClass::kNumeric,
                {name, "the changed weight has NaN or infinite entries", "finite numbers", kTamerChange});
  }
  rows_DF.copy_(after);
  sums.weight += values[0];
  sums.delta += values[1];
  sums.projection += values[2];
}

ApplyReport report_of(const Sums& sums) {
  ApplyReport report;
  report.weight_norm = std::sqrt(sums.weight);
  report.delta_norm = std::sqrt(sums.delta);
  if (sums.delta > 0) report.survived = sums.projection / sums.delta;
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
  const auto copies = transaction.model().weight_copies(delta.weight);  // a tied head on a device of its own
  for (size_t i = 1; i < copies.size(); ++i)
    copies[i].copy_(devices::route_like(copies[0], copies[i], devices::Purpose::kWeight));
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

LayerFigures& add_delta(const WeightDelta& delta, EditTransaction& transaction, EditResult& result) {
  const ApplyReport report = apply_delta(delta, transaction);
  result.deltas.push_back(delta);
  return result.layers.emplace_back(figures_of_write(delta.layer, delta.weight, report));
}

WeightDelta weight_change(const EditTransaction& transaction, const std::string& weight, int layer) {
  const at::NoGradGuard no_grad;
  const models::Model& model = transaction.model();
  const at::Tensor original = transaction.originals().at(weight).to(at::kDouble);
  const at::Tensor now = devices::to_host(model.weight(weight).detach()).to(at::kDouble);
  return WeightDelta::as_stored(weight, layer, now - original, model.family().orientation);
}

const WeightDelta& add_change(const EditTransaction& transaction, const std::string& weight, int layer,
                              EditResult& result) {
  const WeightDelta& delta = result.deltas.emplace_back(weight_change(transaction, weight, layer));
  const double before = transaction.originals().at(weight).to(at::kDouble).norm().item<double>();
  result.layers.push_back(figures_of_write(layer, weight, {.weight_norm = before, .delta_norm = delta.norm()}));
  return delta;
}

// Bit for bit: a NaN equals itself, and 0 is not −0.
static bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

EditTransaction::EditTransaction(models::Model& model, EditTransaction* parent) : model_(&model), parent_(parent) {}

EditTransaction::~EditTransaction() {
  if (committed_) return;
  // What is told is the error that led here. A device without room may have some after its unused blocks are let go;
  // one that has failed keeps its weights as they are.
  try {
    restore();
  } catch (const std::exception&) {
    try {
      devices::release_unused_memory();
      restore();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    }
  }
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
    refuse({"edit", "a transaction that has ended", "one that lives as long as the edit",
            "set EditContext::transaction anew for every call, or leave it empty"});
  return transaction_;
}

}  // namespace emend::editors
