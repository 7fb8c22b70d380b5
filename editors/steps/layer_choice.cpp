#include <emend/core/text.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/hparams/locate.h>
#include <emend/models/family.h>

#include <set>

namespace emend::editors {
namespace {

// "model.layers[27].mlp.down_proj.weight" → "model.layers.27.mlp.down_proj".
std::string module_path(const std::string& name) {
  std::string path = replace_all(replace_all(name, "[", "."), "]", "");
  for (const std::string suffix : {".weight", ".bias"})
    if (path.ends_with(suffix)) path.resize(path.size() - suffix.size());
  return path;
}

int layer_of(const std::string& parameter, const models::Model& model, const std::string& where) {
  const auto plain = [&](const std::string& name) { return models::without_base(model.family(), module_path(name)); };
  const std::string wanted = plain(parameter);
  for (int layer = 0; layer < model.n_layers(); ++layer)
    if (plain(model.edit_site(layer).weight_name) == wanted) return layer;
  const std::string example = module_path(model.edit_site(0).weight_name);
  for (const auto& name : model.weight_names())
    if (plain(name) == wanted)
      throw Error(ErrorClass::kUnsupported,
                  {where, "\"" + parameter + "\"", "the MLP output matrix, such as " + example,
                   "give the same layers' output matrices, or `layers`"});
  refuse({where, "\"" + parameter + "\", which this model does not have",
          "the MLP output matrix of a layer, such as " + example,
          "use hyper-parameters made for this model, or give `layers`"});
}

}  // namespace

const hparams::Schema<LayerChoice>& layer_choice_schema() {
  using H = LayerChoice;
  static const auto schema =
      hparams::Schema<H>("layer choice")
          .field("layers", &H::layers, "blocks whose MLP output matrix is meant, counted from 0; or give inner_params",
                 {.min = 0})
          .field("inner_params", &H::inner_params, "the same by name, such as model.layers[27].mlp.down_proj.weight")
          .check("layers", "either layers or inner_params",
                 [](const H& h) { return h.layers.empty() != h.inner_params.empty(); })
          .check("layers", hparams::kAscending, [](const H& h) { return hparams::ascending(h.layers); });
  return schema;
}

void require_layers(const std::vector<int64_t>& layers, const models::Model& model, const hparams::RawHparams& raw) {
  for (const int64_t layer : layers)
    if (layer >= model.n_layers())
      refuse({raw.where("layers"), "layer " + std::to_string(layer), "0 to " + std::to_string(model.n_layers() - 1),
              "use hyper-parameters made for this model"});
}

std::vector<int> chosen_layers(const LayerChoice& choice, const models::Model& model, const hparams::RawHparams& raw) {
  require_layers(choice.layers, model, raw);
  std::set<int> layers;
  for (const int64_t layer : choice.layers) layers.insert(model.edit_site(static_cast<int>(layer)).layer);
  for (const auto& parameter : choice.inner_params)
    layers.insert(layer_of(parameter, model, raw.where("inner_params")));
  return {layers.begin(), layers.end()};
}

int chosen_layer(const LayerChoice& choice, const models::Model& model, const hparams::RawHparams& raw) {
  const auto layers = chosen_layers(choice, model, raw);
  if (layers.size() != 1)
    refuse({raw.where(choice.layers.empty() ? "inner_params" : "layers"), std::to_string(layers.size()) + " layers",
            "one layer", ""});
  return layers[0];
}

}  // namespace emend::editors
