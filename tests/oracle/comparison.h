// Comparing tensors with recorded ones, with the tolerances that the fixtures recommend.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/editors/steps/locate.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::editors::oracle {

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

// The fine-tuning editors.

/// Settings that the recorded code does not name but has: FT-L scores the padding of shorter targets.
void complete_finetune_values(const std::string& editor, nlohmann::json& values);

/// Compares the losses of every step and epoch ("batch", "epoch") with what an editor traced; nothing for other
/// editors.
void compare_training_losses(Comparison& comparison, const nlohmann::json& expected,
                             const std::map<std::string, at::Tensor>& got, const std::string& where);

// The locate-then-edit methods: memory, projectors, settled and masked changes.

/// Adds "cache_after", ΣKKᵀ of every layer, to what an editor with a memory of keys traced; nothing for other editors.
void add_memory(std::map<std::string, at::Tensor>& trace, const Editor& editor);

/// Gives a fresh editor the recorded memory (ΣKKᵀ of every layer, [L,F,F]).
void set_memory(Editor& editor, const at::Tensor& sums_LFF);

/// The recorded projectors "P" [L,F,F] against those of our own step, for the recorded threshold.
void compare_projectors(Comparison& comparison, const std::string& name, const at::Tensor& expected_LFF,
                        const StatisticsProvider& statistics, const std::vector<int>& layers, double threshold);

/// What `settle` makes of the update solved from recorded keys, against the recorded change of the weight.
void compare_settled(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                     const LocateRecipe& recipe, const LayerProblem& problem, const WeightDelta& solved);

/// A change of which only some entries are written (RECT): the same ones but for 0.5 %, with the same values there.
void compare_masked(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                    const at::Tensor& got_DF);

}  // namespace emend::editors::oracle
