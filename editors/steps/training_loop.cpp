#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/training_loop.h>

#include <algorithm>
#include <cmath>

namespace emend::editors {
namespace {

// What enters the lowest trained layer is kept for all chunks as long as it takes no more than this.
constexpr int64_t kHeldBytes = int64_t{1} << 30;

class Training {
 public:
  Training(const models::Model& model, int64_t facts, const TrainingOptions& options, const TrainingSteps& steps,
           const EditContext& context)
      : model_(model), facts_(facts), options_(options), steps_(steps), context_(context) {
    record_.curve.resize(static_cast<size_t>(facts));
    for (int64_t begin = 0; begin < facts_; begin += options_.batch_size) begins_.push_back(begin);
  }

  TrainingRecord run() {
    hold_passes();
    for (int64_t epoch = 0; epoch < options_.epochs; ++epoch) {
      context_.report("train", epoch, options_.epochs, loss_text());
      double sum = 0;
      for (size_t chunk = 0; chunk < begins_.size(); ++chunk) {
        context_.cancel.check("train");
        sum += held_.empty() ? step(make_pass(begins_[chunk]), begins_[chunk]) : step(held_[chunk], begins_[chunk]);
      }
      record_.epoch_losses.push_back(sum / static_cast<double>(facts_));
      if (record_.epoch_losses.back() < options_.stop_loss) break;
    }
    if (steps_.finish) steps_.finish();
    for (const int64_t begin : begins_) {
      if (steps_.prepare) steps_.prepare(begin, end_of(begin));
      note(begin, make_pass(begin).measure().nll);
    }
    return std::move(record_);
  }

 private:
  [[nodiscard]] int64_t end_of(int64_t begin) const { return std::min(facts_, begin + options_.batch_size); }
  [[nodiscard]] LearningPass make_pass(int64_t begin) const {
    return {model_, steps_.rows(begin, end_of(begin)), options_.first_layer, context_.engine};
  }

  void hold_passes() {
    int64_t tokens = 0;
    for (const int64_t begin : begins_) {
      held_.push_back(make_pass(begin));
      tokens += held_.back().batch().tokens();
      if (tokens * model_.hidden_size() * 4 <= kHeldBytes) continue;
      held_.clear();
      return;
    }
  }

  // One chunk. Returns the sum of the facts' losses, and what there is beside them for each.
  double step(const LearningPass& pass, int64_t begin) {
    if (steps_.prepare) steps_.prepare(begin, end_of(begin));
    const std::vector<double> weight_R(pass.rows(), 1.0 / static_cast<double>(pass.rows()));
    const PassResult result = pass.run(weight_R, steps_.leaves);
    note(begin, result.nll);
    double sum = 0;
    for (const double nll : result.nll) sum += nll;
    if (steps_.more) sum += steps_.more() * static_cast<double>(pass.rows());
    const double loss = sum / static_cast<double>(pass.rows());
    record_.batch_losses.push_back(loss);
    if (loss < options_.stop_loss) return sum;
    steps_.update(result);
    ++record_.updates;
    return sum;
  }

  void note(int64_t begin, const std::vector<double>& nll_R) {
    for (size_t r = 0; r < nll_R.size(); ++r)
      record_.curve[static_cast<size_t>(begin) + r].push_back({nll_R[r], nll_R[r], 0, 0, std::exp(-nll_R[r])});
  }

  [[nodiscard]] std::string loss_text() const {
    return record_.epoch_losses.empty() ? "" : formatted("loss %.4g", record_.epoch_losses.back());
  }

  const models::Model& model_;
  int64_t facts_;
  const TrainingOptions& options_;
  const TrainingSteps& steps_;
  const EditContext& context_;
  std::vector<int64_t> begins_;
  std::vector<LearningPass> held_;
  TrainingRecord record_;
};

}  // namespace

TrainingRecord train(const models::Model& model, int64_t facts, const TrainingOptions& options,
                     const TrainingSteps& steps, const EditContext& context) {
  return Training(model, facts, options, steps, context).run();
}

RenderedBatch slice(const RenderedBatch& batch, size_t begin, size_t end) {
  const auto first = static_cast<std::ptrdiff_t>(begin), last = static_cast<std::ptrdiff_t>(end);
  RenderedBatch part;
  part.rendered.assign(batch.rendered.begin() + first, batch.rendered.begin() + last);
  part.places.assign(batch.places.begin() + first, batch.places.begin() + last);
  return part;
}

std::vector<LearningRow> learning_rows(const RenderedBatch& batch, int64_t begin, int64_t end, Objective objective) {
  std::vector<LearningRow> rows;
  for (int64_t i = begin; i < end; ++i) rows.push_back(learning_row(batch.rendered[static_cast<size_t>(i)], objective));
  return rows;
}

EditResult edit_plain_prompts(const Editor& editor, const models::Model& model, std::span<const datasets::Fact> facts,
                              const EditContext& context,
                              const std::function<void(const RenderedBatch&, EditResult&)>& work) {
  const auto start = std::chrono::steady_clock::now();
  EditResult result{
      .editor = editor.name(), .hparams = editor.hparams(), .engine = context.engine, .seed = context.seed};
  RenderedBatch batch = render_batch(model, facts, ContextTemplates::plain(), {FactToken::kLast, {}});
  result.outcomes = std::move(batch.outcomes);
  if (!batch.rendered.empty()) work(batch, result);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& [phase, own] : result.seconds) seconds -= own;
  result.seconds["insert"] += seconds;
  return result;
}

void note_outcomes(EditResult& result, const models::Model& model, const RenderedBatch& batch,
                   const TrainingRecord& record, double stop_loss) {
  for (size_t i = 0; i < batch.rendered.size(); ++i) {
    Target target;
    target.curve = record.curve[i];
    target.steps = record.updates;
    target.status = target.curve.back().loss < stop_loss ? FactStatus::kConverged : FactStatus::kMaxSteps;
    result.outcomes[batch.places[i]] = make_outcome(model.tokenizer(), batch.rendered[i], target);
  }
}

void Adam::step(const std::vector<at::Tensor>& variables, const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  EMEND_CHECK(variables.size() == gradients.size() && (first_.empty() || first_.size() == variables.size()),
              "as many gradients as variables, the same ones every time");
  if (first_.empty())
    for (const at::Tensor& variable : variables) {
      first_.push_back(at::zeros_like(variable.detach()));
      second_.push_back(at::zeros_like(variable.detach()));
    }
  ++steps_;
  const double t = static_cast<double>(steps_);
  const double correction1 = 1 - std::pow(detail::kBeta1, t), correction2 = 1 - std::pow(detail::kBeta2, t);
  for (size_t i = 0; i < variables.size(); ++i) {
    if (!gradients[i].defined()) continue;
    at::Tensor variable = variables[i].detach();
    at::Tensor gradient =
        devices::route_like(gradients[i], variable, devices::Purpose::kOptimiser, devices::Dtype::kMatch);
    if (options_.decoupled) {
      variable.mul_(1 - options_.lr * options_.weight_decay);
    } else if (options_.weight_decay != 0) {
      gradient = gradient.add(variable, options_.weight_decay);
    }
    first_[i].lerp_(gradient, 1 - detail::kBeta1);
    second_[i].mul_(detail::kBeta2).addcmul_(gradient, gradient, 1 - detail::kBeta2);
    const at::Tensor denominator = (second_[i].sqrt() / std::sqrt(correction2)).add_(detail::kEpsilon);
    variable.addcdiv_(first_[i], denominator, -options_.lr / correction1);
  }
}

}  // namespace emend::editors
