#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/finetune.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/training_loop.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>

namespace emend::editors {
namespace {

// One weight that is trained. The master copy is float32 at least, so that half-precision weights do not lose steps.
struct Trained {
  std::string name;
  int layer = 0;
  bool matrix = true;
  at::Tensor master, original;
};

class FineTuneRun {
 public:
  FineTuneRun(const FineTuneHparams& hparams, const std::string& editor, models::Model& model,
              const EditContext& context, EditResult& result, const GradientRule& rule)
      : hparams_(hparams),
        editor_(editor),
        model_(model),
        context_(context),
        result_(result),
        rule_(rule),
        transaction_(model, context.transaction) {}

  void run(const RenderedBatch& batch) {
    batch_ = &batch;
    objective_ = parse_objective(hparams_.objective_optimization);
    choose_weights();
    train_weights();
    for (const auto& trained : trained_) add_delta(trained);
    record_trace();
    transaction_.commit();
  }

 private:
  void choose_weights() {
    const at::ScalarType dtype = detail::work_dtype(model_);
    for (const int64_t layer : hparams_.layers)
      for (const auto& name :
           weights_of_module(model_, static_cast<int>(layer), hparams_.modules.rewrite_module_tmp, editor_)) {
        const at::Tensor weight = model_.weight(name).detach();
        if (rule_ && weight.dim() != 2) continue;
        const at::Tensor master = weight.to(dtype, /*non_blocking=*/false, /*copy=*/true);
        trained_.push_back({name, static_cast<int>(layer), weight.dim() == 2, master, master.clone()});
      }
  }

  // Rows of facts [begin, end).
  [[nodiscard]] std::vector<LearningRow> rows(int64_t begin, int64_t end) const {
    std::vector<LearningRow> rows = learning_rows(*batch_, begin, end, objective_);
    if (hparams_.score_padding && objective_ == Objective::kPromptLast) score_padding(rows);
    return rows;
  }

  // What the published FT-L does: targets are padded to one length, and not the padding but the unknown token is left
  // out of the loss.
  void score_padding(std::vector<LearningRow>& rows) const {
    size_t longest = 0;
    for (const auto& row : rows) longest = std::max(longest, row.labels.size());
    const auto& tokenizer = model_.tokenizer();
    // A padding token that was added to the tokenizer alone is none of the model's.
    const bool has_pad = tokenizer.pad_id() && *tokenizer.pad_id() < model_.vocab_size();
    const auto pad = has_pad ? tokenizer.pad_id() : tokenizer.eos_id();
    for (auto& row : rows) {
      const int64_t last = row.labels.front().first;
      if (pad) row.labels.resize(longest, {last, *pad});
      if (tokenizer.unk_id())
        std::erase_if(row.labels, [&](const auto& label) { return label.second == *tokenizer.unk_id(); });
      if (row.labels.empty())
        refuse({editor_, "a target of unknown tokens alone", "a token to learn", "set score_padding to false"});
    }
  }

  [[nodiscard]] int lowest_layer() const {
    return static_cast<int>(*std::min_element(hparams_.layers.begin(), hparams_.layers.end()));
  }

  void train_weights() {
    const auto facts = static_cast<int64_t>(batch_->rendered.size());
    std::vector<at::Tensor> weights, masters;
    for (const auto& trained : trained_) {
      transaction_.keep(trained.name);
      weights.push_back(model_.weight(trained.name));
      masters.push_back(trained.master);
    }
    const TrainableScope trainable(weights);
    Adam adam({.lr = hparams_.lr, .weight_decay = hparams_.decay(facts)});
    const TrainingSteps steps = {.rows = [&](int64_t begin, int64_t end) { return rows(begin, end); },
                                 .leaves = [&] { return trainable.weights(); },
                                 .update = [&](const PassResult& result) { update(result, adam, masters); }};
    losses_ = train(model_, facts, {hparams_.num_steps, hparams_.batch_size, hparams_.stop_loss, lowest_layer()}, steps,
                    context_);
    note_outcomes(result_, model_, *batch_, losses_, hparams_.stop_loss);
  }

  // One step of Adam, then the box.
  void update(const PassResult& result, Adam& adam, const std::vector<at::Tensor>& masters) {
    for (size_t i = 0; i < trained_.size(); ++i)
      if (!result.gradients[i].defined())
        throw Error(ErrorClass::kUnsupported, {trained_[i].name, "a weight that the loss does not depend on",
                                               "a linear layer of a block", "choose another rewrite_module_tmp"});
    if (context_.trace && first_gradients_.size() < 3) first_gradients_.push_back(result.gradients);
    std::vector<at::Tensor> gradients = result.gradients;
    for (size_t i = 0; i < trained_.size() && rule_; ++i) gradients[i] = rule_(trained_[i].name, gradients[i]);
    adam.step(masters, gradients);
    for (const auto& [name, layer, matrix, master, original] : trained_) {
      if (const auto& radius = hparams_.norm_constraint)
        master.copy_(at::maximum(at::minimum(master, original + *radius), original - *radius));
      write_weight(name, master, transaction_);
    }
  }

  void add_delta(const Trained& trained) {
    const WeightDelta& delta = add_change(transaction_, trained.name, trained.layer, result_);
    if (context_.trace)
      record(context_, "layer." + std::to_string(trained.layer) + (trained.matrix ? ".weight_change" : ".bias_change"),
             delta.dense_DF);
  }

  // Gradients of the first three updates, one layer as the fixtures have it, and the losses.
  void record_trace() {
    if (!context_.trace) return;
    record(context_, "batch_losses", at::tensor(losses_.batch_losses, at::kDouble));
    record(context_, "epoch_losses", at::tensor(losses_.epoch_losses, at::kDouble));
    for (size_t i = 0; i < trained_.size() && !first_gradients_.empty(); ++i) {
      if (trained_[i].layer != lowest_layer()) continue;
      std::vector<at::Tensor> steps;
      for (const auto& gradients : first_gradients_) {
        const at::Tensor host = devices::to_host(gradients[i].detach());
        const bool turn = trained_[i].matrix && model_.family().orientation == models::Orientation::kInOut;
        steps.push_back(turn ? host.t() : host);
      }
      record(context_, trained_[i].matrix ? "grad_first3.weight" : "grad_first3.bias", at::stack(steps));
    }
  }

  const FineTuneHparams& hparams_;
  const std::string& editor_;
  models::Model& model_;
  const EditContext& context_;
  EditResult& result_;
  const GradientRule& rule_;
  EditTransaction transaction_;
  const RenderedBatch* batch_ = nullptr;
  Objective objective_ = Objective::kPromptLast;
  std::vector<Trained> trained_;
  TrainingRecord losses_;
  std::vector<std::vector<at::Tensor>> first_gradients_;
};

}  // namespace

void finetune(const FineTuneHparams& hparams, const std::string& editor, models::Model& model,
              const RenderedBatch& batch, const EditContext& context, EditResult& result, const GradientRule& rule) {
  FineTuneRun(hparams, editor, model, context, result, rule).run(batch);
}

double FineTuneHparams::decay(int64_t facts) const {
  if (wd_power_law.size() == 2)
    return std::pow(static_cast<double>(facts), wd_power_law[0]) * std::exp(wd_power_law[1]);
  return weight_decay.value_or(0);
}

const hparams::Schema<FineTuneHparams>& finetune_schema() {
  using H = FineTuneHparams;
  static const auto schema =
      hparams::Schema<H>("fine-tuning")
          .field("layers", &H::layers, "blocks that are trained, counted from 0",
                 {.required = true, .min = 0, .min_items = 1})
          .field("num_steps", &H::num_steps, "most epochs over the facts", {.min = 1})
          .field("batch_size", &H::batch_size, "facts in one step", {.min = 1})
          .field("lr", &H::lr, "learning rate of Adam", {.max = 1e30, .above = 0})
          .field("weight_decay", &H::weight_decay, "Adam's weight decay; 0 disables it",
                 {.formula = "gradient + weight_decay W", .min = 0})
          .field("wd_power_law", &H::wd_power_law,
                 "two numbers [a, b]: weight decay by the number of facts instead; [] disables it",
                 {.formula = "n^a e^b"})
          .field("norm_constraint", &H::norm_constraint, "largest change of any entry of a weight; none disables it",
                 {.formula = "|W - W0|_inf <= norm_constraint", .above = 0})
          .field("objective_optimization", &H::objective_optimization,
                 "where the target's tokens are scored: all of them after the last prompt token, or each "
                 "after the ones before it",
                 {.one_of = {"prompt_last", "target_new"}})
          .field("stop_loss", &H::stop_loss, "loss below which a chunk is not trained on, and an epoch is the last",
                 {.min = 0})
          .field("score_padding", &H::score_padding,
                 "score the padding of shorter targets and leave out unknown tokens, as the published "
                 "prompt_last code does by mistake")
          .field("kl_factor", &H::kl_factor, "must be 0: the published code reads it and computes nothing with it",
                 {.min = 0})
          .include(hparams::module_names_schema(), &H::modules)
          .check("kl_factor", "0: fine-tuning has no divergence term in any published code",
                 [](const H& h) { return h.kl_factor == 0; })
          .check("wd_power_law", "two numbers, such as [-0.87028798, 0.15589562], or []",
                 [](const H& h) { return h.wd_power_law.empty() || h.wd_power_law.size() == 2; })
          .check("wd_power_law", "[] where weight_decay is given too",
                 [](const H& h) { return h.wd_power_law.empty() || h.weight_decay.value_or(0) == 0; })
          .check("score_padding", "false unless objective_optimization is prompt_last",
                 [](const H& h) { return !h.score_padding || h.objective_optimization == "prompt_last"; })
          .check("layers", hparams::kAscending, [](const H& h) { return hparams::ascending(h.layers); });
  return schema;
}

std::vector<std::string> weights_of_module(const models::Model& model, int layer, const std::string& module_template,
                                           const std::string& where) {
  const auto& family = model.family();
  std::string module = module_template.empty() ? family.modules.rewrite : module_template;
  if (const size_t slot = module.find("{}"); slot != std::string::npos) module.replace(slot, 2, std::to_string(layer));
  module = models::without_base(family, module);
  std::vector<std::string> weights, biases;
  const auto tensors = models::expected_tensors(family, model.config());
  const auto& names = model.weight_names();  // the same list under the checkpoint's own names
  EMEND_CHECK(names.size() == tensors.size(), "a name a tensor of the family's table");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = models::without_base(family, tensors[i].name);
    const bool meant = name == module || name.starts_with(module + ".");  // EasyEdit's files name the weight itself
    if (meant && tensors[i].layer == layer && tensors[i].expert < 0)
      (tensors[i].bias ? biases : weights).push_back(names[i]);
  }
  if (weights.empty())
    refuse({where + ": rewrite_module_tmp", "\"" + module_template + "\"",
            "a module of a block with a weight, such as \"" + family.modules.rewrite + "\"",
            "leave the field out to train the MLP output matrix"});
  weights.insert(weights.end(), biases.begin(), biases.end());
  return weights;
}

void check_finetune(const FineTuneHparams& hparams, const hparams::RawHparams& raw, const models::Model& model) {
  require_layers(hparams.layers, model, raw);
  for (const int64_t layer : hparams.layers)
    (void)weights_of_module(model, static_cast<int>(layer), hparams.modules.rewrite_module_tmp,
                            raw.where("rewrite_module_tmp"));
  const auto& names = hparams.modules;
  models::check_module_names(model.family(), model.config(),
                             {names.layer_module_tmp, names.attn_module_tmp, names.mlp_module_tmp, "",
                              names.ln_f_module, names.lm_head_module},
                             [&](const char* key) { return raw.where(key); });
}

}  // namespace emend::editors
