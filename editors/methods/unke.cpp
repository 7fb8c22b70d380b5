// UnKE: Everything is Editable: Extend Knowledge Editing to Unstructured Data in Large Language Models (Deng et al.,
// ICLR 2025), as EasyEdit has it.
//
//   1. z of every fact at the last token of its prompt, at the output of the last of `layers` (targets.h), from the
//      plain prompt alone.
//   2. For each layer l, lowest first, AdamW on all matrices of the block moves what it gives:
//        mean ‖block(x) − y‖² over all tokens of the prompts  +  the same over ordinary text
//      x: what enters the block; y: what it gives now, at the last token of a prompt with (z − current)/layers to go.
//
//   N tokens · D hidden width
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/finetune.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/targets.h>
#include <emend/editors/steps/training_loop.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/family.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

namespace emend::editors {
namespace {

struct UnkeHparams {
  std::vector<int64_t> layers;
  int64_t v_num_grad_steps = 25;
  double v_lr = 0.5;
  std::optional<int64_t> v_loss_layer;
  double v_weight_decay = 1e-3, clamp_norm_factor = 4;
  double lr = 2e-4;
  int64_t optim_num_step = 50, ex_data_num = 20;
  hparams::ModuleNames modules;
};

// Prompts, then texts, and what the blocks are to give for them.
struct Rows {
  models::TokenBatch batch;
  std::vector<int64_t> last;  // of the prompts
  int64_t prompt_tokens = 0;
};

class UnkeEditor final : public NamedEditor {
 public:
  UnkeEditor(UnkeHparams hparams, const RecipeInputs& in) : NamedEditor(in), h_(std::move(hparams)) {}

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override {
    return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
      EditTransaction transaction(model, context.transaction);
      const auto targets = [&] {
        const PhaseTimer timer(result, "targets");
        return optimise_targets(model, mapped(batch.rendered, make_target_problem), spec(model), context);
      }();
      std::vector<std::vector<int64_t>> prompts;
      std::vector<at::Tensor> wanted;
      for (size_t i = 0; i < targets.size(); ++i) {
        result.outcomes[batch.places[i]] = make_outcome(model.tokenizer(), batch.rendered[i], targets[i]);
        if (targets[i].status == FactStatus::kFailed) continue;
        prompts.push_back(batch.rendered[i].rows[0].ids);
        wanted.push_back(targets[i].target_D[0]);
      }
      if (wanted.empty()) return;
      const Rows rows = rows_of(model, prompts, context);
      for (size_t i = 0; i < h_.layers.size(); ++i)
        move_block(model, static_cast<int>(h_.layers[i]), rows, at::stack(wanted),
                   static_cast<double>(h_.layers.size() - i), context, transaction, result);
      context.cancel.check("edit");
      transaction.commit();
    });
  }

 private:
  [[nodiscard]] TargetSpec spec(const models::Model& model) const {
    return {.sites = {{hooks::Site::kLayerOut, static_cast<int>(h_.layers.back())}},
            .loss_layer = static_cast<int>(
                std::max(h_.layers.back(), h_.v_loss_layer.value_or(static_cast<int64_t>(model.n_layers()) - 1))),
            .steps = h_.v_num_grad_steps,
            .lr = h_.v_lr,
            .weight_decay = h_.v_weight_decay,
            .clamp_norm_factor = h_.clamp_norm_factor,
            .stop_loss = 0};
  }

  [[nodiscard]] Rows rows_of(const models::Model& model, std::vector<std::vector<int64_t>> ids,
                             const EditContext& context) const {
    constexpr int64_t kLongest = 64;
    Rows rows;
    const size_t prompts = ids.size();
    // Texts are cut into pieces: so many tokens are at least so many pieces.
    for (const auto& text : text_rows(model, h_.ex_data_num * kLongest, context))
      for (auto at = text.begin(); at != text.end();) {
        const auto end = at + std::min(kLongest, text.end() - at);
        if (std::ssize(ids) < static_cast<int64_t>(prompts) + h_.ex_data_num) ids.emplace_back(at, end);
        at = end;
      }
    rows.batch = models::TokenBatch::from_rows(ids);
    rows.last = rows.batch.last_tokens();
    rows.last.resize(prompts);
    rows.prompt_tokens = rows.last.back() + 1;
    return rows;
  }

  void move_block(models::Model& model, int layer, const Rows& rows, const at::Tensor& wanted_PD, double layers_to_go,
                  const EditContext& context, EditTransaction& transaction, EditResult& result) const {
    const hooks::SiteRef in{hooks::Site::kLayerIn, layer}, out{hooks::Site::kLayerOut, layer},
        top{hooks::Site::kLayerOut, static_cast<int>(h_.layers.back())};
    at::Tensor entering_ND, goal_ND, current_PD;
    {
      const at::NoGradGuard no_grad;
      hooks::HookSession session(model.hooks());
      session.capture(in).capture(out);
      if (top.layer != layer) session.capture(top);
      session.stop_after(top).attach();
      (void)model.forward(rows.batch, {.logit_tokens = models::kNoTokens});
      entering_ND = session.captured(in);
      goal_ND = session.captured(out).to(detail::work_dtype(model));
      const at::Tensor top_ND = session.captured(top);
      current_PD = devices::to_host(top_ND.index_select(0, devices::index_on(rows.last, top_ND)));
      session.finish();
      const at::Tensor residual_PD = (wanted_PD - current_PD.to(wanted_PD.scalar_type())) / layers_to_go;
      goal_ND.index_add_(0, devices::index_on(rows.last, goal_ND),
                         devices::route_like(residual_PD, goal_ND, devices::Purpose::kDelta, devices::Dtype::kMatch));
    }
    std::vector<std::string> names;
    std::vector<at::Tensor> weights, masters;
    for (const auto& name : weights_of_module(model, layer, model.family().modules.layer, this->name())) {
      if (model.weight(name).dim() != 2) continue;
      transaction.keep(name);
      names.push_back(name);
      weights.push_back(model.weight(name));
      masters.push_back(weights.back().detach().to(detail::work_dtype(model), /*non_blocking=*/false, /*copy=*/true));
    }
    const TrainableScope trainable(weights);
    Adam adam({.lr = h_.lr, .weight_decay = 0.01, .decoupled = true});
    for (int64_t step = 0; step < h_.optim_num_step; ++step) {
      context.cancel.check("edit");
      adam.step(masters, slopes(model, layer, rows, entering_ND, goal_ND, trainable.weights()));
      for (size_t w = 0; w < names.size(); ++w) write_weight(names[w], masters[w], transaction);
      context.report("insert", static_cast<size_t>(step) + 1, static_cast<size_t>(h_.optim_num_step), "");
    }
    for (const auto& weight : names) add_change(transaction, weight, layer, result);
  }

  // Gradients of the two means.
  static std::vector<at::Tensor> slopes(const models::Model& model, int layer, const Rows& rows,
                                        const at::Tensor& entering_ND, const at::Tensor& goal_ND,
                                        const std::vector<at::Tensor>& weights) {
    const at::AutoGradMode with_grad(true);
    const models::ForwardOptions options{
        .first_layer = layer, .hidden = entering_ND, .end_layer = layer + 1, .logit_tokens = models::kNoTokens};
    const at::Tensor away_ND =
        (model.forward(rows.batch, options).needed_hidden().to(goal_ND.scalar_type()) - goal_ND).square();
    const int64_t n = rows.prompt_tokens;
    at::Tensor loss = away_ND.narrow(0, 0, n).mean();
    if (n < away_ND.size(0)) loss = loss + away_ND.narrow(0, n, away_ND.size(0) - n).mean();
    if (!std::isfinite(loss.item<double>()))
      throw Error(ErrorClass::kNumeric,
                  {"layer " + std::to_string(layer), "a loss that is not finite", "a number", "choose a smaller lr"});
    return torch::autograd::grad({loss}, weights);
  }

  UnkeHparams h_;
};

std::unique_ptr<Editor> new_unke(const UnkeHparams& h, const RecipeInputs& in) {
  require_layers(h.layers, in.model, in.raw);
  for (const int64_t layer : h.layers) (void)in.model.edit_site(static_cast<int>(layer));  // refuses experts
  if (h.v_loss_layer && *h.v_loss_layer >= in.model.n_layers())
    refuse({in.raw.where("v_loss_layer"), std::to_string(*h.v_loss_layer),
            "a layer below " + std::to_string(in.model.n_layers()), ""});
  return std::make_unique<UnkeEditor>(h, in);
}

}  // namespace

EditorInfo make_unke() {
  using H = UnkeHparams;
  static const auto schema =
      hparams::Schema<H>("unke")
          .field("layers", &H::layers, "blocks that are trained, counted from 0",
                 {.required = true, .min = 0, .min_items = 1})
          .field("v_num_grad_steps", &H::v_num_grad_steps, "iterations of the target optimisation", {.min = 1})
          .field("v_lr", &H::v_lr, "learning rate of Adam for the target", {.above = 0})
          .field("v_loss_layer", &H::v_loss_layer, "block whose output is read for the loss; none means the last",
                 {.min = 0})
          .field("v_weight_decay", &H::v_weight_decay, "weight of the size of the change; 0 disables it",
                 {.formula = "times |d| / |t0|^2", .min = 0})
          .field("clamp_norm_factor", &H::clamp_norm_factor, "largest size of the change relative to the hidden state",
                 {.formula = "|d| <= factor |t0|", .above = 0})
          .field("lr", &H::lr, "learning rate of AdamW for the blocks", {.max = 1e30, .above = 0})
          .field("optim_num_step", &H::optim_num_step, "steps of AdamW a block", {.min = 1})
          .field("ex_data_num", &H::ex_data_num, "ordinary texts for which a block is to stay as it is", {.min = 1})
          .include(hparams::module_names_schema(), &H::modules)
          .unused("fact_token", "always the last token of the prompt")
          .unused("layer_selection", "read by no implementation")
          .check("layers", hparams::kAscending, [](const H& h) { return hparams::ascending(h.layers); });
  EditorInfo info = editor_entry("unke", "whole blocks trained to give a hidden state that says a long answer",
                                 "Deng et al., Everything is Editable, ICLR 2025", schema, new_unke);
  info.trains = true;
  return info;
}

}  // namespace emend::editors
