#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/learning_pass.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/products.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

namespace emend::editors {
namespace {

[[noreturn]] void bad_row(size_t row, const std::string& got, const std::string& expected) {
  refuse({"training row " + std::to_string(row), got, expected, ""});
}

void check_rows(const models::Model& model, const std::vector<LearningRow>& rows) {
  if (rows.empty()) refuse({"training", "no rows", "at least one", ""});
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].labels.empty()) bad_row(r, "no labels", "at least one token to learn");
    for (const auto& [token, id] : rows[r].labels) {
      if (id >= model.vocab_size())
        bad_row(r, "label " + std::to_string(id), "an id below the model's " + std::to_string(model.vocab_size()));
      if (token < 0 || token >= static_cast<int64_t>(rows[r].ids.size()) || id < 0)
        bad_row(r, "label " + std::to_string(id) + " after token " + std::to_string(token),
                "a token of the row, which has " + std::to_string(rows[r].ids.size()));
    }
  }
}

}  // namespace

Objective parse_objective(std::string_view text) {
  if (text == "prompt_last") return Objective::kPromptLast;
  if (text == "target_new") return Objective::kTargetNew;
  refuse({"objective_optimization", "\"" + std::string(text) + "\"", "prompt_last or target_new", ""});
}

LearningRow learning_row(const RenderedFact& fact, Objective objective) {
  const PromptRow& prompt = fact.rows.at(0);
  const auto last = static_cast<int64_t>(prompt.ids.size()) - 1;
  LearningRow row;
  row.ids = objective == Objective::kPromptLast ? prompt.ids : with_target(prompt, fact.target_ids);
  for (size_t t = 0; t < fact.target_ids.size(); ++t)
    row.labels.emplace_back(objective == Objective::kPromptLast ? last : last + static_cast<int64_t>(t),
                            fact.target_ids[t]);
  return row;
}

LearningPass::LearningPass(const models::Model& model, const std::vector<LearningRow>& rows, int first_layer,
                           Engine engine)
    : model_(&model), engine_(engine) {
  check_rows(model, rows);
  const auto ids = mapped(rows, &LearningRow::ids);
  batch_ = engine == Engine::kReference ? models::TokenBatch::padded(ids, detail::pad_token(model))
                                        : models::TokenBatch::from_rows(ids);
  for (size_t r = 0; r < rows.size(); ++r) {
    labels_of_row_.push_back(static_cast<int64_t>(rows[r].labels.size()));
    for (const auto& [token, id] : rows[r].labels) {
      label_token_.push_back(batch_.token(static_cast<int64_t>(r), token));
      label_id_.push_back(id);
      label_row_.push_back(static_cast<int64_t>(r));
    }
  }
  if (engine == Engine::kReference || first_layer <= 0) return;
  const at::NoGradGuard no_grad;
  first_layer_ = first_layer;
  entering_ND_ = model.forward(batch_, {.end_layer = first_layer}).needed_hidden();
}

at::Tensor LearningPass::coefficients(std::span<const double> weight_R) const {
  EMEND_CHECK(weight_R.size() == rows(), "a weight a row");
  std::vector<double> weights;
  for (const int64_t row : label_row_)
    weights.push_back(weight_R[static_cast<size_t>(row)] /
                      static_cast<double>(labels_of_row_[static_cast<size_t>(row)]));
  return at::tensor(weights, at::kDouble).to(detail::work_dtype(*model_));
}

std::vector<double> LearningPass::row_means(const at::Tensor& nll_M) const {
  const at::Tensor host = devices::to_host(nll_M.detach()).to(at::kDouble).contiguous();
  std::vector<double> means(rows(), 0);
  for (size_t m = 0; m < label_row_.size(); ++m)
    means[static_cast<size_t>(label_row_[m])] += host.const_data_ptr<double>()[m];
  for (size_t r = 0; r < means.size(); ++r) {
    means[r] /= static_cast<double>(labels_of_row_[r]);
    if (!std::isfinite(means[r]))
      throw Error(ErrorClass::kNumeric, {"training row " + std::to_string(r), "a loss that is not a number",
                                         "a finite loss", "lower the learning rate"});
  }
  return means;
}

at::Tensor LearningPass::forward() const {
  const models::KeptTables kept(tables_);
  const models::ForwardOptions options{
      .first_layer = first_layer_, .hidden = entering_ND_, .logit_tokens = models::kNoTokens};
  const at::Tensor hidden_ND = model_->forward(batch_, options).needed_hidden();
  return hidden_ND.index_select(0, devices::index_on(label_token_, hidden_ND));
}

PassResult LearningPass::run(std::span<const double> weight_R,
                             const std::function<std::vector<at::Tensor>()>& leaves) const {
  const at::AutoGradMode with_grad(true);
  const devices::PlainOperators plain(engine_ == Engine::kReference);
  const at::Tensor coefficient_M = coefficients(weight_R), labels_M = at::tensor(label_id_, at::kLong);
  PassResult result;
  if (engine_ == Engine::kReference) {
    const at::Tensor logits_NV = model_->forward(batch_).needed_logits();
    const at::Tensor log_p_MV = at::log_softmax(logits_NV.to(detail::work_dtype(*model_)), 1)
                                    .index_select(0, devices::index_on(label_token_, logits_NV));
    const at::Tensor nll_M =
        -log_p_MV.gather(1, devices::route_like(labels_M, log_p_MV, devices::Purpose::kLabels).unsqueeze(1)).squeeze(1);
    result.nll = row_means(nll_M);
    const at::Tensor weight_M = devices::route_like(coefficient_M, nll_M, devices::Purpose::kLabels);
    result.gradients = torch::autograd::grad({(nll_M * weight_M).sum()}, leaves(), {}, std::nullopt, false, true);
    return result;
  }
  const at::Tensor hidden_MD = forward();
  const detail::LabelLoss loss = detail::label_loss(*model_, hidden_MD, labels_M, coefficient_M, {}, false, {});
  result.nll = row_means(loss.nll_M);
  const std::vector<at::Tensor> wanted = leaves();
  result.gradients.resize(wanted.size());
  if (!hidden_MD.requires_grad()) return result;  // no leaf took part
  const at::Tensor grad_MD =
      devices::route_like(loss.grad_MD, hidden_MD, devices::Purpose::kLoss, devices::Dtype::kMatch);
  result.gradients = torch::autograd::grad({hidden_MD}, wanted, {grad_MD}, std::nullopt, false, true);
  return result;
}

PassResult LearningPass::run_in_segments(std::span<const double> weight_R, const std::vector<at::Tensor>& leaves,
                                         int layers_per_segment, const RandomState& random) const {
  EMEND_CHECK(engine_ == Engine::kFast && layers_per_segment > 0, "segments of at least one layer, fast engine");
  struct Segment {
    int begin = 0, end = 0;
    at::Tensor entering_ND;
    std::vector<at::Tensor> random;
  };
  const models::KeptTables kept(tables_);
  const auto through = [&](const Segment& segment, const at::Tensor& entering_ND) {
    const models::ForwardOptions options{.first_layer = segment.begin,
                                         .hidden = entering_ND,
                                         .end_layer = segment.end,
                                         .logit_tokens = models::kNoTokens};
    return model_->forward(batch_, options).needed_hidden();
  };
  std::vector<Segment> segments;
  at::Tensor hidden_ND = entering_ND_;
  {
    const at::NoGradGuard no_grad;
    for (int begin = first_layer_; begin < model_->n_layers(); begin += layers_per_segment) {
      segments.push_back({begin, std::min(begin + layers_per_segment, model_->n_layers()), hidden_ND, random.save()});
      hidden_ND = through(segments.back(), hidden_ND);
    }
  }
  const at::Tensor token_M = devices::index_on(label_token_, hidden_ND);
  const detail::LabelLoss loss =
      detail::label_loss(*model_, hidden_ND.index_select(0, token_M), at::tensor(label_id_, at::kLong),
                         coefficients(weight_R), {}, false, {});
  PassResult result;
  result.nll = row_means(loss.nll_M);
  result.gradients.resize(leaves.size());
  at::Tensor grad_ND = at::zeros_like(hidden_ND);
  grad_ND.index_add_(0, token_M,
                     devices::route_like(loss.grad_MD, hidden_ND, devices::Purpose::kLoss, devices::Dtype::kMatch));
  const std::vector<at::Tensor> after = random.save();
  const at::AutoGradMode with_grad(true);
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
    random.load(segment->random);
    at::Tensor entering_ND = segment->entering_ND;
    std::vector<at::Tensor> wanted = leaves;
    if (entering_ND.defined()) wanted.push_back(entering_ND = entering_ND.detach().requires_grad_(true));
    const at::Tensor leaving_ND = through(*segment, entering_ND);
    const auto grads = torch::autograd::grad({leaving_ND}, wanted, {grad_ND}, std::nullopt, false, true);
    for (size_t i = 0; i < leaves.size(); ++i)
      if (grads[i].defined())
        result.gradients[i] = result.gradients[i].defined() ? result.gradients[i] + grads[i] : grads[i];
    if (entering_ND.defined()) grad_ND = grads.back();
  }
  random.load(after);
  return result;
}

PassResult LearningPass::measure() const {
  const at::NoGradGuard no_grad;
  const devices::PlainOperators plain(engine_ == Engine::kReference);
  const at::Tensor labels_M = at::tensor(label_id_, at::kLong);
  const std::vector<double> ones(rows(), 1);
  PassResult result;
  result.nll = row_means(
      detail::label_loss(*model_, forward(), labels_M, coefficients(ones), {}, false, {.gradient = false}).nll_M);
  return result;
}

std::vector<LayerSignal> layer_signals(const models::Model& model, const LearningPass& pass,
                                       const std::vector<int>& layers, std::span<const double> weight_R,
                                       std::vector<double>* loss) {
  std::vector<at::Tensor> outputs(layers.size());
  hooks::HookSession session(model.hooks());
  for (size_t i = 0; i < layers.size(); ++i) {
    session.capture({hooks::Site::kMlpDownIn, layers[i]});
    session.edit({hooks::Site::kMlpDownOut, layers[i]}, [&outputs, i](const at::Tensor& x) {
      outputs[i] = x.requires_grad() ? x : x.detach().requires_grad_(true);  // the lowest one starts the graph
      return outputs[i];
    });
  }
  session.attach();
  PassResult result = pass.run(weight_R, [&] { return outputs; });
  std::vector<LayerSignal> signals;
  for (size_t i = 0; i < layers.size(); ++i) {
    at::Tensor gradient = result.gradients[i];
    if (!gradient.defined()) gradient = at::zeros_like(outputs[i].detach());
    signals.push_back({session.captured({hooks::Site::kMlpDownIn, layers[i]}), gradient});
  }
  session.finish();
  if (loss) *loss = std::move(result.nll);
  return signals;
}

TrainableScope::TrainableScope(std::vector<at::Tensor> weights) : weights_(std::move(weights)) {
  for (at::Tensor& weight : weights_) weight.requires_grad_(true);
}

TrainableScope::~TrainableScope() {
  for (at::Tensor& weight : weights_) weight.requires_grad_(false);
}

}  // namespace emend::editors
