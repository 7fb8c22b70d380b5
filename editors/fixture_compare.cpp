#include <ATen/ATen.h>
#include <emend/editors/detail/fixture_compare.h>

#include <cmath>

namespace emend::editors::detail {
namespace {

constexpr Tolerance kEqual{Measure::kEqual, 0};
Tolerance relative(double limit) {
  return {Measure::kRelative, limit};
}
Tolerance absolute(double limit) {
  return {Measure::kAbsolute, limit};
}

std::string show(const at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string show(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

// Rows [begin, end) of both, if there are any.
void compare_rows(Comparison& comparison, const std::string& kind, const std::string& name, const at::Tensor& expected,
                  const at::Tensor& got, int64_t begin, int64_t end, const Tolerance& tolerance) {
  end = std::min(end, std::min(expected.size(0), got.size(0)));
  if (begin >= end) return;
  comparison.add(kind, name + " rows " + std::to_string(begin) + "-" + std::to_string(end - 1),
                 expected.slice(0, begin, end), got.slice(0, begin, end), tolerance);
}

// How far the first update may be off. Adam's first step is lr·g/(|g| + ε): where |g| is not much larger than ε = 1e-8
// it shows how the gradient was rounded, and float32 gradients of the first step differ from float64's by 4e-5 of their
// norm.
double first_update_limit(const at::Tensor& gradient_D) {
  constexpr double kEpsilon = 1e-8, kRounding = 4e-5;
  const at::Tensor g = gradient_D.to(at::kDouble), scale = g.abs() + kEpsilon;
  const double noise = kRounding * g.norm().item<double>() / std::sqrt(static_cast<double>(g.numel()));
  const double step = (g / scale).norm().item<double>();
  return step > 0 ? 1e-5 + (kEpsilon * noise / scale.square()).norm().item<double>() / step : 1e-5;
}

bool starts_with_any(const std::string& name, const std::string& stem) {
  return name == stem || name.starts_with(stem + "_");
}

}  // namespace

void Comparison::add(const std::string& kind, const std::string& name, const at::Tensor& expected,
                     const at::Tensor& got, const Tolerance& tolerance) {
  ++compared_;
  if (expected.sizes() != got.sizes()) {
    fail(name, "shape " + show(got.sizes()) + ", expected " + show(expected.sizes()));
    return;
  }
  if (expected.numel() == 0) return;
  const at::Tensor want = expected.to(at::kDouble), have = got.to(at::kDouble);
  const at::Tensor difference = have - want;
  const double largest = difference.abs().max().item<double>();
  const double norm = want.norm().item<double>();
  const double share = norm > 0 ? difference.norm().item<double>() / norm : largest;
  if (tolerance.measure == Measure::kEqual) {
    if (largest != 0) fail(name, "differs");
    return;
  }
  // Comparisons with NaN are false: asking for "not within" finds it.
  absolute_[kind] = std::isfinite(largest) ? std::max(absolute_[kind], largest) : INFINITY;
  relative_[kind] = std::isfinite(share) ? std::max(relative_[kind], share) : INFINITY;
  const double measured = tolerance.measure == Measure::kRelative ? share : largest;
  if (!(measured <= tolerance.limit))
    fail(name, (tolerance.measure == Measure::kRelative ? "relative difference " : "difference ") + show(measured) +
                   ", allowed " + show(tolerance.limit));
}

void Comparison::fail(const std::string& name, const std::string& what) {
  failures_.push_back(name + ": " + what);
}

void Comparison::merge(const Comparison& other) {
  for (const auto& [kind, value] : other.absolute_) absolute_[kind] = std::max(absolute_[kind], value);
  for (const auto& [kind, value] : other.relative_) relative_[kind] = std::max(relative_[kind], value);
  failures_.insert(failures_.end(), other.failures_.begin(), other.failures_.end());
  compared_ += other.compared_;
}

nlohmann::json Comparison::to_json() const {
  return {{"max_abs_diff", absolute_},
          {"relative", relative_},
          {"within_tolerance", within_tolerance()},
          {"compared", compared_},
          {"failures", failures_}};
}

std::map<std::string, at::Tensor> under(const std::map<std::string, at::Tensor>& tensors, const std::string& prefix) {
  std::map<std::string, at::Tensor> found;
  for (auto it = tensors.lower_bound(prefix); it != tensors.end() && it->first.starts_with(prefix); ++it)
    found.emplace(it->first.substr(prefix.size()), it->second);
  return found;
}

void compare_target(Comparison& comparison, const std::map<std::string, at::Tensor>& expected,
                    const std::map<std::string, at::Tensor>& got, const std::string& where, bool pristine) {
  const auto mask = expected.at("attention_mask").to(at::kLong);
  for (const auto& [name, want] : expected) {
    const std::string full = where + name;
    const auto found = got.find(name);
    if (found == got.end()) {
      comparison.fail(full, "not computed");
      continue;
    }
    const at::Tensor& have = found->second;
    if (name == "input_ids" && have.sizes() == want.sizes()) {
      comparison.add("ids", full, want.to(at::kLong) * mask, have * mask, kEqual);
    } else if (name == "input_ids" || name == "attention_mask" || name == "labels" || name == "lookup" ||
               name == "target_ids") {
      comparison.add("ids", full, want.to(at::kLong), have, kEqual);
    } else if (starts_with_any(name, "target_init")) {
      comparison.add("target_init", full, want, have, relative(pristine ? 1e-5 : 5e-4));
    } else if (starts_with_any(name, "target")) {
      comparison.add("z", full, want, have, relative(1e-3));
    } else if (starts_with_any(name, "delta_steps")) {
      if (want.size(0) != have.size(0))
        comparison.fail(full,
                        std::to_string(have.size(0) - 1) + " updates, expected " + std::to_string(want.size(0) - 1));
      const auto gradients = expected.find("grad_steps" + name.substr(std::string("delta_steps").size()));
      const bool moved = gradients != expected.end() && gradients->second.size(0) > 0;
      const double first = moved ? first_update_limit(gradients->second[0]) : 1e-5;
      compare_rows(comparison, "delta", full, want, have, 1, 2, relative(pristine ? first : 5e-4));
      compare_rows(comparison, "delta", full, want, have, 2, 6, relative(pristine ? 5e-4 : 1e-3));
      compare_rows(comparison, "delta", full, want, have, 6, want.size(0), relative(1e-3));
    } else if (starts_with_any(name, "grad_steps")) {
      compare_rows(comparison, "gradient", full, want, have, 0, 1, relative(pristine ? 5e-4 : 1e-3));
    } else if (name == "nll_each") {
      compare_rows(comparison, "loss", full, want, have, 0, 1, absolute(pristine ? 1e-4 : 1e-3));
      compare_rows(comparison, "loss", full, want, have, 1, want.size(0), absolute(1e-3));
    } else {
      comparison.fail(full, "unknown tensor");
    }
  }
}

void compare_losses(Comparison& comparison, const nlohmann::json& expected,
                    const std::map<std::string, at::Tensor>& got, const std::string& where, bool pristine) {
  const auto found = got.find("losses");
  if (found == got.end()) {
    comparison.fail(where + "losses", "not computed");
    return;
  }
  int64_t column = 0;
  for (const char* name : {"loss", "nll", "kl", "wd", "prob"}) {
    const auto values = expected.at(name).get<std::vector<double>>();
    const at::Tensor want = at::tensor(values, at::kDouble), have = found->second.select(1, column++);
    if (want.size(0) != have.size(0))
      comparison.fail(where + name,
                      std::to_string(have.size(0)) + " iterations, expected " + std::to_string(want.size(0)));
    compare_rows(comparison, "loss", where + name, want, have, 0, 1, absolute(pristine ? 1e-4 : 1e-3));
    compare_rows(comparison, "loss", where + name, want, have, 1, want.size(0), absolute(1e-3));
  }
}

bool compare_named(Comparison& comparison, const std::string& name, const at::Tensor& expected, const at::Tensor& got,
                   bool first_layer, bool pristine) {
  const std::string last = name.substr(name.rfind('.') + 1);
  static const std::map<std::string, std::pair<std::string, Tolerance>> full_run = {
      {"key_lookup", {"ids", kEqual}},
      {"keys_per_context", {"keys", relative(5e-4)}},
      {"keys", {"keys", relative(5e-4)}},
      {"cur_z", {"current", relative(5e-4)}},
      {"resid", {"residual", relative(1e-3)}},
      {"targets", {"residual", relative(1e-3)}},
      {"adj_k", {"adj_k", relative(1e-3)}},
      {"D", {"D", relative(1e-3)}},
      {"update", {"update", relative(1e-3)}},
      {"weight_change", {"weight_change", relative(1e-3)}},
      {"bias_change", {"weight_change", relative(1e-3)}},
      {"u", {"u", relative(1e-3)}},
      {"v", {"v", relative(1e-3)}},
      {"v_target", {"z", relative(1e-3)}},
      {"cur_input", {"current", relative(5e-4)}},
      {"cur_output", {"current", relative(5e-4)}},
      {"division_factor", {"division_factor", relative(1e-3)}},
      {"P", {"P", relative(1e-5)}},
      {"cache_after", {"cache", relative(1e-3)}},
  };
  const auto found = full_run.find(last);
  if (found == full_run.end()) return false;
  auto [kind, tolerance] = found->second;
  if (first_layer && pristine && kind == "keys") tolerance = relative(1e-5);
  comparison.add(kind, name, expected, got, tolerance);
  return true;
}

void compare_outputs(Comparison& comparison, const std::map<std::string, at::Tensor>& expected,
                     const std::map<std::string, at::Tensor>& got, const std::string& where, bool after) {
  for (const auto& [name, want] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) {
      comparison.fail(where + name, "not computed");
    } else if (name == "input_ids" || name == "attention_mask" || name == "last_argmax") {
      comparison.add("ids", where + name, want.to(at::kLong), found->second.to(at::kLong), kEqual);
    } else if (name == "head_input") {
      comparison.add(after ? "after_hidden" : "before_hidden", where + name, want, found->second,
                     relative(after ? 1e-3 : 1e-5));
    } else {
      comparison.add(after ? "after_logits" : "before_logits", where + name, want, found->second,
                     absolute(after ? 5e-3 : 1e-4));
    }
  }
}

}  // namespace emend::editors::detail
