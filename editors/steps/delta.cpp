#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/delta.h>

#include <cmath>

namespace emend::editors {
namespace {

at::Tensor as_double(const at::Tensor& x) {
  return x.to(at::kDouble);
}

bool all_finite(const at::Tensor& x) {
  return !x.defined() || at::isfinite(x).all().item<bool>();
}

// `more` added to `first`, both of one weight.
WeightDelta add(const WeightDelta& first, const WeightDelta& more) {
  WeightDelta sum = first;
  if (first.low_rank() && more.low_rank()) {
    sum.left_DR = at::cat({as_double(first.left_DR),
                           devices::route_like(as_double(more.left_DR), first.left_DR, devices::Purpose::kDelta)},
                          1);
    sum.right_FR = at::cat({as_double(first.right_FR),
                            devices::route_like(as_double(more.right_FR), first.right_FR, devices::Purpose::kDelta)},
                           1);
    const auto smaller_side = std::min(sum.left_DR.size(0), sum.right_FR.size(0));
    if (sum.left_DR.size(1) <= smaller_side) return sum;
  }
  const at::Tensor dense = first.matrix();
  sum.dense_DF = dense + devices::route_like(more.matrix(), dense, devices::Purpose::kDelta);
  sum.left_DR = at::Tensor();
  sum.right_FR = at::Tensor();
  return sum;
}

}  // namespace

WeightDelta WeightDelta::factors(const models::EditSite& site, at::Tensor left_DR, at::Tensor right_FR) {
  WeightDelta delta{site.weight_name, site.layer, site.orientation, std::move(left_DR), std::move(right_FR), {}};
  const auto is_matrix = [](const at::Tensor& factor) { return factor.defined() && factor.dim() == 2; };
  if (!is_matrix(delta.left_DR) || !is_matrix(delta.right_FR) || delta.left_DR.size(1) != delta.right_FR.size(1))
    refuse({site.weight_name, "factors that do not fit together", "[D, R] and [F, R]", ""});
  return delta;
}

WeightDelta WeightDelta::dense(const models::EditSite& site, at::Tensor delta_DF) {
  return {site.weight_name, site.layer, site.orientation, {}, {}, std::move(delta_DF)};
}

WeightDelta WeightDelta::as_stored(std::string weight, int layer, at::Tensor delta, models::Orientation orientation) {
  if (delta.dim() != 2) orientation = models::Orientation::kOutIn;
  if (orientation == models::Orientation::kInOut) delta = delta.t().contiguous();
  return {std::move(weight), layer, orientation, {}, {}, std::move(delta)};
}

int64_t WeightDelta::rank() const {
  if (low_rank()) return left_DR.size(1);
  return dense_DF.dim() == 2 ? std::min(dense_DF.size(0), dense_DF.size(1)) : 1;
}

std::vector<int64_t> WeightDelta::shape() const {
  if (low_rank()) return {left_DR.size(0), right_FR.size(0)};
  return dense_DF.sizes().vec();
}

at::Tensor WeightDelta::matrix() const {
  if (low_rank()) return as_double(left_DR).mm(as_double(right_FR).t());
  return as_double(dense_DF);
}

at::Tensor WeightDelta::stored() const {
  const at::Tensor change = matrix();
  return orientation == models::Orientation::kInOut && change.dim() == 2 ? change.t() : change;
}

double WeightDelta::norm() const {
  if (!low_rank()) return as_double(dense_DF).norm().item<double>();
  const at::Tensor left = as_double(left_DR), right = as_double(right_FR);
  const double squared = (left.t().mm(left) * right.t().mm(right)).sum().item<double>();
  return squared < 0 ? 0 : std::sqrt(squared);  // of rounding; what is no number stays that
}

bool WeightDelta::finite() const {
  return all_finite(left_DR) && all_finite(right_FR) && all_finite(dense_DF);
}

void WeightDelta::require_finite() const {
  if (finite()) return;
  throw Error(ErrorClass::kNumeric,
              {weight, "the change of this weight has NaN or infinite entries", "finite numbers", kTamerChange});
}

std::vector<WeightDelta> merge_deltas(const std::vector<WeightDelta>& deltas) {
  std::vector<WeightDelta> merged;
  std::map<std::string, size_t> place;
  for (const auto& delta : deltas) {
    const auto [found, is_new] = place.emplace(delta.weight, merged.size());
    if (is_new) {
      merged.push_back(delta);
    } else {
      merged[found->second] = add(merged[found->second], delta);
    }
  }
  return merged;
}

}  // namespace emend::editors
