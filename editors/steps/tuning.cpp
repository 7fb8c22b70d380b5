#include <ATen/ATen.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/tuning.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <numeric>

namespace emend::editors {
namespace {

void require(bool good, const std::string& name, const std::string& got, const std::string& expected) {
  if (!good) refuse({name, got, expected, ""});
}

void check_options(const TuneOptions& options) {
  require(options.lr > 0 && std::isfinite(options.lr), "learning rate", std::to_string(options.lr), "more than 0");
  require(options.weight_decay >= 0, "weight decay", std::to_string(options.weight_decay), "0 or more");
  require(options.batch_size > 0, "batch size", std::to_string(options.batch_size), "at least 1");
  require(options.accumulation > 0, "accumulation", std::to_string(options.accumulation), "at least 1");
  require(options.steps > 0 || options.epochs > 0, "epochs", std::to_string(options.epochs), "more than 0");
  require(options.warmup_steps >= 0, "warm-up", std::to_string(options.warmup_steps), "0 or more");
  require(options.schedule == "constant" || options.schedule == "linear" || options.schedule == "cosine", "schedule",
          "\"" + options.schedule + "\"", "constant, linear or cosine");
}

// Tokens that lie in an answer. A token that straddles the border belongs to what it begins in.
LearningRow row_of(const models::Encoding& encoding, const std::vector<std::pair<size_t, size_t>>& replies,
                   int64_t max_length) {
  LearningRow row;
  const size_t length = std::min(encoding.size(), static_cast<size_t>(max_length));
  row.ids.assign(encoding.ids.begin(), encoding.ids.begin() + static_cast<std::ptrdiff_t>(length));
  for (size_t t = 1; t < length; ++t) {
    const auto [begin, end] = encoding.offsets[t];
    const bool inside = std::any_of(replies.begin(), replies.end(), [&, begin = begin, end = end](const auto& reply) {
      return begin >= reply.first && begin < reply.second && end > begin;
    });
    if (inside) row.labels.emplace_back(static_cast<int64_t>(t) - 1, encoding.ids[t]);
  }
  return row;
}

class TuneRun {
 public:
  TuneRun(models::Model& model, const std::vector<TuningRow>& rows, const TuneOptions& options)
      : model_(model),
        rows_(rows),
        options_(options),
        adapters_(model, options.lora),
        adam_({.lr = options.lr, .weight_decay = options.weight_decay, .decoupled = true}) {}

  TuneResult run() {
    const auto start = std::chrono::steady_clock::now();
    const auto of_a_step = static_cast<size_t>(options_.batch_size * options_.accumulation);
    const auto steps = options_.steps > 0 ? options_.steps : steps_of_epochs(of_a_step);
    TuneResult result;
    result.parameters = adapters_.parameter_count();
    adapters_.set_training(true);
    for (int64_t step = 0; step < steps; ++step) {
      options_.cancel.check("tune");
      result.steps.push_back(update(next_rows(of_a_step), learning_rate(options_, step, steps)));
      if (options_.progress)
        options_.progress({"tune", static_cast<double>(step + 1), static_cast<double>(steps),
                           "loss " + std::to_string(result.steps.back().loss)});
    }
    adapters_.set_training(false);
    result.deltas = adapters_.deltas();
    for (const auto& delta : result.deltas) delta.require_finite();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result;
  }

 private:
  // The last step of a whole epoch takes what is left of the rows.
  [[nodiscard]] int64_t steps_of_epochs(size_t of_a_step) const {
    const auto steps_of = [&](double share) {
      return static_cast<int64_t>(
          std::ceil(share * static_cast<double>(rows_.size()) / static_cast<double>(of_a_step) - 1e-9));
    };
    const double whole = std::floor(options_.epochs);
    return std::max<int64_t>(1, static_cast<int64_t>(whole) * steps_of(1) + steps_of(options_.epochs - whole));
  }

  std::vector<LearningRow> next_rows(size_t count) {
    std::vector<LearningRow> chosen;
    while (chosen.size() < count) {
      if (at_ == order_.size()) {
        order_.resize(rows_.size());
        std::iota(order_.begin(), order_.end(), size_t{0});
        detail::shuffle(order_, options_.seed + epoch_++);
        at_ = 0;
        if (!chosen.empty()) break;  // the last step of an epoch takes what is left
      }
      chosen.push_back(rows_[order_[at_++]].row);
    }
    return chosen;
  }

  // One optimiser step over several passes.
  TuneStep update(const std::vector<LearningRow>& rows, double lr) {
    TuneStep step;
    step.lr = lr;
    for (const auto& row : rows) step.labels += static_cast<int64_t>(row.labels.size());
    std::vector<at::Tensor> gradients(adapters_.parameters().size());
    for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(options_.batch_size)) {
      const size_t end = std::min(rows.size(), begin + static_cast<size_t>(options_.batch_size));
      const PassResult pass = one_pass(
          {rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.begin() + static_cast<std::ptrdiff_t>(end)}, step);
      for (size_t i = 0; i < gradients.size(); ++i)
        if (pass.gradients[i].defined())
          gradients[i] = gradients[i].defined() ? gradients[i] + pass.gradients[i] : pass.gradients[i];
    }
    step.grad_norm = cut_norm(gradients);
    adam_.set_learning_rate(lr);
    adam_.step(adapters_.parameters(), gradients);
    return step;
  }

  PassResult one_pass(const std::vector<LearningRow>& rows, TuneStep& step) {
    const LearningPass pass(model_, rows, adapters_.first_layer());
    std::vector<double> weight_R;
    for (const auto& row : rows)
      weight_R.push_back(static_cast<double>(row.labels.size()) / static_cast<double>(step.labels));
    const RandomState random = {[&] { return adapters_.dropout_state(); },
                                [&](const std::vector<at::Tensor>& state) { adapters_.set_dropout_state(state); }};
    PassResult result = options_.checkpoint_layers > 0
                            ? pass.run_in_segments(weight_R, adapters_.parameters(), options_.checkpoint_layers, random)
                            : pass.run(weight_R, [&] { return adapters_.parameters(); });
    for (size_t r = 0; r < rows.size(); ++r) step.loss += weight_R[r] * result.nll[r];
    return result;
  }

  // Norm of all gradients together; cuts it to max_grad_norm.
  double cut_norm(std::vector<at::Tensor>& gradients) const {
    double squares = 0;
    for (const auto& gradient : gradients)
      if (gradient.defined()) squares += gradient.to(at::kDouble).square().sum().item<double>();
    const double norm = std::sqrt(squares);
    if (options_.max_grad_norm > 0 && norm > options_.max_grad_norm)
      for (auto& gradient : gradients)
        if (gradient.defined()) gradient = gradient * (options_.max_grad_norm / (norm + 1e-6));
    return norm;
  }

  models::Model& model_;
  const std::vector<TuningRow>& rows_;
  const TuneOptions& options_;
  LoraAdapters adapters_;
  Adam adam_;
  std::vector<size_t> order_;
  size_t at_ = 0;
  uint64_t epoch_ = 0;
};

}  // namespace

TuningRows tuning_rows(const models::Model& model, const std::vector<datasets::Instruction>& instructions,
                       const models::ChatFormat& format, int64_t max_length, const std::string& name) {
  require(max_length > 1, "length", std::to_string(max_length), "at least 2 tokens");
  // Where nothing in the format ends an answer, the model would not learn to stop.
  const auto end = model.tokenizer().eos_id();
  const bool no_mark = trimmed(format.reply_close).empty() && end;
  TuningRows all;
  for (const auto& instruction : instructions) {
    std::vector<models::ChatMessage> messages;
    for (const auto& turn : instruction.turns) messages.push_back({turn.role, turn.content});
    const auto chat = models::render_chat(format, messages, false);
    const auto encoding = models::encode_chat(model.tokenizer(), chat.text);
    all.cut += encoding.size() > static_cast<size_t>(max_length);
    TuningRow one{row_of(encoding, chat.replies, max_length), instruction.line};
    const bool ends = !chat.replies.empty() && chat.replies.back().second == chat.text.size();
    if (no_mark && ends && encoding.size() < static_cast<size_t>(max_length)) {
      one.row.labels.emplace_back(static_cast<int64_t>(encoding.size()) - 1, *end);
      one.row.ids.push_back(*end);
    }
    if (one.row.labels.empty()) {
      ++all.dropped;
      continue;
    }
    all.labels += static_cast<int64_t>(one.row.labels.size());
    all.rows.push_back(std::move(one));
  }
  if (all.rows.empty())
    throw Error(ErrorClass::kCorruption,
                {name, "no answer begins within " + std::to_string(max_length) + " tokens", "at least one",
                 "raise " + setting("max_length") + ", where the model has room for more; else shorten the rows"});
  check_vocabulary(model, all.rows, name);
  return all;
}

void check_vocabulary(const models::Model& model, const std::vector<TuningRow>& rows, const std::string& name) {
  const int64_t size = model.vocab_size();
  const auto refuse = [&](const TuningRow& row, const std::string& what, int64_t id) {
    const std::string piece = model.has_tokenizer() ? " (\"" + model.tokenizer().token_text(id) + "\")" : "";
    throw Error(
        ErrorClass::kInvalidArgument,
        {name + ":" + std::to_string(row.line), what + " has the id " + std::to_string(id) + piece,
         "ids from 0 to " + std::to_string(size - 1) + ": the model's head has " + std::to_string(size) + " rows",
         "use the tokenizer that belongs to this model, or a model whose embeddings were resized for it"});
  };
  for (const auto& row : rows) {
    for (size_t t = 0; t < row.row.ids.size(); ++t)
      if (row.row.ids[t] < 0 || row.row.ids[t] >= size) refuse(row, "token " + std::to_string(t), row.row.ids[t]);
    for (const auto& [token, id] : row.row.labels)
      if (id < 0 || id >= size) refuse(row, "the label after token " + std::to_string(token), id);
  }
}

double learning_rate(const TuneOptions& options, int64_t step, int64_t steps) {
  const auto done = static_cast<double>(step), warmup = static_cast<double>(options.warmup_steps);
  if (done < warmup) return options.lr * (done + 1) / (warmup + 1);
  if (options.schedule == "constant") return options.lr;
  const double rest = std::max(1.0, static_cast<double>(steps) - warmup), share = (done - warmup) / rest;
  return options.lr * (options.schedule == "linear" ? 1 - share : 0.5 * (1 + std::cos(std::numbers::pi * share)));
}

TuneResult tune(models::Model& model, const std::vector<TuningRow>& rows, const TuneOptions& options) {
  check_options(options);
  require(!rows.empty(), "tune", "no rows", "at least one");
  check_vocabulary(model, rows, "rows");
  return TuneRun(model, rows, options).run();
}

}  // namespace emend::editors
