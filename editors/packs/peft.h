// An edit pack as a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <emend/editors/packs/pack.h>
#include <emend/models/model.h>

namespace emend::editors {

struct PeftOptions {
  /// Largest rank a layer's adapter may have; 0: whatever is exact (at most the smaller side of the matrix).
  int64_t max_rank = 0;
  /// Largest relative error ‖ΔW − BA‖/‖ΔW‖ that a cut to `max_rank` may leave before the export is refused.
  double max_error = 1e-5;
};

/// ΔW of one weight as adapters hold it: B·A.
struct AdapterFactors {
  std::string weight;
  models::Orientation orientation = models::Orientation::kOutIn;
  at::Tensor a_RI, b_OR;  ///< float32, host
  double error = 0;  ///< ‖ΔW − BA‖/‖ΔW‖, of the factors as stored; 0 up to rounding where the rank suffices
  [[nodiscard]] int64_t rank() const { return a_RI.size(0); }
};
/// The changes of a pack, one a weight. Throws Error(kInvalidArgument) if a cut to `max_rank` leaves more than
/// max_error, naming weight, rank and error; Error(kUnsupported) for changes of biases and edits beside the weights.
[[nodiscard]] std::vector<AdapterFactors> adapter_factors(const EditPack& pack, const PeftOptions& options = {});

/// Writes the adapter into a folder that appears whole or not at all. Its base is named ORG/NAME if it
/// comes from the Hugging Face cache. lora_alpha equals
/// the rank of each layer, so the scale is 1. `model` gives module names and orientation (fan_in_fan_out for Conv1D).
/// Factors are used as they are when their rank fits, else ΔW is cut by a singular value decomposition.
/// Throws Error(kInvalidArgument) if the cut leaves more than max_error, naming weight, rank and error;
/// Error(kUnsupported) for deltas that an adapter cannot hold (biases, weights outside linear modules); Error(kIo).
std::vector<AdapterFactors> export_peft(const std::filesystem::path& folder, const EditPack& pack,
                                        const models::Model& model, const PeftOptions& options = {});

}  // namespace emend::editors
