// LoRA and AdaLoRA as editors (Hu et al., 2022; Zhang et al., 2023; the baseline of EasyEdit): low-rank adapters
// trained on the target's tokens, then written into the weights as factors.
//
//   lora     ΔW = (α/r)·B·A
//   adalora  ΔW = (α/r)·P·diag(λ)·Q with the penalty 0.5·mean(‖PᵀP − I‖ + ‖QQᵀ − I‖). As in EasyEdit's use of it the
//            rank is never cut: no budget is scheduled. There peft's first rank, 12, stands in for `rank`; here it is.
//   A: Adam over the facts in chunks, no early stop unless stop_loss is given.
//
//   O output width · I input width · R rank
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/lora.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/training_loop.h>
#include <torch/csrc/autograd/autograd.h>

namespace emend::editors {
namespace {

struct LoraHparams {
  std::string lora_type = "adalora";
  int64_t rank = 8;
  double lora_alpha = 32, lora_dropout = 0.1;
  std::vector<std::string> target_modules;
  std::vector<int64_t> layers;
  int64_t num_steps = 50, batch_size = 64;
  double lr = 5e-3, weight_decay = 0, stop_loss = 0, kl_factor = 0;
  std::optional<double> norm_constraint;
  hparams::ModuleNames modules;
};

// The three factors of AdaLoRA, put in place of the two of each of LoraAdapters'.
class OrthogonalAdapters {
 public:
  OrthogonalAdapters(const LoraAdapters& base, const LoraShape& shape) : adapters_(base.adapters()) {
    at::Generator generator = at::detail::createCPUGenerator(shape.seed);
    for (const auto& adapter : adapters_) {
      const at::Tensor a_RI = adapter->a_RI;
      const auto normal = [&](at::IntArrayRef sizes) {
        const at::Tensor drawn = at::empty(sizes, at::kFloat).normal_(0, 0.02, generator).to(a_RI.scalar_type());
        return devices::route_like(drawn, a_RI, devices::Purpose::kDelta).detach().requires_grad_(true);
      };
      p_OR_.push_back(normal(adapter->b_OR.sizes()));
      lambda_R_.push_back(at::zeros({shape.rank}, a_RI.options().requires_grad(false)).requires_grad_(true));
      q_RI_.push_back(normal(a_RI.sizes()));
    }
  }

  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < p_OR_.size(); ++i) all.insert(all.end(), {p_OR_[i], lambda_R_[i], q_RI_[i]});
    return all;
  }

  /// Puts B = P·diag(λ), A = Q into the adapters, with their history.
  void put_in_place() const {
    const at::AutoGradMode with_grad(true);
    for (size_t i = 0; i < adapters_.size(); ++i) {
      adapters_[i]->a_RI = q_RI_[i];
      adapters_[i]->b_OR = p_OR_[i] * lambda_R_[i];
    }
  }

  /// Adds the gradient of the penalty.
  void add_penalty(std::vector<at::Tensor>& gradients) const {
    const at::AutoGradMode with_grad(true);
    const double share = 0.5 / static_cast<double>(2 * adapters_.size());
    for (size_t i = 0; i < adapters_.size(); ++i) {
      const at::Tensor eye_RR = at::eye(lambda_R_[i].size(0), p_OR_[i].options().requires_grad(false));
      const at::Tensor penalty =
          ((p_OR_[i].t().mm(p_OR_[i]) - eye_RR).norm() + (q_RI_[i].mm(q_RI_[i].t()) - eye_RR).norm()) * share;
      const auto added = torch::autograd::grad({penalty}, {p_OR_[i], q_RI_[i]});
      for (const size_t part : {size_t{0}, size_t{2}}) {
        at::Tensor& gradient = gradients[3 * i + part];
        gradient = gradient.defined() ? gradient + added[part / 2] : added[part / 2];
      }
    }
  }

  [[nodiscard]] std::vector<WeightDelta> deltas(std::vector<WeightDelta> like) const {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < like.size(); ++i) {
      like[i].left_DR = p_OR_[i].detach() * lambda_R_[i].detach() * adapters_[i]->scale;
      like[i].right_FR = q_RI_[i].detach().t().contiguous();
    }
    return like;
  }

 private:
  std::vector<std::shared_ptr<models::LinearAdapter>> adapters_;
  std::vector<at::Tensor> p_OR_, lambda_R_, q_RI_;
};

class LoraEditor final : public NamedEditor {
 public:
  LoraEditor(LoraHparams hparams, const RecipeInputs& in) : NamedEditor(in), hparams_(std::move(hparams)) {
    require_layers(hparams_.layers, in.model, in.raw);
  }

  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                const EditContext& context) override {
    return edit_plain_prompts(*this, model, facts, context, [&](const RenderedBatch& batch, EditResult& result) {
      const auto deltas = trained(model, batch, context, result);
      EditTransaction transaction(model, context.transaction);
      for (const auto& delta : deltas) add_delta(delta, transaction, result);
      context.cancel.check("insert");
      transaction.commit();
    });
  }

 private:
  // The model carries adapters in here alone.
  std::vector<WeightDelta> trained(models::Model& model, const RenderedBatch& batch, const EditContext& context,
                                   EditResult& result) const {
    const LoraShape shape{hparams_.rank,           hparams_.lora_alpha, hparams_.lora_dropout,
                          hparams_.target_modules, hparams_.layers,     context.seed};
    LoraAdapters adapters(model, shape);
    std::optional<OrthogonalAdapters> orthogonal;
    if (hparams_.lora_type == "adalora") orthogonal.emplace(adapters, shape);
    const std::vector<at::Tensor> parameters = orthogonal ? orthogonal->parameters() : adapters.parameters();
    Adam adam({.lr = hparams_.lr, .weight_decay = hparams_.weight_decay});
    adapters.set_training(true);
    const TrainingSteps steps = {
        .rows = [&](int64_t begin, int64_t end) { return learning_rows(batch, begin, end, Objective::kTargetNew); },
        .prepare =
            [&](int64_t, int64_t) {
              if (orthogonal) orthogonal->put_in_place();
            },
        .leaves = [&] { return parameters; },
        .update =
            [&](const PassResult& pass) {
              std::vector<at::Tensor> gradients = pass.gradients;
              if (orthogonal) orthogonal->add_penalty(gradients);
              adam.step(parameters, gradients);
            },
        .finish = [&] { adapters.set_training(false); }};
    const TrainingRecord record =
        train(model, static_cast<int64_t>(batch.rendered.size()),
              {hparams_.num_steps, hparams_.batch_size, hparams_.stop_loss, adapters.first_layer()}, steps, context);
    note_outcomes(result, model, batch, record, std::max(hparams_.stop_loss, 1e-2));
    return orthogonal ? orthogonal->deltas(adapters.deltas()) : adapters.deltas();
  }

  LoraHparams hparams_;
};

}  // namespace

EditorInfo make_lora() {
  using H = LoraHparams;
  static const auto schema =
      hparams::Schema<H>("lora")
          .field("lora_type", &H::lora_type,
                 "two factors, or three with a penalty that keeps the outer ones orthogonal",
                 {.one_of = {"lora", "adalora"}})
          .field("rank", &H::rank, "rank of every adapter", {.formula = "r", .min = 1, .aliases = {"r", "lora_r"}})
          .field("lora_alpha", &H::lora_alpha, "scale of an adapter", {.formula = "(alpha/r) B A", .above = 0})
          .field("lora_dropout", &H::lora_dropout, "share of an adapter's inputs left out in training",
                 {.min = 0, .max = 0.99})
          .field("target_modules", &H::target_modules,
                 "names of the linear layers, such as [q_proj, v_proj]; [all-linear] means every one; [] the "
                 "query and value projections")
          .field("layers", &H::layers, "blocks that get adapters; [] means all", {.min = 0})
          .field("num_steps", &H::num_steps, "epochs over the facts", {.min = 1})
          .field("batch_size", &H::batch_size, "facts in one step", {.min = 1})
          .field("lr", &H::lr, "learning rate of Adam", {.max = 1e30, .above = 0})
          .field("weight_decay", &H::weight_decay, "Adam's weight decay; 0 disables it", {.min = 0})
          .field("stop_loss", &H::stop_loss, "loss below which training stops; 0 (as published) disables it",
                 {.min = 0})
          .field("norm_constraint", &H::norm_constraint, "must be none: the published code reads it and limits nothing")
          .field("kl_factor", &H::kl_factor, "must be 0: the published code reads it and computes nothing with it",
                 {.min = 0})
          .include(hparams::module_names_schema(), &H::modules)
          .check("norm_constraint", "none: adapters have no box", [](const H& h) { return !h.norm_constraint; })
          .check("kl_factor", "0", [](const H& h) { return h.kl_factor == 0; });
  return training_entry<LoraEditor>("lora", "low-rank adapters trained on the facts, then merged",
                                    "Hu et al., LoRA, ICLR 2022; Zhang et al., AdaLoRA, ICLR 2023", schema);
}

}  // namespace emend::editors
