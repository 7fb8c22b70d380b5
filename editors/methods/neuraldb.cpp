// NeuralDB: Scaling Knowledge Editing in LLMs to 100,000 Facts with Neural KV Database (Fei et al., ICLR 2026, arXiv
// 2507.18028).
//
//   1. δ of each fact, by MEMIT's optimisation in the one layer; k, its key over all contexts.
//   2. (k, δ) goes into a store beside the weights.
//   3. A token whose key resembles a stored one gets its δ:  m = W k + δ_j·[cos(k, k_j) > γ], j = argmax_e cos(k, k_e)
//
// No weight changes, and every δ is that of the unedited model: the store is the same in whatever order and batches the
// facts come, as long as their keys differ.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/locate_parts.h>
#include <emend/editors/packs/stores.h>
#include <emend/editors/steps/runtime_editor.h>

#include <algorithm>

namespace emend::editors {
namespace {

struct NeuralDbHparams : hparams::LocateHparams {
  double gamma = 0.6;
};

class NeuralDb final : public RuntimeEditor {
 public:
  NeuralDb(NeuralDbHparams hparams, const RecipeInputs& in) : RuntimeEditor(in), hparams_(std::move(hparams)) {
    check_locate_hparams(hparams_, in.model, in.raw);
  }

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact> facts, const RenderedBatch&,
                                  const std::optional<RuntimePart>& before, const EditContext& context,
                                  EditResult& result) override {
    const int layer = static_cast<int>(hparams_.layers[0]);
    const models::EditSite site = model.edit_site(layer);
    NeuralStore store = before ? NeuralStore::from(*before, site, name()) : NeuralStore();
    store.gamma = hparams_.gamma;
    const auto& contexts = ensure_contexts(model, hparams_, ContextGrouping::kPlainApart, context, contexts_);
    result.contexts = contexts;
    const RenderedBatch batch =
        render_batch(model, facts, contexts, {parse_fact_token(hparams_.fact_token), {"{} is a"}});
    std::vector<const RenderedFact*> rendered;
    std::vector<PromptRow> rows;
    for (const auto& fact : batch.rendered) {
      rendered.push_back(&fact);
      rows.insert(rows.end(), fact.rows.begin(), fact.rows.end());
    }
    // Facts with one key can have one entry only.
    const TargetSpec spec = memit_targets(hparams_, model);
    const detail::Grouped grouped = detail::group_facts(rendered, /*merge_equal_keys=*/true, spec.steps);
    const std::vector<Target> targets = [&] {
      const PhaseTimer timer(result, "targets");
      return optimise_targets(model, grouped.problems, spec, context);
    }();
    const at::Tensor keys_NF = devices::to_host(
        average_keys(collect_at_lookup(model, rows, {{hooks::Site::kMlpDownIn, layer}}, context)[0], contexts));
    for (size_t i = 0; i < rendered.size(); ++i) {
      const Target& target = targets[grouped.problem_of_fact[i]];
      result.outcomes[batch.places[i]] = make_outcome(model.tokenizer(), *rendered[i], target);
      if (target.status != FactStatus::kFailed)
        (void)store.put(keys_NF[static_cast<int64_t>(i)], target.delta_D[0], rendered[i]->case_id);
    }
    if (store.size() == 0)
      throw Error(ErrorClass::kNumeric, {name(), "no fact whose target could be optimised", "finite losses",
                                         "lower v_lr, or leave out the facts that fail"});
    return store.part(layer, site);
  }

 private:
  NeuralDbHparams hparams_;
  std::optional<ContextTemplates> contexts_;  // sampled at the first edit
};

// The store beside a model. Tokens that resemble no key keep their bytes.
RuntimeEdit make_neuraldb_runtime(const RuntimePart& part, const models::Model& model, const std::string& where) {
  const models::EditSite site = detail::part_site(part, model, where);
  return {.attach = [site, store = NeuralStore::from(part, site, where)](const models::Model& to) {
    const at::Tensor home = to.weight(site.weight_name);
    const auto there = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kDelta); };
    return detail::attach_answer(
        to, hooks::Site::kMlpDownIn, hooks::Site::kMlpDownOut, site.layer,
        [keys_EF = there(store.keys_EF), residuals_ED = there(store.residuals_ED), gamma = store.gamma](
            const at::Tensor& keys_NF, const at::Tensor& x) {
          const auto [entry_N, found_N] = find_in_store(keys_NF.to(keys_EF.scalar_type()), keys_EF, gamma);
          if (!found_N.any().item<bool>()) return at::Tensor();
          const at::Tensor added_ND = residuals_ED.index_select(0, entry_N).to(x.scalar_type());
          return at::where(found_N.unsqueeze(1), x + added_ND, x);
        });
  }};
}

}  // namespace

int64_t NeuralStore::put(const at::Tensor& key_F, const at::Tensor& residual_D, int64_t case_id) {
  const at::NoGradGuard no_grad;
  const at::Tensor key = key_F.detach().to(at::kFloat), residual = residual_D.detach().to(at::kFloat);
  if (size() > 0) {
    const auto [distance, nearest] = (keys_EF - key).norm(2, 1).min(0);
    if (distance.item<double>() < 1e-3 * key.norm().item<double>()) {
      const auto entry = nearest.item<int64_t>();
      residuals_ED[entry].copy_(residual);
      case_ids[static_cast<size_t>(entry)] = case_id;
      return entry;
    }
  }
  detail::append_row(keys_EF, key);
  detail::append_row(residuals_ED, residual);
  case_ids.push_back(case_id);
  return size() - 1;
}

RuntimePart NeuralStore::part(int layer, const models::EditSite& site) const {
  return {.kind = "neuraldb",
          .values = {{"layer", layer},
                     {"shape", {site.out_features, site.in_features}},
                     {"gamma", gamma},
                     {"case_ids", case_ids}},
          .tensors = {{"keys", keys_EF}, {"residuals", residuals_ED}}};
}

NeuralStore NeuralStore::from(const RuntimePart& part, const models::EditSite& site, const std::string& where) {
  NeuralStore store;
  store.keys_EF = detail::part_tensor(part, "keys", {-1, site.in_features}, where).to(at::kFloat);
  const int64_t entries = store.keys_EF.size(0);
  store.residuals_ED = detail::part_tensor(part, "residuals", {entries, site.out_features}, where).to(at::kFloat);
  store.case_ids = part.values.at("case_ids").get<std::vector<int64_t>>();
  store.gamma = part.values.at("gamma").get<double>();
  if (entries == 0 || static_cast<int64_t>(store.case_ids.size()) != entries)
    throw Error(ErrorClass::kCorruption, {where, "a store whose lists differ in length", "a fact an entry",
                                          "get the pack again from where it came"});
  return store;
}

std::pair<at::Tensor, at::Tensor> find_in_store(const at::Tensor& query_NF, const at::Tensor& keys_EF, double gamma) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kTokens = 256;  // tokens times entries at once
  const auto unit = [](const at::Tensor& x) { return x / x.norm(2, 1, /*keepdim=*/true).clamp_min(1e-12); };
  const at::Tensor unit_FE = unit(keys_EF).t();
  std::vector<at::Tensor> nearest, found;
  for (const at::Tensor& some_NF : query_NF.split(kTokens)) {
    const auto [cosine_N, entry_N] = unit(some_NF).mm(unit_FE).max(1);
    nearest.push_back(entry_N);
    found.push_back(cosine_N > gamma);
  }
  return {at::cat(nearest), at::cat(found)};
}

EditorInfo make_neuraldb() {
  using H = NeuralDbHparams;
  static const auto schema =
      hparams::Schema<H>("neuraldb")
          .include(hparams::locate_schema())
          .field("gamma", &H::gamma,
                 "cosine of a token's key and a stored one above which the stored residual is added",
                 {.formula = "γ", .min = 0, .max = 1})
          .check("gamma", "less than 1: no key resembles another more than itself",
                 [](const H& h) { return h.gamma < 1; })
          .check("layers", "one layer: the store answers there", [](const H& h) { return h.layers.size() == 1; });
  return runtime_entry<NeuralDb>(
      "neuraldb", "keys and residuals in a store beside the weights, added where a key resembles one",
      "Fei et al., Scaling Knowledge Editing in LLMs to 100,000 Facts with Neural KV Database, ICLR 2026", schema,
      make_neuraldb_runtime);
}

}  // namespace emend::editors
