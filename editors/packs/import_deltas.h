// Changes of weights that other programs have saved, as deltas.
//
// Goals: exact, or refused; nothing in the source is passed over. Non-goal: pickles (.pt, .bin), never opened.
#pragma once

#include <emend/editors/steps/delta.h>
#include <emend/models/model.h>

#include <filesystem>

namespace emend::editors {

/// Reads
///   a PEFT LoRA folder (adapter_config.json, adapter_model.safetensors): ΔW = scale·B·A for each module;
///   a safetensors file of the pairs that the code of MEMIT and ROME (and EasyEdit's copies) hands around as `deltas`,
///   W being a weight of the model:
///     W.key_mat [F,N] and W.val_mat [D,N]     MEMIT, EMMET, PMET:  ΔW = val·keyᵀ
///     W.left_vector [F] and W.right_vector [D]   ROME:  ΔW = right·leftᵀ
///     W                                        a dense change, in the shape of the weight
///   an .npz archive of the same names, as numpy.savez writes them.
/// `weight` is for files of one change that leaves W out, such as the vectors that the ROME in MEMIT's code caches
/// (left_vector, right_vector): the names are then read as W.left_vector and so on.
/// One delta a weight, in the order of names. Shapes are checked against the model, which is not changed.
/// Throws Error(kNotFound) for a weight that the model lacks (with the closest name), Error(kInvalidArgument) for
/// shapes that do not fit, Error(kUnsupported) for DoRA, trained biases, whole modules and pickles, Error(kCorruption)
/// for half a pair and damaged files, Error(kNumeric) for entries that are not finite.
[[nodiscard]] std::vector<WeightDelta> import_deltas(const std::filesystem::path& source, const models::Model& model,
                                                     const std::string& weight = "");

}  // namespace emend::editors
