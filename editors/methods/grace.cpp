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
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/stores.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/optimiser.h>
#include <emend/editors/steps/runtime_editor.h>
#include <emend/editors/steps/training_loop.h>

namespace emend::editors {
namespace {

struct GraceHparams : LayerChoice {
  double edit_lr = 1, eps = 1, stop_loss = 1e-2;
  int64_t n_iter = 100, batch_size = 32;
  std::string dist_fn = "euc", val_init = "cold", val_train = "sgd", reg = "early_stop", replacement = "replace_last",
              eps_expand = "coverage";
  double dropout = 0;
};

// GRACE beside a model: at one layer, a token whose key lies within the radius of a codebook entry gets the entry's
// value, which may carry gradients, as the output of the MLP; every other token is untouched, byte for byte.
std::vector<hooks::HookHandle> attach_book(const models::Model& model, int layer, const at::Tensor& keys_EF,
                                           const at::Tensor& radius_E, const at::Tensor& values_ED) {
  if (keys_EF.size(0) == 0) return {};
  return detail::attach_answer(model, hooks::Site::kMlpDownIn, hooks::Site::kMlpDownOut, layer,
                               [=](const at::Tensor& keys_NF, const at::Tensor& x) {
                                 const auto [entry_N, within_N] = find_in_book(keys_NF, keys_EF, radius_E);
                                 if (!within_N.any().item<bool>()) return at::Tensor();
                                 const at::Tensor chosen_ND = values_ED.index_select(0, entry_N).to(x.scalar_type());
                                 return at::where(within_N.unsqueeze(1), chosen_ND, x);
                               });
}

class Grace final : public RuntimeEditor {
 public:
  Grace(GraceHparams hparams, const RecipeInputs& in)
      : RuntimeEditor(in), hparams_(std::move(hparams)), layer_(chosen_layer(hparams_, in.model, in.raw)) {}

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact>, const RenderedBatch& batch,
                                  const std::optional<RuntimePart>& before, const EditContext& context,
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
    const std::vector<int64_t> own = admit(model, batch, book, context);
    const at::Tensor home = model.weight(site.weight_name);
    const auto there = [&](const at::Tensor& x) {
      return devices::route_like(x, home, devices::Purpose::kDelta).detach().clone();
    };
    at::Tensor values_ED = there(book.values_ED);
    values_ED.requires_grad_(true);
    const auto hooks = attach_book(model, layer_, there(book.keys_EF), there(book.radius_E), values_ED);
    // A prompt may pass through an earlier fact's key, whose value stays as it is.
    const at::Tensor own_E1 = there(at::zeros({book.size(), 1}, at::kFloat).index_fill_(0, at::tensor(own), 1));
    Adam adam({.lr = hparams_.edit_lr});
    const TrainingSteps steps = {
        .rows = [&](int64_t begin, int64_t end) { return learning_rows(batch, begin, end, Objective::kTargetNew); },
        .leaves = [&] { return std::vector<at::Tensor>{values_ED}; },
        .update =
            [&](const PassResult& pass) {
              const at::Tensor& gradient_ED = pass.gradients[0];
              adam.step({values_ED}, {gradient_ED.defined() ? gradient_ED * own_E1 : gradient_ED});
            }};
    const double stop = hparams_.reg == "early_stop" ? hparams_.stop_loss : 0;
    const auto facts = static_cast<int64_t>(batch.rendered.size());
    const TrainingRecord record = train(model, facts, {hparams_.n_iter, facts, stop, layer_}, steps, context);
    note_outcomes(result, model, batch, record, hparams_.stop_loss);
    book.values_ED = devices::to_host(values_ED.detach()).clone();
  }

  // The entries of these facts.
  std::vector<int64_t> admit(const models::Model& model, const RenderedBatch& batch, GraceBook& book,
                             const EditContext& context) const {
    std::vector<int64_t> own;
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
      own.push_back(book.admit(keys_NF[row], values_ND[row], batch.rendered[i].target_ids, batch.rendered[i].case_id,
                               hparams_.eps, hparams_.eps_expand != "coverage"));
    }
    return own;
  }

  GraceHparams hparams_;
  int layer_;
};

RuntimeEdit make_grace_runtime(const RuntimePart& part, const models::Model& model, const std::string& where) {
  const models::EditSite site = detail::part_site(part, model, where);
  return {.attach = [site, book = GraceBook::from(part, site, where)](const models::Model& to) {
    const at::Tensor home = to.weight(site.weight_name);
    const auto there = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kDelta); };
    return attach_book(to, site.layer, there(book.keys_EF), there(book.radius_E), there(book.values_ED));
  }};
}

}  // namespace

int64_t GraceBook::admit(const at::Tensor& key_F, const at::Tensor& value_D, const std::vector<int64_t>& label,
                         int64_t case_id, double radius, bool moving_average) {
  const at::NoGradGuard no_grad;
  const auto add = [&](double entry_radius) {
    detail::append_row(keys_EF, key_F);
    detail::append_row(values_ED, value_D);
    detail::append_row(radius_E, at::scalar_tensor(entry_radius, at::kFloat));
    labels.push_back(label);
    case_ids.push_back(case_id);
    return size() - 1;
  };
  if (size() == 0) return add(radius);
  const at::Tensor distances = (keys_EF - key_F).norm(2, 1);
  const int64_t nearest = distances.argmin().item<int64_t>();
  const double distance = distances[nearest].item<double>(), reach = radius_E[nearest].item<double>();
  if (distance > radius + reach) return add(radius);
  if (labels[static_cast<size_t>(nearest)] != label) {
    if (distance < 1e-3 * radius) {  // the same prompt: the newer answer counts
      labels[static_cast<size_t>(nearest)] = label;
      case_ids[static_cast<size_t>(nearest)] = case_id;
      values_ED[nearest].copy_(value_D);
      return nearest;
    }
    // Two answers within reach: both get half the way between them.
    radius_E[nearest] = std::max(distance / 2 - 1e-5, 0.0);
    return add(distance / 2);
  }
  if (distance > reach) {
    radius_E[nearest] = distance;
    if (moving_average) keys_EF[nearest].copy_((keys_EF[nearest] + key_F) / 2);
  }
  return nearest;
}

RuntimePart GraceBook::part(int layer, const models::EditSite& site) const {
  return {.kind = "grace",
          .values = {{"layer", layer},
                     {"shape", {site.out_features, site.in_features}},
                     {"distance", "euclidean"},
                     {"labels", labels},
                     {"case_ids", case_ids}},
          .tensors = {{"keys", keys_EF}, {"values", values_ED}, {"radius", radius_E}}};
}

GraceBook GraceBook::from(const RuntimePart& part, const models::EditSite& site, const std::string& where) {
  GraceBook book;
  book.keys_EF = detail::part_tensor(part, "keys", {-1, site.in_features}, where).to(at::kFloat);
  const int64_t entries = book.keys_EF.size(0);
  book.values_ED = detail::part_tensor(part, "values", {entries, site.out_features}, where).to(at::kFloat);
  book.radius_E = detail::part_tensor(part, "radius", {entries}, where).to(at::kFloat);
  book.labels = part.values.at("labels").get<std::vector<std::vector<int64_t>>>();
  book.case_ids = part.values.at("case_ids").get<std::vector<int64_t>>();
  if (static_cast<int64_t>(book.labels.size()) != entries || static_cast<int64_t>(book.case_ids.size()) != entries ||
      part.values.at("distance") != "euclidean")
    throw Error(ErrorClass::kCorruption, {where, "a codebook whose lists differ in length", "a label an entry",
                                          "get the pack again from where it came"});
  return book;
}

std::pair<at::Tensor, at::Tensor> find_in_book(const at::Tensor& query_NF, const at::Tensor& keys_EF,
                                               const at::Tensor& radius_E) {
  const at::NoGradGuard no_grad;
  // Plain differences: the shorter formula by inner products loses the small distances that decide here.
  constexpr int64_t kTokens = 64;
  std::vector<at::Tensor> nearest, within;
  for (const at::Tensor& some_NF : query_NF.detach().to(keys_EF.scalar_type()).split(kTokens)) {
    const auto [distance_N, index_N] = at::cdist(some_NF, keys_EF, 2, /*compute_mode=*/2).min(1);
    nearest.push_back(index_N);
    within.push_back(distance_N <= radius_E.index_select(0, index_N));
  }
  return {at::cat(nearest), at::cat(within)};
}

EditorInfo make_grace() {
  using H = GraceHparams;
  static const auto schema =
      hparams::Schema<H>("grace")
          .include(layer_choice_schema())
          .field("edit_lr", &H::edit_lr, "learning rate of Adam for a value", {.max = 1e30, .above = 0})
          .field("n_iter", &H::n_iter, "most steps for a value", {.min = 1})
          .field("eps", &H::eps, "radius of a new entry, in units of the layer's keys", {.above = 0})
          .field("batch_size", &H::batch_size, "facts whose values are trained together", {.min = 1})
          .field("dist_fn", &H::dist_fn, "distance of keys", {.one_of = {"euc"}})
          .field("val_init", &H::val_init,
                 "first value of an entry: uniform numbers from 0 to 1, or the layer's own output",
                 {.one_of = {"cold", "warm"}})
          .field("val_train", &H::val_train, "how values are trained: without perturbations", {.one_of = {"sgd"}})
          .field("reg", &H::reg, "whether training stops below stop_loss", {.one_of = {"early_stop", "none"}})
          .field("stop_loss", &H::stop_loss, "mean loss of a chunk at which training stops", {.min = 0})
          .field("replacement", &H::replacement, "which outputs are replaced: those of the tokens within the radius",
                 {.one_of = {"replace_last"}})
          .field("eps_expand", &H::eps_expand,
                 "what a wider radius does to its key: nothing, or halfway to the new one",
                 {.one_of = {"coverage", "moving_average", "moving_avg"}})
          .field("dropout", &H::dropout, "must be 0: the published code reads it and drops nothing", {.min = 0})
          .unused("val_reg", "read by no implementation")
          .unused("num_pert", "only matters for training with perturbations, which val_train: sgd is not")
          .check("dropout", "0", [](const H& h) { return h.dropout == 0; });
  return runtime_entry<Grace>(
      "grace", "a codebook beside the weights: values with a radius at one layer",
      "Hartvigsen et al., Aging with GRACE: Lifelong Model Editing with Discrete Key-Value Adaptors, NeurIPS 2023",
      schema, make_grace_runtime);
}

}  // namespace emend::editors
