//   D hidden width · F input width of a matrix · K directions · T tokens
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/post_norm.h>
#include <emend/models/config.h>
#include <emend/workflow/direct/change.h>

#include <algorithm>
#include <map>
#include <set>

namespace emend::workflow {
using models::Part;

static constexpr double kKeyRidge = 1e-3;  // of least squares on keys, relative to the mean squared key

// A matrix that writes into the stream.
using Place = std::pair<Part, int>;

static hooks::SiteRef key_site(const Place& place) {
  return {place.first == Part::kAttnOut ? hooks::Site::kAttnZ : hooks::Site::kMlpDownIn, place.second};
}

// Keys of one matrix, summed up as they come: [F, F], [F] and what else a post norm needs.
struct KeySums {
  at::Tensor squares_FF, sum_F, change_D;
  int64_t tokens = 0;

  // The mean of k·kᵀ, times x.
  [[nodiscard]] at::Tensor moment_of(const at::Tensor& x_FK) const {
    return squares_FF.mm(x_FK) / static_cast<double>(tokens);
  }
  [[nodiscard]] at::Tensor mean() const { return sum_F / static_cast<double>(tokens); }
};
using AllKeys = std::map<Place, KeySums>;

// What the change of a matrix is fitted to: keys of the texts, and of those that it spares.
struct DirectKeys {
  AllKeys touched, spared;
  double spare_weight = 0;

  std::map<Place, at::Tensor> factors;  // Cholesky's, of what solve() has solved with

  // (M + λ M_spared + ridge)⁻¹ x
  [[nodiscard]] at::Tensor solve(const Place& place, const at::Tensor& x_FK) {
    auto& factor = factors[place];
    if (!factor.defined()) {
      const KeySums& sums = touched.at(place);
      at::Tensor moment = sums.squares_FF / static_cast<double>(sums.tokens);
      if (!spared.empty()) {
        KeySums& others = spared.at(place);
        moment.add_(others.squares_FF, spare_weight / static_cast<double>(others.tokens));
        others.squares_FF.reset();  // in the factor from now on
      }
      at::Tensor diagonal = moment.diagonal();
      diagonal.add_(kKeyRidge * diagonal.mean().item<double>());
      factor = at::linalg_cholesky(moment);
    }
    return at::cholesky_solve(x_FK, factor);
  }
};

namespace {

at::Tensor wide_on_host(const at::Tensor& x) {
  return devices::to_host(x.detach(), devices::Purpose::kDelta).to(at::kDouble);
}

void require_directions_fit(const models::Model& model, std::span<const Directions> directions,
                            const DirectChangeOptions& options) {
  if (directions.empty()) refuse({"directions", "none", "at least one", ""});
  for (const auto& one : directions)
    for (size_t l = 0; l < one.layers.size(); ++l) {
      if (!one.layers[l].defined()) continue;
      if (static_cast<int>(l) >= model.n_layers() || one.layers[l].numel() != model.hidden_size())
        refuse({"directions", "layer " + std::to_string(l) + " of width " + std::to_string(one.layers[l].numel()),
                std::to_string(model.n_layers()) + " layers of width " + std::to_string(model.hidden_size()) +
                    ", as the model has",
                ""});
    }
  const int last = options.layers.last < 0 ? model.n_layers() - 1 : options.layers.last;
  if (last >= model.n_layers() || options.layers.first > last)
    refuse({setting("layers"), std::to_string(options.layers.first) + "-" + std::to_string(last),
            "a range within 0-" + std::to_string(model.n_layers() - 1), ""});
  if (options.from_layer >= model.n_layers())
    refuse({setting("from_layer"), std::to_string(options.from_layer),
            "a layer from 0 to " + std::to_string(model.n_layers() - 1), ""});
  if (options.answer_start && options.spared.empty())
    refuse({"directions", "no texts to spare", "some that tell the beginning of an answer from other tokens", ""});
  if (options.preserve_norm && options.strength != 1)
    refuse({setting("preserve_norm"), "strength " + std::to_string(options.strength), "strength 1", ""});
  if (options.preserve_norm && !options.spared.empty())
    refuse({setting("preserve_norm"), "texts to spare", "one of both: a column is stretched whatever its key", ""});
}

// [D] float64 of one set for a layer; undefined where it has none.
at::Tensor direction_at(const Directions& one, int layer, const DirectChangeOptions& options) {
  const auto from = static_cast<size_t>(options.from_layer >= 0 ? options.from_layer : layer);
  if (from >= one.layers.size() || !one.layers[from].defined()) return {};
  const at::Tensor d = one.layers[from].to(at::kDouble);
  return d.norm().item<double>() > 0 ? d : at::Tensor();
}

bool writes_into_stream(const models::ExpectedTensor& tensor) {
  return tensor.part == Part::kAttnOut || tensor.part == Part::kDown || tensor.part == Part::kExpertDown;
}

// The tensors of a layer's table, by part.
using Tables = std::vector<models::ExpectedTensor>;

DirectFigures figures_of(const editors::WeightDelta& delta, Part part, const editors::ApplyReport& report,
                         double left) {
  return {delta.layer, delta.weight, part, report.weight_norm > 0 ? report.delta_norm / report.weight_norm : 0, left};
}

// Gain of the norm between a matrix and the stream; undefined where there is none.
at::Tensor gain_behind(const models::Model& model, const Tables& tables, int layer, Part matrix) {
  if (model.config().norm_order != models::NormOrder::kSandwich) return {};
  const Part norm = matrix == Part::kAttnOut ? Part::kAttnPostNorm : Part::kMlpPostNorm;
  for (const auto& tensor : tables)
    if (tensor.layer == layer && tensor.part == norm && !tensor.bias)
      return wide_on_host(model.weight(tensor.name)) + (model.config().norm_one_plus ? 1 : 0);
  return {};
}

struct KeyPass {
  const models::Model& model;
  std::map<int, at::Tensor> wanted;  // layer → s·d [D] float64: the keys are those of the model that is steered so
  std::map<int, editors::PostNorm> norms;
  bool last_only = false;  // of each text

  // Of the batch, those that count.
  [[nodiscard]] hooks::CaptureOptions tokens(const models::TokenBatch& batch) const {
    hooks::CaptureOptions options;
    if (!last_only) return options;
    options.tokens = batch.last_tokens();
    return options;
  }
};

void add_keys(const KeyPass& pass, AllKeys& all, const models::TokenBatch& batch) {
  hooks::HookSession session(pass.model.hooks());
  const auto tokens = pass.tokens(batch);
  for (const auto& [place, sums] : all) session.capture(key_site(place), tokens);
  for (const auto& [layer, norm] : pass.norms)
    for (const auto& site : norm.sites()) session.capture(site, tokens);
  session.attach();
  (void)pass.model.forward(batch, {.logit_tokens = models::kNoTokens});
  const auto add = [](at::Tensor& total, const at::Tensor& more) {
    if (total.defined())
      total.add_(more);
    else
      total = more.to(at::kDouble);
  };
  for (auto& [place, sums] : all) {
    const at::Tensor keys = devices::to_host(session.captured(key_site(place))).flatten(1).to(at::kFloat);
    add(sums.squares_FF, keys.t().mm(keys));
    add(sums.sum_F, keys.sum(0, false, at::kDouble));
    sums.tokens += keys.size(0);
    const auto norm = pass.norms.find(place.second);
    if (norm == pass.norms.end()) continue;
    std::vector<at::Tensor> values;
    for (const auto& site : norm->second.sites()) values.push_back(wide_on_host(session.captured(site)));
    add(sums.change_D,
        norm->second.change_for(values, norm->second.apply(values) + pass.wanted.at(place.second)).sum(0));
  }
  session.finish();
}

// The keys at `places` in the texts.
AllKeys keys_of(const KeyPass& pass, const std::set<Place>& places, const std::vector<std::vector<int64_t>>& texts,
                bool steered, const Handles& lent) {
  if (texts.empty()) refuse({"directions", "no texts", "texts whose keys the change is fitted to", ""});
  AllKeys all;
  for (const auto& place : places) all[place];
  models::ControlVector vector;
  for (const auto& [layer, wanted] : pass.wanted) vector.layers[layer] = wanted.to(at::kFloat);
  const auto steering = steered ? models::attach_steering(pass.model, vector) : std::vector<hooks::HookHandle>();
  in_batches(texts, "keys", lent, [&](const models::TokenBatch& batch) { add_keys(pass, all, batch); });
  return all;
}

// With the keys that are not there yet.
std::shared_ptr<DirectKeys> fit_keys(const KeyPass& pass, std::set<Place> places, const DirectChangeOptions& options,
                                     bool steered, const Handles& lent) {
  const bool kept = options.unchanged_keys && pass.norms.empty();
  const auto keys = kept ? options.unchanged_keys : make_direct_keys();
  keys->spare_weight = options.spare_weight;
  std::erase_if(places, [&](const Place& place) { return keys->touched.contains(place); });
  if (places.empty()) return keys;
  keys->touched.merge(keys_of(pass, places, options.texts, steered && !options.unchanged_keys, lent));
  if (!options.spared.empty()) keys->spared.merge(keys_of({pass.model, {}, {}}, places, options.spared, false, lent));
  return keys;
}

editors::WeightDelta ablation(const models::Model& model, const models::ExpectedTensor& tensor, const at::Tensor& q_DK,
                              const DirectChangeOptions& options, DirectKeys& keys) {
  const at::Tensor weight = model.weight(tensor.name);
  if (tensor.bias) {
    const at::Tensor b = wide_on_host(weight);
    return editors::WeightDelta::as_stored(tensor.name, tensor.layer, -options.strength * q_DK.mv(q_DK.t().mv(b)));
  }
  const auto orientation = model.family().orientation;
  const at::Tensor w_DF = orientation == models::Orientation::kInOut ? weight.t() : weight;
  const at::Tensor here = devices::route_like(q_DK, w_DF, devices::Purpose::kDelta);
  const at::Tensor wide_DF = w_DF.detach().to(at::kDouble), read_FK = wide_DF.t().mm(here);
  editors::WeightDelta delta{tensor.name, tensor.layer, orientation, {}, {}, {}};
  if (!options.preserve_norm) {
    delta.left_DR = -options.strength * q_DK;
    delta.right_FR = wide_on_host(read_FK);
    const Place place{tensor.part, tensor.layer};
    if (!keys.spared.empty()) delta.right_FR = keys.solve(place, keys.touched.at(place).moment_of(delta.right_FR));
    return delta;
  }
  const at::Tensor rest_DF = wide_DF - here.mm(read_FK.t());
  const at::Tensor stretch_F = wide_DF.norm(2, 0) / rest_DF.norm(2, 0).clamp_min(1e-30);
  delta.dense_DF = wide_on_host(rest_DF * stretch_F - wide_DF);
  return delta;
}

// The share of the directions that is left in a weight as it is now.
double left_in(const models::Model& model, const editors::WeightDelta& delta, const at::Tensor& q_DK) {
  at::Tensor weight = model.weight(delta.weight);
  if (weight.dim() == 1)
    weight = weight.unsqueeze(1);
  else if (delta.orientation == models::Orientation::kInOut)
    weight = weight.t();
  const at::Tensor wide = weight.detach().to(at::kDouble);
  const at::Tensor read = devices::route_like(q_DK, wide, devices::Purpose::kDelta).t().mm(wide);
  return read.norm().item<double>() / std::max(wide.norm().item<double>(), 1e-300);
}

DirectChange finish(const models::Model& model, const std::string& editor, std::vector<editors::WeightDelta> deltas,
                    std::vector<DirectFigures> figures, std::span<const Directions> directions,
                    const DirectChangeOptions& options) {
  if (deltas.empty())
    refuse({editor, "no direction for any of the layers", "at least one",
            "name a layer whose direction all shall take (" + setting("from_layer") + ")"});
  editors::EditResult result;
  result.editor = editor;
  result.deltas = std::move(deltas);
  result.hparams = {{"strength", options.strength},     {"layers", {options.layers.first, options.layers.last}},
                    {"from_layer", options.from_layer}, {"preserve_norm", options.preserve_norm},
                    {"spared", options.spared.size()},  {"where", options.answer_start ? kAnswerStart : "everywhere"}};
  DirectChange change{editors::EditPack::from_results(model, {&result, 1}, {}), std::move(figures)};
  auto& what = change.pack.extra["directions"] = nlohmann::json::array();
  for (const auto& one : directions)
    what.push_back({{"method", one.method}, {"fingerprint", one.fingerprint}, {"about", one.about}});
  return change;
}

// u with uᵀk near 1 over the texts (0 over those spared) and 1 on average, and the spread of uᵀk.
std::pair<at::Tensor, double> constant_reader(DirectKeys& keys, const Place& place) {
  const at::Tensor mean_F1 = keys.touched.at(place).mean().unsqueeze(1), solved_F1 = keys.solve(place, mean_F1);
  const at::Tensor u_F1 = solved_F1 / mean_F1.t().mm(solved_F1);
  const double square = u_F1.t().mm(keys.touched.at(place).moment_of(u_F1)).item<double>();
  return {u_F1, std::sqrt(std::max(0.0, square - 1))};
}

// The bias of each layer's MLP output, by layer.
std::map<int, std::string> output_biases(const models::Model& model) {
  std::map<int, std::string> names;
  if (model.config().mlp_post_norm()) return names;
  for (const auto& tensor : model.weight_table())
    if (tensor.part == Part::kDown && tensor.bias) names[tensor.layer] = tensor.name;
  return names;
}

// y + s·left·rightᵀx behind the matrix whose input is x, or y + s·b.
void attach_delta(hooks::HookSession& session, const editors::WeightDelta& delta, Part part) {
  const hooks::SiteRef out{part == Part::kAttnOut ? hooks::Site::kAttnOut : hooks::Site::kMlpDownOut, delta.layer};
  const auto like = [](at::Tensor& factor, const at::Tensor& x) -> const at::Tensor& {
    return factor = devices::route_like(factor, x, devices::Purpose::kDelta, devices::Dtype::kMatch);
  };
  if (!delta.low_rank()) {
    session.edit(out, [like, bias = delta.dense_DF](const at::Tensor& y) mutable { return y + like(bias, y); });
    return;
  }
  const auto read = std::make_shared<at::Tensor>();
  session.edit(key_site({part, delta.layer}), [like, read, right = delta.right_FR](const at::Tensor& x) mutable {
    *read = x.flatten(1).mm(like(right, x));
    return at::Tensor();
  });
  session.edit(out, [like, read, left = delta.left_DR.t()](const at::Tensor& y) mutable {
    return at::addmm(y, *read, like(left, y));
  });
}

}  // namespace

std::shared_ptr<DirectKeys> make_direct_keys() {
  return std::make_shared<DirectKeys>();
}

DirectChange ablate_directions(models::Model& model, std::span<const Directions> directions,
                               const DirectChangeOptions& options, const Handles& lent) {
  const at::NoGradGuard no_grad;
  require_directions_fit(model, directions, options);
  const auto tables = model.weight_table();
  auto keys = make_direct_keys();
  if (!options.spared.empty()) {
    require_one_mlp(model.config(), "ablate", false, true);
    std::set<Place> places;
    for (int layer = 0; layer < model.n_layers(); ++layer)
      if (options.layers.contains(layer)) places.insert({{Part::kAttnOut, layer}, {Part::kDown, layer}});
    keys = fit_keys({model, {}, {}, options.answer_start}, places, options, false, lent);
  }
  editors::EditTransaction trial(model);  // what is left is read off the weights as written; nothing is committed
  std::vector<editors::WeightDelta> deltas;
  std::vector<DirectFigures> figures;
  for (const auto& tensor : tables) {
    if (!writes_into_stream(tensor) || !options.layers.contains(tensor.layer) ||
        (tensor.bias && !options.spared.empty()))
      continue;
    lent.cancel.check("ablate");
    std::vector<at::Tensor> columns;
    const at::Tensor gain = gain_behind(model, tables, tensor.layer, tensor.part);
    for (const auto& one : directions)
      if (const at::Tensor d = direction_at(one, tensor.layer, options); d.defined()) {
        columns.push_back(d);
        if (gain.defined() && (gain * d).norm().item<double>() > 0) columns.push_back(gain * d);
      }
    if (columns.empty()) continue;
    const at::Tensor q_DK = orthonormal_basis(columns);
    deltas.push_back(ablation(model, tensor, q_DK, options, *keys));
    const auto report = editors::apply_delta(deltas.back(), trial);
    figures.push_back(figures_of(deltas.back(), tensor.part, report, left_in(model, deltas.back(), q_DK)));
    figures.back().basis_DK = q_DK;
  }
  return finish(model, "ablate", std::move(deltas), std::move(figures), directions, options);
}

DirectChange bake_directions(models::Model& model, std::span<const Directions> directions,
                             const DirectChangeOptions& options, const Handles& lent) {
  const at::NoGradGuard no_grad;
  require_directions_fit(model, directions, options);
  require_one_mlp(model.config(), "bake", true, !options.spared.empty());
  KeyPass pass{model, {}, {}, options.answer_start};
  const auto biases = options.spared.empty() ? output_biases(model) : std::map<int, std::string>();
  std::set<Place> places;
  for (int layer = 0; layer < model.n_layers(); ++layer) {
    if (!options.layers.contains(layer)) continue;
    for (const auto& one : directions)
      if (const at::Tensor d = direction_at(one, layer, options); d.defined()) {
        at::Tensor& wanted = pass.wanted[layer];
        wanted = wanted.defined() ? wanted + options.strength * d : options.strength * d;
      }
    if (!pass.wanted.contains(layer) || biases.contains(layer)) continue;
    places.emplace(Part::kDown, layer);
    if (model.config().mlp_post_norm()) pass.norms.emplace(layer, editors::PostNorm(model, layer));
  }
  if (options.unchanged_keys && !options.spared.empty() && pass.norms.empty())  // ablation will ask for the others
    for (const auto& [part, layer] : std::set<Place>(places)) places.emplace(Part::kAttnOut, layer);
  const auto keys = fit_keys(pass, places, options, true, lent);
  std::vector<editors::WeightDelta> deltas;
  std::vector<DirectFigures> figures;
  editors::EditTransaction trial(model);
  for (const auto& [layer, wanted] : pass.wanted) {
    double spread = 0;
    if (const auto bias = biases.find(layer); bias != biases.end()) {
      deltas.push_back(editors::WeightDelta::as_stored(bias->second, layer, wanted));
    } else {
      const KeySums& sums = keys->touched.at({Part::kDown, layer});
      const auto [u_F1, deviation] = constant_reader(*keys, {Part::kDown, layer});
      const at::Tensor written = sums.change_D.defined() ? sums.change_D / static_cast<double>(sums.tokens) : wanted;
      deltas.push_back(editors::WeightDelta::factors(model.edit_site(layer), written.unsqueeze(1), u_F1));
      spread = deviation;
    }
    const auto report = editors::apply_delta(deltas.back(), trial);
    figures.push_back(figures_of(deltas.back(), Part::kDown, report, spread));
  }
  return finish(model, "bake", std::move(deltas), std::move(figures), directions, options);
}

void require_one_mlp(const models::ModelConfig& config, const std::string& action, bool bakes, bool spares) {
  if (config.no_edit_site.empty() || (!bakes && !spares)) return;
  std::string advice;
  if (bakes) advice = action == "optimise" ? "try " + setting("by", "ablate") : "ablate the direction, or steer by it";
  if (spares) append_item(advice, "leave out " + setting("spare") + " and " + setting("where"), "; ");
  throw Error(ErrorClass::kUnsupported,
              {action, "a " + config.family + " model, a mixture of experts", "one with a single MLP a layer", advice});
}

bool changes_biases(const models::Model& model, const std::string& way, models::LayerRange layers) {
  const auto in_range = [&](int layer) { return layers.contains(layer); };
  if (way == "bake")
    return std::ranges::any_of(output_biases(model), in_range, [](const auto& one) { return one.first; });
  return way == "ablate" && std::ranges::any_of(model.weight_table(), [&](const models::ExpectedTensor& tensor) {
           return tensor.bias && writes_into_stream(tensor) && in_range(tensor.layer);
         });
}

void require_adapter(const std::string& form, const models::Model& model, const std::string& way,
                     models::LayerRange layers, bool spares) {
  const bool experts = form == "lora" && way == "ablate" && model.config().n_experts > 0;
  if (!experts && (spares || !changes_biases(model, way, layers))) return;
  throw Error(ErrorClass::kUnsupported,
              {setting("save", form), way + " changes " + (experts ? "experts" : "biases") + " of this model",
               "a change of matrices that every token enters",
               std::string("save pack, gguf or model") +
                   (experts ? "" : "; or spare texts (" + setting("spare") + "): biases then stay")});
}

DirectChange scaled(const DirectChange& change, const Strengths& strengths) {
  DirectChange other{change.pack, {}};
  other.pack.deltas.clear();
  for (size_t i = 0; i < change.pack.deltas.size(); ++i) {
    const double by = strengths(change.figures[i]);
    if (by == 0) continue;
    auto& delta = other.pack.deltas.emplace_back(change.pack.deltas[i]);
    at::Tensor& factor = delta.low_rank() ? delta.left_DR : delta.dense_DF;
    factor = by * factor;
    other.figures.push_back(change.figures[i]);
    other.figures.back().relative_norm *= std::abs(by);
  }
  return other;
}

void measure_left(models::Model& model, DirectChange& change) {
  const at::NoGradGuard no_grad;
  editors::EditTransaction trial(model);
  for (size_t i = 0; i < change.figures.size(); ++i) {
    auto& figures = change.figures[i];
    if (!figures.basis_DK.defined()) continue;
    (void)editors::apply_delta(change.pack.deltas[i], trial);
    figures.left = left_in(model, change.pack.deltas[i], figures.basis_DK);
  }
}

TrialChange::TrialChange(models::Model& model, const DirectChange& change) : session_(model.hooks()) {
  for (size_t i = 0; i < change.pack.deltas.size(); ++i) {
    const auto& delta = change.pack.deltas[i];
    const Part part = change.figures[i].part;
    if (part != Part::kExpertDown && (delta.low_rank() || delta.dense_DF.dim() == 1)) {
      attach_delta(session_, delta, part);
      continue;
    }
    if (!written_) written_ = std::make_unique<editors::EditTransaction>(model);
    (void)editors::apply_delta(delta, *written_);
  }
  session_.attach();
}

TrialChange::~TrialChange() = default;

}  // namespace emend::workflow
