// The upper layers of a model once more in another dtype, for passes that only read them.
//
// Goals: bfloat16 arithmetic where a processor is several times faster in it, while the weights that an edit writes
// stay what they are. Non-goals: a second model to edit (its weights have no names).
#pragma once

#include <emend/models/model.h>

#include <span>

namespace emend::models {

/// Layers `first_layer` to the last, the final norm and the head of `model` in `dtype`, each on the device where the
/// original is; with first_layer 0 also the embedding. It serves project() and passes from first_layer on; an earlier
/// layer is an Error(kInvalidArgument). The weights are those of this moment: later writes to `model` do not reach the
/// copy. It has hook points of its own, no named weights, and shares configuration, adapters and tokenizer. A small
/// model's copy in bfloat16 keeps its matrices also in the order in which they are multiplied (PackedWeight). Throws
/// Error(kDevice) when a device runs out of memory.
[[nodiscard]] Model compute_copy(const Model& model, at::ScalarType dtype, int first_layer);

/// A model or copy once more, with hook points of its own over the same weights: for another thread. It has no named
/// weights and must not outlive a change of the weights.
[[nodiscard]] Model another_view(const Model& model);

/// True if nothing is attached to the hook points that a copy would have to run without.
[[nodiscard]] bool hooks_idle_above(const Model& model, int first_layer);

/// The dtype in which this model's frozen layers are computed fastest at the quality of float32: bfloat16 for a float32
/// model if every device multiplies it natively, otherwise the model's own.
[[nodiscard]] at::ScalarType fast_compute_dtype(const Model& model);
/// The same of a model in `dtype` on these devices, which need not be loaded.
[[nodiscard]] at::ScalarType fast_compute_dtype(at::ScalarType dtype, std::span<const c10::Device> devices);

/// The dtype of passes and texts that only serve an edit: `wanted`, or the model's own where a copy of all of it
/// would be large (not copied_whole) or would run without functions that are attached to the model's hook points.
[[nodiscard]] at::ScalarType writing_dtype(const Model& model, at::ScalarType wanted);
/// Whether a model of so many parameters is small enough to be copied as a whole: 10⁹ at most.
[[nodiscard]] bool copied_whole(int64_t parameters);

}  // namespace emend::models
