#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/optimiser.h>

#include <cmath>

namespace emend::editors {

void Adam::step(const std::vector<at::Tensor>& variables, const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  EMEND_CHECK(variables.size() == gradients.size() && (first_.empty() || first_.size() == variables.size()),
              "as many gradients as variables, the same ones every time");
  if (first_.empty())
    for (const at::Tensor& variable : variables) {
      first_.push_back(at::zeros_like(variable.detach()));
      second_.push_back(at::zeros_like(variable.detach()));
    }
  ++steps_;
  const double t = static_cast<double>(steps_);
  const double correction1 = 1 - std::pow(options_.beta1, t), correction2 = 1 - std::pow(options_.beta2, t);
  for (size_t i = 0; i < variables.size(); ++i) {
    if (!gradients[i].defined()) continue;
    at::Tensor variable = variables[i].detach();
    at::Tensor gradient =
        devices::route_like(gradients[i], variable, devices::Purpose::kOptimiser, devices::Dtype::kMatch);
    if (options_.decoupled) {
      variable.mul_(1 - options_.lr * options_.weight_decay);
    } else if (options_.weight_decay != 0) {
      gradient = gradient.add(variable, options_.weight_decay);
    }
    first_[i].lerp_(gradient, 1 - options_.beta1);
    second_[i].mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
    const at::Tensor denominator = (second_[i].sqrt() / std::sqrt(correction2)).add_(options_.epsilon);
    variable.addcdiv_(first_[i], denominator, -options_.lr / correction1);
  }
}

void clamp_to_box(at::Tensor value, const at::Tensor& centre, double radius) {
  const at::NoGradGuard no_grad;
  value.copy_(at::maximum(at::minimum(value, centre + radius), centre - radius));
}

}  // namespace emend::editors
