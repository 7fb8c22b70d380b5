// UltraEdit (Gu et al., 2025): no subject, no optimisation; one forward and one backward pass a fact.
//
//   For every turn of `batch_size` facts, on the model as the earlier turns have left it:
//   1. k, g: input of the rewritten matrix, and gradient of the loss at its output, at every token (token: mask) or
//      where the target is predicted (token: ans).
//   2. Lifelong normalisation: running mean and deviation of [k; g] over all turns; k̂, ĝ.
//   3. V = −lr·‖k̂‖²·ĝ
//   4. ΔWᵀ = (KᵀK + ridge·I)⁻¹ KᵀV
//
//   N tokens of a turn · F key width · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/training_loop.h>

namespace emend::editors {
namespace {

struct UltraEditHparams : LayerChoice {
  double lr = 1e-6;
  double ridge = 1;
  std::string token = "mask";
  int64_t batch_size = 100;
  int64_t batch_size_once = 10;
  double dropout = 0;
};

// Running mean and variance of rows, as the published code sums them (each turn's variance with n−1), in float64.
struct RunningMoments {
  double count = 0;
  at::Tensor mean, sum;

  void update(const at::Tensor& rows_NS) {
    const auto n = static_cast<double>(rows_NS.size(0));
    const at::Tensor new_mean = devices::to_host(rows_NS.mean(0)).to(at::kDouble);
    const at::Tensor variance = n > 1 ? devices::to_host(rows_NS.var(0)).to(at::kDouble) : at::zeros_like(new_mean);
    if (!mean.defined()) {
      mean = at::zeros_like(new_mean);
      sum = at::zeros_like(new_mean);
    }
    const at::Tensor delta = new_mean - mean;
    sum = sum + n * variance + count * n * delta.square() / (count + n);
    mean = mean + n * delta / (count + n);
    count += n;
  }

  [[nodiscard]] at::Tensor normalise(const at::Tensor& rows_NS) const {
    constexpr double kEpsilon = std::numeric_limits<float>::epsilon();
    const at::Tensor deviation = (sum / (count - 1 + kEpsilon)).sqrt() + kEpsilon;
    const auto like = [&](const at::Tensor& x) {
      return devices::route_like(x, rows_NS, devices::Purpose::kStatistics, devices::Dtype::kMatch);
    };
    return (rows_NS - like(mean)) / like(deviation);
  }
};

// Layers of one shape share their moments, as published.
using Memory = std::map<std::string, RunningMoments>;

std::string shape_key(const models::EditSite& site) {
  return std::to_string(site.in_features) + "x" + std::to_string(site.out_features);
}

class UltraEditTurn {
 public:
  UltraEditTurn(const UltraEditHparams& hparams, const std::vector<int>& layers, models::Model& model,
                const EditContext& context, Memory& memory, EditResult& result)
      : hparams_(hparams), layers_(layers), model_(model), context_(context), memory_(memory), result_(result) {}

  // Facts [begin, end) of the batch.
  void run(const RenderedBatch& batch, size_t begin, size_t end, EditTransaction& transaction) {
    keys_.resize(layers_.size());
    grads_.resize(layers_.size());
    for (size_t first = begin; first < end; first += static_cast<size_t>(hparams_.batch_size_once)) {
      context_.cancel.check("edit");
      collect(batch, first, std::min(end, first + static_cast<size_t>(hparams_.batch_size_once)));
    }
    for (size_t i = 0; i < layers_.size(); ++i) write(i, transaction);
  }

 private:
  void collect(const RenderedBatch& batch, size_t begin, size_t end) {
    std::vector<LearningRow> rows;
    int64_t labels = 0;
    for (size_t i = begin; i < end; ++i) {
      const RenderedFact& fact = batch.rendered[i];
      rows.push_back(learning_row(fact, Objective::kTargetNew));
      rows.back().ids.push_back(fact.target_ids.back());  // its key counts although nothing is predicted after it
      labels += static_cast<int64_t>(fact.target_ids.size());
    }
    const LearningPass pass(model_, rows, layers_.front());
    std::vector<double> weights, nll;
    for (const auto& row : rows)
      weights.push_back(static_cast<double>(row.labels.size()) / static_cast<double>(labels));
    const auto signals = layer_signals(model_, pass, layers_, weights, &nll);
    for (size_t i = begin; i < end; ++i) note(batch, i, nll[i - begin]);
    const at::NoGradGuard no_grad;
    const std::vector<int64_t> tokens = used_tokens(pass, rows);
    for (size_t i = 0; i < layers_.size(); ++i) {
      at::Tensor keys_NF = signals[i].keys_NF.to(dtype()), grad_ND = signals[i].grad_ND.to(dtype());
      if (!tokens.empty()) {
        const at::Tensor index = devices::index_on(tokens, keys_NF);
        keys_NF = keys_NF.index_select(0, index);
        grad_ND = grad_ND.index_select(0, index);
      }
      memory_[shape_key(model_.edit_site(layers_[i]))].update(at::cat({keys_NF, grad_ND}, 1));
      keys_[i].push_back(keys_NF);
      grads_[i].push_back(grad_ND);
    }
  }

  // Empty: all.
  [[nodiscard]] std::vector<int64_t> used_tokens(const LearningPass& pass, const std::vector<LearningRow>& rows) const {
    std::vector<int64_t> tokens;
    if (hparams_.token == "mask") return tokens;
    for (size_t r = 0; r < rows.size(); ++r)
      for (const auto& [token, id] : rows[r].labels)
        tokens.push_back(pass.batch().token(static_cast<int64_t>(r), token));
    return tokens;
  }

  void write(size_t i, EditTransaction& transaction) {
    const at::NoGradGuard no_grad;
    const models::EditSite site = model_.edit_site(layers_[i]);
    const at::Tensor keys_NF = at::cat(keys_[i]), grad_ND = at::cat(grads_[i]);
    const at::Tensor normal_NS = memory_.at(shape_key(site)).normalise(at::cat({keys_NF, grad_ND}, 1));
    const at::Tensor k_hat = normal_NS.narrow(1, 0, site.in_features),
                     g_hat = normal_NS.narrow(1, site.in_features, site.out_features);
    const at::Tensor value_ND = k_hat.square().sum(1, true) * g_hat * -hparams_.lr;
    const WeightDelta delta = solve(site, keys_NF, value_ND);
    LayerFigures& figures = add_delta(delta, transaction, result_);
    const std::string name = "layer." + std::to_string(site.layer) + ".";
    record(context_, name + "keys", keys_NF.t());
    record(context_, name + "values", value_ND.t());
    if (context_.trace) record(context_, name + "update", delta.matrix());
    figures.key_norm = keys_NF.norm(2, 1).mean().item<double>();
    figures.solver = keys_NF.size(0) < site.in_features ? "push-through" : "dense";
  }

  // (KᵀK + ridge·I)⁻¹KᵀV = Kᵀ(KKᵀ + ridge·I)⁻¹V: the smaller of the two systems is solved.
  [[nodiscard]] WeightDelta solve(const models::EditSite& site, const at::Tensor& keys_NF,
                                  const at::Tensor& value_ND) const {
    const at::Tensor home = solve_home(model_, site);
    const at::Tensor K = routed(keys_NF, home, context_.solve_dtype), V = routed(value_ND, home, context_.solve_dtype);
    const bool few = K.size(0) < K.size(1);
    at::Tensor system = few ? K.mm(K.t()) : K.t().mm(K);
    system.diagonal().add_(hparams_.ridge);
    const at::Tensor factor = at::linalg_cholesky(system);
    if (!few) return WeightDelta::dense(site, at::cholesky_solve(K.t().mm(V), factor).t());
    const at::Tensor left_DN = at::cholesky_solve(V, factor).t();
    const int64_t n = K.size(0), d = site.out_features, f = site.in_features;
    if (n * (d + f) < d * f) return WeightDelta::factors(site, left_DN, K.t());
    return WeightDelta::dense(site, left_DN.mm(K));
  }

  void note(const RenderedBatch& batch, size_t i, double nll) {
    Target target;
    target.curve = {{nll, nll, 0, 0, std::exp(-nll)}};
    target.steps = 1;
    result_.outcomes[batch.places[i]] = make_outcome(model_.tokenizer(), batch.rendered[i], target);
  }

  [[nodiscard]] at::ScalarType dtype() const { return detail::work_dtype(model_); }

  const UltraEditHparams& hparams_;
  const std::vector<int>& layers_;
  models::Model& model_;
  const EditContext& context_;
  Memory& memory_;
  EditResult& result_;
  std::vector<std::vector<at::Tensor>> keys_, grads_;  // [layer][pass]
};

class UltraEdit final : public NamedEditor {
 public:
  UltraEdit(UltraEditHparams hparams, const RecipeInputs& in)
      : NamedEditor(in), hparams_(std::move(hparams)), layers_(chosen_layers(hparams_, in.model, in.raw)) {}

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override {
    return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
      EditTransaction transaction(model, context.transaction);
      Memory memory = memory_;  // kept only if the edit succeeds
      const auto turn = static_cast<size_t>(hparams_.batch_size);
      for (size_t begin = 0; begin < batch.rendered.size(); begin += turn) {
        const size_t end = std::min(batch.rendered.size(), begin + turn);
        context.report("edit", begin, batch.rendered.size(), batch.rendered[begin].where);
        UltraEditTurn(hparams_, layers_, model, context, memory, result).run(batch, begin, end, transaction);
      }
      context.cancel.check("edit");
      if (batch.rendered.size() > turn) merge_turns(transaction, result);
      transaction.commit();
      memory_ = std::move(memory);
    });
  }

  [[nodiscard]] std::map<std::string, at::Tensor> state() const override {
    std::map<std::string, at::Tensor> state;
    for (const auto& [shape, moments] : memory_) {
      state[shape + ".count"] = at::scalar_tensor(moments.count, at::kDouble);
      state[shape + ".mean"] = moments.mean;
      state[shape + ".sum"] = moments.sum;
    }
    return state;
  }
  void load_state(const std::map<std::string, at::Tensor>& state) override {
    Memory memory;
    for (const auto& [name, value] : state) {
      RunningMoments& moments = memory[name.substr(0, name.rfind('.'))];
      if (name.ends_with(".count")) moments.count = value.item<double>();
      if (name.ends_with(".mean")) moments.mean = value.to(at::kDouble);
      if (name.ends_with(".sum")) moments.sum = value.to(at::kDouble);
    }
    memory_ = std::move(memory);
  }

 private:
  // One exact delta a layer instead of one a turn.
  void merge_turns(const EditTransaction& transaction, EditResult& result) const {
    result.deltas.clear();
    result.layers.clear();
    for (const int layer : layers_)
      add_change(transaction, transaction.model().edit_site(layer).weight_name, layer, result);
  }

  UltraEditHparams hparams_;
  std::vector<int> layers_;
  Memory memory_;
};

}  // namespace

EditorInfo make_ultraedit() {
  using H = UltraEditHparams;
  static const auto schema =
      hparams::Schema<H>("ultraedit")
          .include(layer_choice_schema())
          .field("lr", &H::lr, "size of the change", {.formula = "V = -lr |k|^2 g", .above = 0})
          .field("ridge", &H::ridge, "weight of leaving other keys alone", {.formula = "KTK + ridge I", .above = 0})
          .field("token", &H::token, "tokens that are used: every one, or those where the target is predicted",
                 {.one_of = {"mask", "ans"}})
          .field("batch_size", &H::batch_size, "facts in one turn", {.min = 1})
          .field("batch_size_once", &H::batch_size_once,
                 "facts in one forward and backward pass; the loss is the mean over their targets' tokens", {.min = 1})
          .field("dropout", &H::dropout, "must be 0: the published code reads it and drops nothing", {.min = 0})
          .unused("editor_batch_size", "it only bounds memory in the published code; turns are small here")
          .unused("alg", "the editor is chosen elsewhere")
          .unused("no_grad_layers", "gradients are computed for the chosen layers alone")
          .check("dropout", "0", [](const H& h) { return h.dropout == 0; });
  return training_entry<UltraEdit>(
      "ultraedit", "thousands of facts in turns, one pass a fact, no targets and no statistics",
      "Gu et al., UltraEdit: Training-, Subject-, and Memory-Free Lifelong Editing in Language Models, 2025", schema);
}

}  // namespace emend::editors
