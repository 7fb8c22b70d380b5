// What the recorded runs of the locate-then-edit methods with a memory need besides the common comparison.
#pragma once

#include <emend/editors/detail/fixture_compare.h>
#include <emend/editors/locate.h>

#include <map>
#include <string>
#include <vector>

namespace emend::editors::detail {

/// Adds "cache_after", ΣKKᵀ of every layer, to what an editor with a memory of keys traced; nothing for other editors.
void add_memory(std::map<std::string, at::Tensor>& trace, const Editor& editor);

/// Gives a fresh editor the recorded memory (ΣKKᵀ of every layer, [L,F,F]).
void set_memory(Editor& editor, const at::Tensor& sums_LFF);

/// The recorded projectors "P" [L,F,F] against those of our own step, for the recorded threshold.
void compare_projectors(Comparison& comparison, const std::string& name, const at::Tensor& expected_LFF,
                        const StatisticsProvider& statistics, const std::vector<int>& layers, double threshold);

/// What settle() makes of the update solved from recorded keys, against the recorded change of the weight.
void compare_settled(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                     const LocateEditor& editor, const LayerProblem& problem, const WeightDelta& solved);

/// A change of which only some entries are written (RECT): the same ones but for 0.5 %, with the same values there.
void compare_masked(Comparison& comparison, const std::string& name, const at::Tensor& expected_DF,
                    const at::Tensor& got_DF);

}  // namespace emend::editors::detail
