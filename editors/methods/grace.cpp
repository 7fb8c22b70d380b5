// GRACE: Aging with GRACE: Lifelong Model Editing with Discrete Key-Value Adaptors (Hartvigsen et al., NeurIPS 2023).
//
//   1. k: what enters the rewritten matrix of one layer at the last prompt token.
//   2. The codebook takes k in (algorithm 1): far from all keys, it becomes an entry of radius ε; near an entry with
//   the
//      same answer, that radius grows; near one with another answer, both radii end half way between. The same prompt
//      with another answer replaces the entry's value (published: neither is ever found again).
//   3. The entry's value takes the place of the layer's output at the tokens within its radius, and is trained by Adam
//      on the target's tokens.
//
// No weight changes. Beside a model every token is its own query; the published code asks one token a sentence, which
// is not defined for packed or cached passes.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/grace_book.h>
#include <emend/editors/keys.h>
#include <emend/editors/layer_choice.h>
#include <emend/editors/optimiser.h>
#include <emend/editors/registry.h>
#include <emend/editors/runtime_editor.h>
#include <emend/editors/training_loop.h>

namespace emend::editors {
namespace {

struct GraceHparams : LayerChoice {
  double edit_lr = 1, eps = 1, stop_loss = 1e-2;
  int64_t n_iter = 100, batch_size = 32, num_pert = 8;
  std::string dist_fn = "euc", val_init = "cold", val_train = "sgd", reg = "early_stop", replacement = "replace_last",
              eps_expand = "coverage";
  std::optional<std::string> val_reg;
  double dropout = 0;
};

const hparams::Schema<GraceHparams>& grace_schema() {
  using H = GraceHparams;
  static const auto schema =
      hparams::Schema<H>("grace")
          .include(layer_choice_schema())
          .field("edit_lr", &H::edit_lr, {.meaning = "learning rate of Adam for a value", .max = 1e30, .above = 0})
          .field("n_iter", &H::n_iter, {.meaning = "most steps for a value", .min = 1})
          .field("eps", &H::eps, {.meaning = "radius of a new entry, in units of the layer's keys", .above = 0})
          .field("batch_size", &H::batch_size, {.meaning = "facts whose values are trained together", .min = 1})
          .field("dist_fn", &H::dist_fn, {.meaning = "distance of keys", .one_of = {"euc"}})
          .field("val_init", &H::val_init,
                 {.meaning = "first value of an entry: uniform numbers from 0 to 1, or the layer's own output",
                  .one_of = {"cold", "warm"}})
          .field("val_train", &H::val_train,
                 {.meaning = "how values are trained: without perturbations", .one_of = {"sgd"}})
          .field("reg", &H::reg,
                 {.meaning = "whether training stops below stop_loss", .one_of = {"early_stop", "none"}})
          .field("stop_loss", &H::stop_loss, {.meaning = "mean loss of a chunk at which training stops", .min = 0})
          .field("replacement", &H::replacement,
                 {.meaning = "which outputs are replaced: those of the tokens within the radius",
                  .one_of = {"replace_last"}})
          .field("eps_expand", &H::eps_expand,
                 {.meaning = "what a wider radius does to its key: nothing, or halfway to the new one",
                  .one_of = {"coverage", "moving_average", "moving_avg"}})
          .field("dropout", &H::dropout,
                 {.meaning = "must be 0: the published code reads it and drops nothing", .min = 0})
          .unused("val_reg", "read by no implementation")
          .unused("num_pert", "only matters for training with perturbations, which val_train: sgd is not")
          .check("dropout", [](const H& h) -> std::string { return h.dropout == 0 ? "" : "0"; });
  return schema;
}

class Grace final : public RuntimeEditor {
 public:
  Grace(GraceHparams hparams, int layer, const models::Model& model)
      : RuntimeEditor("grace", "grace", grace_schema().dump(hparams), model),
        hparams_(std::move(hparams)),
        layer_(layer) {}

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact>, const RenderedBatch& batch,
                                  const std::optional<RuntimePart>& before, EditContext& context,
                                  EditResult& result) override {
    const models::EditSite site = model.edit_site(layer_);
    GraceBook book = before ? GraceBook::from(*before, site, name()) : GraceBook();
    const auto size = static_cast<size_t>(hparams_.batch_size);
    for (size_t begin = 0; begin < batch.rendered.size(); begin += size)
      learn_chunk(model, site, slice(batch, begin, std::min(batch.rendered.size(), begin + size)), book, context,
                  result);
    return book.part(layer_, site);
  }

 private:
  void learn_chunk(models::Model& model, const models::EditSite& site, const RenderedBatch& batch, GraceBook& book,
                   const EditContext& context, EditResult& result) const {
    admit(model, batch, book, context);
    const at::Tensor home = model.weight(site.weight_name);
    const auto there = [&](const at::Tensor& x) {
      return devices::route_like(x, home, devices::Purpose::kDelta).detach().clone();
    };
    at::Tensor values_ED = there(book.values_ED);
    values_ED.requires_grad_(true);
    const auto hooks =
        attach_grace(model, layer_, {there(book.keys_EF), there(book.radius_E)}, [values_ED] { return values_ED; });
    Adam adam({.lr = hparams_.edit_lr});
    const TrainingSteps steps = {
        .rows = [&](int64_t begin, int64_t end) { return learning_rows(batch, begin, end, Objective::kTargetNew); },
        .prepare = {},
        .leaves = [&] { return std::vector<at::Tensor>{values_ED}; },
        .update = [&](const PassResult& pass) { adam.step({values_ED}, pass.gradients); },
        .finish = {}};
    const double stop = hparams_.reg == "early_stop" ? hparams_.stop_loss : 0;
    const auto facts = static_cast<int64_t>(batch.rendered.size());
    const TrainingRecord record = train(model, facts, {hparams_.n_iter, facts, stop, layer_}, steps, context);
    note_outcomes(result, model, batch, record, hparams_.stop_loss);
    book.values_ED = devices::to_host(values_ED.detach()).clone();
  }

  void admit(const models::Model& model, const RenderedBatch& batch, GraceBook& book,
             const EditContext& context) const {
    std::vector<PromptRow> rows;
    for (const auto& fact : batch.rendered) rows.push_back(fact.rows[0]);
    const auto at_last = collect_at_lookup(
        model, rows, {{hooks::Site::kMlpDownIn, layer_}, {hooks::Site::kMlpDownOut, layer_}}, context);
    const at::Tensor keys_NF = devices::to_host(at_last[0]).to(at::kFloat);
    at::Tensor values_ND = devices::to_host(at_last[1]).to(at::kFloat);
    at::Generator generator = at::detail::createCPUGenerator(context.seed + static_cast<uint64_t>(book.size()));
    if (hparams_.val_init == "cold") values_ND = at::empty_like(values_ND).uniform_(0, 1, generator);
    for (size_t i = 0; i < batch.rendered.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      (void)book.admit(keys_NF[row], values_ND[row], batch.rendered[i].target_ids, batch.rendered[i].case_id,
                       hparams_.eps, hparams_.eps_expand != "coverage");
    }
  }

  GraceHparams hparams_;
  int layer_;
};

}  // namespace

EditorInfo make_grace() {
  EditorInfo info = editor_entry<GraceHparams>(
      "grace", "a codebook beside the weights: values with a radius at one layer",
      "Hartvigsen et al., Aging with GRACE: Lifelong Model Editing with Discrete Key-Value Adaptors, NeurIPS 2023",
      grace_schema(),
      [](const GraceHparams& h, const hparams::RawHparams& raw, const models::Model& model, const Log&) {
        return std::make_unique<Grace>(h, chosen_layer(h, model, raw), model);
      });
  info.statistics = false;
  return info;
}

}  // namespace emend::editors
