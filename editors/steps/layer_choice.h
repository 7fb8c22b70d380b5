// Which blocks an editor works on, as `layers` or as the `inner_params` of EasyEdit's files.
#pragma once

#include <emend/hparams/schema.h>
#include <emend/models/model.h>

namespace emend::editors {

struct LayerChoice {
  std::vector<int64_t> layers;
  std::vector<std::string> inner_params;  ///< "model.layers[27].mlp.down_proj.weight"
};
[[nodiscard]] const hparams::Schema<LayerChoice>& layer_choice_schema();  ///< the fields above

/// Throws Error(kInvalidArgument) naming the place of `layers` in the file if the model lacks one of them.
void require_layers(const std::vector<int64_t>& layers, const models::Model& model, const hparams::RawHparams& raw);
/// The layers meant, ascending. Every inner parameter must name the rewritten MLP output matrix of a layer.
/// Throws Error(kInvalidArgument) naming the place in the file; Error(kUnsupported) for other matrices of the model.
[[nodiscard]] std::vector<int> chosen_layers(const LayerChoice& choice, const models::Model& model,
                                             const hparams::RawHparams& raw);
/// As chosen_layers, for editors of one layer.
[[nodiscard]] int chosen_layer(const LayerChoice& choice, const models::Model& model, const hparams::RawHparams& raw);

}  // namespace emend::editors
