#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/devices/cores.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/locate.h>
#include <emend/editors/steps/neurons.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/products.h>

#include <algorithm>
#include <functional>

namespace emend::editors {
namespace {

using models::Part;

at::Tensor columns_at(const at::Tensor& places_E, int64_t width) {
  return at::one_hot(places_E, width).t().to(at::kDouble).contiguous();
}

void write(const WeightDelta& delta, EditTransaction& transaction, EditResult& result) {
  add_delta(delta, transaction, result).solver = kWholeNeurons;
}

void write_rows(const models::EditSite& site, const at::Tensor& places_E, const at::Tensor& rows_ED,
                EditTransaction& transaction, EditResult& result) {
  const at::Tensor old_ED =
      devices::to_host(oriented(transaction.model(), site)).index_select(0, places_E).to(at::kDouble);
  const at::Tensor change_ED = devices::to_host(rows_ED).to(at::kDouble) - old_ED;
  write(WeightDelta::factors(site, columns_at(places_E, site.out_features), change_ED.t().contiguous()), transaction,
        result);
}

}  // namespace

MlpWeights MlpWeights::of(const models::Model& model, int layer) {
  MlpWeights weights;
  weights.down = model.edit_site(layer);
  for (const auto& tensor : model.weight_table()) {
    const bool fused = tensor.part == Part::kGateUp, gate = tensor.part == Part::kGate, up = tensor.part == Part::kUp;
    if (tensor.layer != layer || !(fused || gate || up)) continue;
    if (tensor.bias) {
      weights.biases.push_back(tensor.name);
      continue;
    }
    models::EditSite site{layer,
                          tensor.name,
                          "",
                          model.family().orientation,
                          weights.down.out_features,
                          weights.down.in_features * (fused ? 2 : 1)};
    weights.fused |= fused;
    (up ? weights.up : weights.gate) = site;
  }
  if (weights.gate.weight_name.empty()) std::swap(weights.gate, weights.up);
  return weights;
}

std::map<int, TextPass> TextPass::of(const models::Model& model, const models::Model& reader,
                                     const std::vector<std::vector<int64_t>>& rows, const std::vector<int>& layers,
                                     const EditContext& context) {
  const at::NoGradGuard no_grad;
  constexpr size_t kTokensAtOnce = 4096;
  std::map<int, TextPass> passes;
  std::map<int, std::vector<at::Tensor>> inputs;
  hooks::HookSession session(reader.hooks());
  for (const int layer : layers) {
    const at::Tensor home = solve_home(model, model.edit_site(layer));
    session.edit({hooks::Site::kMlpIn, layer}, [&inputs, layer, home](const at::Tensor& x) {
      inputs[layer].push_back(
          devices::route_like(x.to(at::kBFloat16, false, /*copy=*/true), home, devices::Purpose::kKeys));
      return at::Tensor();
    });
    session.edit({hooks::Site::kMlpDownIn, layer}, [&passes, layer, home](const at::Tensor& keys) {
      const at::Tensor sum_F = devices::route_like(keys.to(at::kDouble).square().sum(0), home, devices::Purpose::kKeys);
      at::Tensor& energy_F = passes[layer].energy_F;
      energy_F = energy_F.defined() ? energy_F + sum_F : sum_F;
      return at::Tensor();
    });
  }
  session.stop_after({hooks::Site::kMlpDownIn, *std::max_element(layers.begin(), layers.end())}).attach();
  for (size_t begin = 0; begin < rows.size();) {
    context.cancel.check("text");
    std::vector<std::vector<int64_t>> some;
    for (size_t tokens = 0; begin < rows.size() && (some.empty() || tokens + rows[begin].size() <= kTokensAtOnce);)
      tokens += rows[begin].size(), some.push_back(rows[begin++]);
    (void)reader.forward(models::TokenBatch::from_rows(some), {.logit_tokens = models::kNoTokens});
  }
  session.finish();
  for (auto& [layer, pass] : passes) {
    pass.inputs_ND = at::cat(inputs[layer]);
    pass.energy_F = pass.energy_F / pass.inputs_ND.size(0);
  }
  return passes;
}

std::vector<int64_t> vacant_neurons(const models::Model& model, const MlpWeights& weights) {
  const int64_t width = weights.down.in_features;
  const at::Tensor gate_FD = oriented(model, weights.gate).narrow(0, 0, width), down_DF = oriented(model, weights.down);
  const at::Tensor vacant_F =
      devices::to_host((gate_FD == 0).all(1)).logical_and(devices::to_host((down_DF == 0).all(0)));
  const at::Tensor places = vacant_F.nonzero().squeeze(1).contiguous();
  return {places.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>() + places.numel()};
}

std::vector<int64_t> spare_neurons(const models::Model& model, const MlpWeights& weights, const TextPass& pass,
                                   size_t count, size_t more, const std::set<int64_t>& used) {
  constexpr double kRare = 1e-3;
  const at::Tensor norm_F = oriented(model, weights.down).to(at::kDouble).square().sum(0);
  const at::Tensor share_F =
      devices::to_host(pass.energy_F * devices::route_like(norm_F, pass.energy_F, devices::Purpose::kKeys));
  const double least = kRare * share_F.median().item<double>();
  const at::Tensor order = share_F.argsort();
  std::vector<int64_t> places = vacant_neurons(model, weights);
  std::erase_if(places, [&](int64_t j) { return used.contains(j); });
  places.resize(std::min(places.size(), count + more));
  const std::set<int64_t> vacant(places.begin(), places.end());
  for (int64_t k = 0; k < order.numel() && places.size() < count + more; ++k) {
    const int64_t j = order[k].item<int64_t>();
    if (share_F[j].item<double>() >= least && !used.contains(j) && !vacant.contains(j)) places.push_back(j);
  }
  if (places.size() < count)
    throw Error(ErrorClass::kInvalidArgument,
                {"layer " + std::to_string(weights.down.layer),
                 std::to_string(count) + " neurons to be written and " + std::to_string(places.size()) + " to spare",
                 "two a subject in a layer of gates, and one a release",
                 "name more `layers` or `release_layers`, or edit in smaller parts"});
  return places;
}

void write_neurons(const MlpWeights& weights, const NewNeurons& neurons, EditTransaction& transaction,
                   EditResult& result) {
  const int64_t width = weights.down.in_features;
  const at::Tensor places_E = at::tensor(neurons.places, at::kLong);
  if (weights.fused) {
    write_rows(weights.gate, at::cat({places_E, places_E + width}), at::cat({neurons.gate_ED, neurons.up_ED}),
               transaction, result);
  } else {
    write_rows(weights.gate, places_E, neurons.gate_ED, transaction, result);
    if (weights.gated()) write_rows(weights.up, places_E, neurons.up_ED, transaction, result);
  }
  for (const auto& name : weights.biases) {
    const at::Tensor old = devices::to_host(transaction.model().weight(name)).to(at::kDouble);
    at::Tensor change = at::zeros_like(old);
    for (int64_t part = 0; part < old.size(0); part += width)
      change.index_copy_(0, places_E + part, -old.index_select(0, places_E + part));
    write(WeightDelta::as_stored(name, weights.down.layer, change), transaction, result);
  }
  const at::Tensor old_DE =
      devices::to_host(oriented(transaction.model(), weights.down)).index_select(1, places_E).to(at::kDouble);
  write(WeightDelta::factors(weights.down, devices::to_host(neurons.down_DE).to(at::kDouble) - old_DE,
                             columns_at(places_E, width)),
        transaction, result);
}

void grow_columns(const MlpWeights& weights, const std::vector<int64_t>& places, const at::Tensor& change_DE,
                  EditTransaction& transaction, EditResult& result) {
  const std::string& name = weights.down.weight_name;
  WeightDelta& delta = *std::ranges::find(result.deltas, name, &WeightDelta::weight);
  const at::Tensor index_E = delta.right_FR.index_select(0, at::tensor(places, at::kLong)).argmax(1);
  delta.left_DR = delta.left_DR.index_add(1, index_E, devices::to_host(change_DE).to(at::kDouble));
  models::Model& model = transaction.model();
  model.set_weight(
      name, devices::route_like(transaction.originals().at(name), model.weight(name), devices::Purpose::kSnapshot));
  note_write(*std::ranges::find(result.layers, name, &LayerFigures::weight), apply_delta(delta, transaction));
}

namespace {

constexpr int64_t kGateBlock = 192;  // of add_products

at::Tensor solve(const at::Tensor& chol_DD, const at::Tensor& b_D) {
  return at::cholesky_solve(b_D.unsqueeze(1), chol_DD).squeeze(1);
}

// Σ c x.
at::Tensor weighted_sum(const at::Tensor& x_ND, const at::Tensor& c_N) {
  return x_ND.t().mv(c_N.to(x_ND.scalar_type())).to(at::kDouble);
}

void each(const at::Tensor& rows_ND, int64_t n, const std::function<void(int64_t)>& work) {
  if (rows_ND.is_cpu()) return devices::each_on_a_core(n, work);
  for (int64_t i = 0; i < n; ++i) work(i);
}

// [U,N] in the rows' dtype: what each gate gives for each row. In blocks that do not depend on the number of cores, so
// that the numbers do not either.
at::Tensor values_of(const at::Tensor& x_ND, const std::vector<at::Tensor>& gates) {
  constexpr int64_t kBlock = 4096;
  const at::Tensor gates_UD = at::stack(gates).to(x_ND.scalar_type());
  at::Tensor values_UN = at::empty({gates_UD.size(0), x_ND.size(0)}, x_ND.options());
  each(x_ND, (x_ND.size(0) + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t begin = block * kBlock, count = std::min(kBlock, x_ND.size(0) - begin);
    values_UN.narrow(1, begin, count).copy_(models::product(gates_UD, x_ND.narrow(0, begin, count)));
  });
  return values_UN;
}

}  // namespace

GateFit::GateFit(at::Tensor rows_ND, at::Tensor usual_N, ThinnedText start, double ridge) : thinned_(start) {
  const at::NoGradGuard no_grad;
  if (!at::isfinite(rows_ND).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"gate", "a hidden state that is not finite", "finite numbers",
                                       "load the model in float32, or look for a damaged weight"});
  all_ = {std::move(rows_ND), std::move(usual_N), {}, {}};
  start_ = all_;
  if (thinned_.step > 1) {
    const auto whole = all_.usual_N.options().dtype(at::kLong);
    const at::Tensor kept = at::cat(
        {at::arange(0, thinned_.text, thinned_.step, whole), at::arange(thinned_.text, all_.x_ND.size(0), whole)});
    start_ = {all_.x_ND.index_select(0, kept), all_.usual_N.index_select(0, kept), {}, {}};
    start_.usual_N.narrow(0, 0, text_of_start()).mul_(start_scale());
  }
  start_.a_DD = start_.usual_N.new_zeros({start_.x_ND.size(1), start_.x_ND.size(1)});
  detail::add_products(start_.a_DD, start_.x_ND, start_.usual_N, kGateBlock);
  start_.sum_D = weighted_sum(start_.x_ND, start_.usual_N);
  ridge_DD_ = at::eye(start_.a_DD.size(0), start_.a_DD.options()) * (start_.a_DD.diagonal().mean() * ridge);
  chol_DD_ = at::linalg_cholesky(start_.a_DD + ridge_DD_);
}

at::Tensor GateFit::reader(const at::Tensor& open_MD) const {
  const at::NoGradGuard no_grad;
  const at::Tensor x_MD = open_MD.to(at::kDouble);
  const int64_t m = x_MD.size(0);
  // (A + XᵀX/M)⁻¹Xᵀ1/M = A⁻¹Xᵀ(M + X A⁻¹Xᵀ)⁻¹1: the factor of A serves every gate.
  const at::Tensor z_DM = at::cholesky_solve(x_MD.t().contiguous(), chol_DD_);
  const at::Tensor gram_MM = x_MD.mm(z_DM) + at::eye(m, x_MD.options()) * m;
  return z_DM.mv(solve(at::linalg_cholesky(gram_MM), at::ones({m}, x_MD.options()))).to(at::kFloat);
}

at::Tensor GateFit::level() const {
  const at::NoGradGuard no_grad;
  return solve(chol_DD_, start_.sum_D).to(at::kFloat);
}

// A gate on its way, with the sums over the rows that were within its margin last.
struct GateFit::Search {
  at::Tensor gate_D;          // float64
  at::Tensor sign_N, c_N;     // float64, of all rows
  at::Tensor within_N;        // c of the rows within its margin, else 0
  at::Tensor counted_N;       // the same when the sums were made
  at::Tensor left_DD, sum_D;  // ρI + Σ counted x xᵀ, of which only the lower triangle is right, and Σ counted y x
  bool rests = false;

  void begin_anew(const at::Tensor& ridge_DD) {
    left_DD = ridge_DD.clone();
    sum_D.zero_();
    counted_N = at::zeros_like(counted_N);
  }
  // Only what came into the margin, or left it, since the last step; from nothing, where fewer rows are within it.
  void count(const Rows& rows, const at::Tensor& now_N, const at::Tensor& ridge_DD, const at::Tensor& within) {
    at::Tensor index = (now_N != counted_N).nonzero().squeeze(1);
    if (index.size(0) > within.size(0)) {
      begin_anew(ridge_DD);
      index = within;
    }
    const at::Tensor x_ND = rows.x_ND.index_select(0, index), change_N = (now_N - counted_N).index_select(0, index);
    detail::add_products(left_DD, x_ND, change_N, kGateBlock);
    sum_D.add_(weighted_sum(x_ND, change_N * sign_N.index_select(0, index)));
    counted_N = now_N;
  }
};

GateFit::Search GateFit::search(const Rows& rows, const GateRule& rule, at::Tensor gate_D) const {
  Search search;
  search.gate_D = std::move(gate_D);
  search.sign_N = at::full_like(rows.usual_N, -1).index_copy_(0, rule.index_E, rule.sign_E.to(at::kDouble));
  search.c_N = rows.usual_N.index_copy(0, rule.index_E, rule.weight_E);
  const bool summed = rows.a_DD.defined();
  search.counted_N = summed ? rows.usual_N : at::zeros_like(rows.usual_N);
  search.left_DD = summed ? rows.a_DD + ridge_DD_ : ridge_DD_.clone();
  search.sum_D = summed ? -rows.sum_D : ridge_DD_.new_zeros({ridge_DD_.size(0)});
  if (summed) {  // the rule's own signs
    const at::Tensor own_ED = rows.x_ND.index_select(0, rule.index_E), c_E = rows.usual_N.index_select(0, rule.index_E);
    search.sum_D.add_(weighted_sum(own_ED, c_E * (rule.sign_E.to(at::kDouble) + 1)));
  }
  return search;
}

// Where the gradient of the loss over the rows within the margin is 0: (Σ c x xᵀ + ρI)⁻¹ Σ c y x. `now_N`: their c.
at::Tensor GateFit::minimum(const Rows& rows, Search& search, const at::Tensor& now_N) const {
  const at::Tensor index = now_N.nonzero().squeeze(1);
  if (2 * index.size(0) < rows.x_ND.size(1)) {  // Xᵀ(XXᵀ + ρC⁻¹)⁻¹y
    const at::Tensor x = rows.x_ND.index_select(0, index).to(at::kDouble);
    const at::Tensor gram_NN = x.mm(x.t()) + at::diag(ridge_DD_[0][0] / now_N.index_select(0, index));
    return x.t().mv(solve(at::linalg_cholesky(gram_NN), search.sign_N.index_select(0, index)));
  }
  search.count(rows, now_N, ridge_DD_, index);
  const auto [chol_DD, failed] = at::linalg_cholesky_ex(search.left_DD);
  if (failed.item<int64_t>() == 0) return solve(chol_DD, search.sum_D);
  search.begin_anew(ridge_DD_);  // rounding: the sums anew
  search.count(rows, now_N, ridge_DD_, index);
  return solve(at::linalg_cholesky(search.left_DD), search.sum_D);
}

void GateFit::newton(const Rows& rows, std::span<const GateRule> rules, std::vector<at::Tensor>& gates,
                     int64_t steps) const {
  std::vector<Search> searches(gates.size());
  each(rows.x_ND, std::ssize(gates), [&](int64_t u) {
    const auto k = static_cast<size_t>(u);
    searches[k] = search(rows, rules[k], gates[k]);
  });
  std::vector<Search*> moving;
  for (auto& one : searches) moving.push_back(&one);
  for (int64_t step = 0; step < steps && !moving.empty(); ++step) {
    const at::Tensor values_UN = values_of(rows.x_ND, mapped(moving, &Search::gate_D));
    each(rows.x_ND, std::ssize(moving), [&](int64_t k) {
      Search& search = *moving[static_cast<size_t>(k)];
      const at::Tensor now_N = at::where(values_UN[k] * search.sign_N < 1, search.c_N, 0.0);
      search.rests = step > 0 && at::equal(now_N, search.within_N);
      if (search.rests) return;
      search.within_N = now_N;
      search.gate_D = minimum(rows, search, now_N);
    });
    std::erase_if(moving, [](const Search* search) { return search->rests; });
  }
  for (size_t u = 0; u < gates.size(); ++u) gates[u] = searches[u].gate_D;
}

int64_t GateFit::text_of_start() const {
  return (thinned_.text + thinned_.step - 1) / thinned_.step;
}

double GateFit::start_scale() const {
  return static_cast<double>(thinned_.text) / static_cast<double>(text_of_start());
}

GateRule GateFit::on_start(const GateRule& rule) const {
  if (thinned_.step <= 1) return rule;
  const at::Tensor is_text_E = rule.index_E < thinned_.text;
  const at::Tensor kept =
      is_text_E.logical_not().logical_or_(rule.index_E.remainder(thinned_.step) == 0).nonzero().squeeze(1);
  const auto kept_of = [&](const at::Tensor& x) { return x.index_select(0, kept); };
  const at::Tensor place_E =
      at::where(is_text_E, rule.index_E.div(thinned_.step, "floor"), rule.index_E - thinned_.text + text_of_start());
  const at::Tensor weight_E = at::where(is_text_E, rule.weight_E * start_scale(), rule.weight_E);
  return {kept_of(place_E), kept_of(rule.sign_E), kept_of(weight_E)};
}

std::vector<at::Tensor> GateFit::fit(std::span<const GateRule> rules, int64_t steps) const {
  const at::NoGradGuard no_grad;
  std::vector<GateRule> of_start;
  std::vector<at::Tensor> gates;
  for (const auto& rule : rules) {
    const GateRule& own = of_start.emplace_back(on_start(rule));
    // The usual weights' factor gives a first gate for nothing: as if all rows lay within the margin.
    const at::Tensor change_E = own.weight_E * own.sign_E + start_.usual_N.index_select(0, own.index_E);
    gates.push_back(solve(chol_DD_, weighted_sum(start_.x_ND.index_select(0, own.index_E), change_E) - start_.sum_D));
  }
  newton(start_, of_start, gates, steps);
  if (thinned_.step > 1) newton(all_, rules, gates, steps);
  return mapped(gates, [](const at::Tensor& gate_D) { return gate_D.to(at::kFloat); });
}

}  // namespace emend::editors
