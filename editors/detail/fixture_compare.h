// Comparing tensors with recorded ones, with the tolerances that the fixtures recommend.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::editors::detail {

enum class Measure {
  kEqual,     ///< integers
  kRelative,  ///< Frobenius norm of the difference over that of the expected tensor
  kAbsolute,  ///< largest difference
};

struct Tolerance {
  Measure measure = Measure::kRelative;
  double limit = 1e-3;
};

/// Collects differences by kind ("z", "keys", "update", …).
class Comparison {
 public:
  void add(const std::string& kind, const std::string& name, const at::Tensor& expected, const at::Tensor& got,
           const Tolerance& tolerance);
  /// Something that is wrong without a number.
  void fail(const std::string& name, const std::string& what);

  [[nodiscard]] bool within_tolerance() const noexcept { return failures_.empty() && compared_ > 0; }
  /// {"max_abs_diff": {kind: …}, "relative": {kind: …}, "within_tolerance": …, "compared": n, "failures": […]}
  [[nodiscard]] nlohmann::json to_json() const;
  void merge(const Comparison& other);

 private:
  std::map<std::string, double> absolute_, relative_;
  std::vector<std::string> failures_;
  int64_t compared_ = 0;
};

/// Compares all tensors of one optimisation ("…z.7." or "…case.7.z.") with what was traced. `pristine`: the model had
/// not been edited before.
void compare_target(Comparison& comparison, const std::map<std::string, at::Tensor>& expected,
                    const std::map<std::string, at::Tensor>& got, const std::string& where, bool pristine);
/// The recorded loss terms of that optimisation.
void compare_losses(Comparison& comparison, const nlohmann::json& expected,
                    const std::map<std::string, at::Tensor>& got, const std::string& where, bool pristine);
/// Any other traced tensor of an editor, by the last part of its name. Returns false if the name is not one that is
/// compared in a full run.
bool compare_named(Comparison& comparison, const std::string& name, const at::Tensor& expected, const at::Tensor& got,
                   bool first_layer, bool pristine);
/// What the model computes before or after an edit; `after` chooses the tolerance.
void compare_outputs(Comparison& comparison, const std::map<std::string, at::Tensor>& expected,
                     const std::map<std::string, at::Tensor>& got, const std::string& where, bool after);

/// The members whose names begin with `prefix`, without it.
[[nodiscard]] std::map<std::string, at::Tensor> under(const std::map<std::string, at::Tensor>& tensors,
                                                      const std::string& prefix);

}  // namespace emend::editors::detail
