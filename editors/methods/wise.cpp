// WISE: Rethinking the Knowledge Memory for Lifelong Model Editing of Large Language Models (Wang et al., NeurIPS
// 2024).
//
//   A side memory W' = W + Δ of one layer, of which a random share `mask_ratio` may move.
//   1. Train Δ on `save_freq` facts at a time by gradient descent on nll + act:
//      d(k)  = ‖Δk‖, how much the memory would change the output for a key
//      act   = mean of [d_out − d_in + γ]₊ over pairs, of [d_out − α]₊ and of [β − d_in]₊
//      in: the subject's last token; out: the other tokens of the prompts and of `loc_prompts`.
//      Entries of Δ stay within norm_constraint.
//   2. Its threshold is act_ratio times the smallest d_in of its facts.
//   3. Every `merge_freq` facts the memories of these facts become one (ties or linear), with the smallest threshold;
//      with `retrieve: false` all memories are merged into one.
//
// Beside a model each token is routed by its own d; the published code averages over the tokens of a pass, which packed
// and cached passes do not have, and squashes both outputs with the activation function, which the paper does not.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/stores.h>
#include <emend/editors/steps/layer_choice.h>
#include <emend/editors/steps/runtime_editor.h>
#include <emend/editors/steps/training_loop.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <torch/csrc/autograd/autograd.h>

namespace emend::editors {
namespace {

struct WiseHparams : LayerChoice {
  double mask_ratio = 0.2, edit_lr = 1, act_ratio = 0.5, densities = 0.53, weights = 1, stop_loss = 1e-2;
  int64_t n_iter = 70, save_freq = 500, merge_freq = 1000;
  std::optional<double> norm_constraint = 1.0;
  std::vector<double> act_margin = {5, 20, 10};
  std::string merge_alg = "ties", objective_optimization = "only_label";
  bool retrieve = true, replay = false;
  std::vector<std::string> loc_prompts = {"The weather today is", "She opened the door and", "In the early morning,",
                                          "The results of the study show that", "You can cook rice by"};
};

// TIES (Yadav et al., 2023): keep the largest entries of each, agree on a sign, average what has it. Linear: mean.
at::Tensor merged(const std::vector<WiseMemory>& memories, const WiseHparams& h) {
  std::vector<at::Tensor> parts;
  for (const auto& memory : memories) {
    at::Tensor delta = memory.delta_DF;
    if (h.merge_alg == "ties") {
      const auto keep = std::max<int64_t>(1, static_cast<int64_t>(h.densities * static_cast<double>(delta.numel())));
      const at::Tensor smallest = std::get<0>(delta.abs().flatten().topk(keep)).min();
      delta = at::where(delta.abs() >= smallest, delta, at::zeros_like(delta));
    }
    parts.push_back(delta);
  }
  // By the facts that each holds, so that a memory made of several counts as they did.
  const auto facts = mapped(memories, [](const auto& memory) { return static_cast<double>(memory.case_ids.size()); });
  const at::Tensor all = at::stack(parts), share_M11 = at::tensor(facts, all.options()).view({-1, 1, 1});
  if (h.merge_alg == "linear") return (all * share_M11).sum(0) / share_M11.sum() * h.weights;
  const at::Tensor agree = (all.sign() == (all * share_M11).sum(0).sign()).logical_and(all != 0) * share_M11;
  return (all * agree).sum(0) / agree.sum(0).clamp_min(1);  // weights that are equal cancel
}

class WiseTraining {
 public:
  WiseTraining(const WiseHparams& h, const models::Model& model, const models::EditSite& site,
               const EditContext& context)
      : h_(h), model_(model), site_(site), context_(context), home_(model.weight(site.weight_name)) {}

  WiseMemory run(const RenderedBatch& batch, const WiseMemory* grown, uint64_t seed, EditResult& result) {
    batch_ = &batch;
    collect_keys();
    const at::TensorOptions options = home_.options().dtype(at::kFloat).requires_grad(false);
    const at::Tensor start = grown ? devices::route_like(grown->delta_DF, home_, devices::Purpose::kDelta).clone()
                                   : at::zeros({site_.out_features, site_.in_features}, options);
    delta_DF_ = start.detach().requires_grad_(true);
    at::Generator generator = at::detail::createCPUGenerator(seed);
    const at::Tensor drawn = at::empty(delta_DF_.sizes(), at::kFloat).uniform_(0, 1, generator);
    mask_DF_ = devices::route_like((drawn < h_.mask_ratio).to(at::kFloat), home_, devices::Purpose::kDelta);
    train_delta(result);
    WiseMemory memory;
    memory.delta_DF = devices::to_host(delta_DF_.detach()).clone();
    memory.threshold = h_.act_ratio * activation(in_RF_).min().item<double>();
    if (grown) {
      memory.threshold = std::min(memory.threshold, grown->threshold);
      memory.case_ids = grown->case_ids;
    }
    for (const auto& fact : batch.rendered) memory.case_ids.push_back(fact.case_id);
    return memory;
  }

 private:
  // Keys of the subjects' last tokens and of the tokens that must not be routed. Layers below do not change, so these
  // hold for the whole training.
  void collect_keys() {
    std::vector<PromptRow> in, out;
    for (const auto& fact : batch_->rendered) {
      PromptRow row = fact.rows[0];
      row.lookup = row.subject.second - 1;
      in.push_back(row);
      for (int64_t t = 0; t < static_cast<int64_t>(row.ids.size()); ++t) {
        if (t >= row.subject.first && t < row.subject.second) continue;
        out.push_back(row);
        out.back().lookup = t;
      }
    }
    for (const auto& text : h_.loc_prompts) {
      PromptRow row;
      row.text = text;
      row.ids = model_.tokenizer().encode_ids(text, true);
      for (int64_t t = 0; t < static_cast<int64_t>(row.ids.size()); ++t) {
        row.lookup = t;
        out.push_back(row);
      }
    }
    const hooks::SiteRef key{hooks::Site::kMlpDownIn, site_.layer};
    in_RF_ = collect_at_lookup(model_, in, {key}, context_)[0].to(at::kFloat);
    if (!out.empty()) out_PF_ = collect_at_lookup(model_, out, {key}, context_)[0].to(at::kFloat);
  }

  [[nodiscard]] at::Tensor activation(const at::Tensor& keys_NF) const {
    return devices::route_like(keys_NF, home_, devices::Purpose::kKeys).mm(delta_DF_.t()).norm(2, 1);
  }

  static at::Tensor hinge(const at::Tensor& x) {
    const at::Tensor positive = x > 0;
    return (x * positive).sum() / positive.sum().clamp_min(1);
  }

  [[nodiscard]] at::Tensor margin_loss() const {
    const double alpha = h_.act_margin[0], beta = h_.act_margin[1], gamma = h_.act_margin[2];
    const at::Tensor in_R = activation(in_RF_);
    at::Tensor loss = hinge(beta - in_R);
    if (out_PF_.defined()) {
      const at::Tensor out_P = activation(out_PF_);
      loss = loss + hinge(out_P - alpha) + hinge(out_P.unsqueeze(1) - in_R.unsqueeze(0) + gamma);
    }
    return loss;
  }

  void train_delta(EditResult& result) {
    at::Tensor routed_N, margin;  // margin: of this step
    const auto with_memory = [&](const at::Tensor& keys_NF, const at::Tensor& x) {
      if (routed_N.size(0) != x.size(0)) return at::Tensor();  // not one of the training rows
      const at::Tensor change_ND = keys_NF.to(at::kFloat).mm(delta_DF_.t()) * routed_N.unsqueeze(1);
      return x + change_ND.to(x.scalar_type());
    };
    const auto handles =
        detail::attach_answer(model_, hooks::Site::kMlpDownIn, hooks::Site::kMlpDownOut, site_.layer, with_memory);
    const auto facts = static_cast<int64_t>(batch_->rendered.size());
    routed_N = devices::route_like(routed_tokens(), home_, devices::Purpose::kInput);
    const TrainingSteps steps = {
        .rows = [&](int64_t begin, int64_t end) { return learning_rows(*batch_, begin, end, Objective::kTargetNew); },
        .leaves = [&] { return std::vector<at::Tensor>{delta_DF_}; },
        .update = [&](const PassResult& pass) { descend(pass.gradients.at(0), margin); },
        .more =
            [&] {
              const at::AutoGradMode with_grad(true);
              margin = margin_loss();
              return margin.item<double>();
            }};
    const TrainingRecord record = train(model_, facts, {h_.n_iter, facts, h_.stop_loss, site_.layer}, steps, context_);
    note_outcomes(result, model_, *batch_, record, h_.stop_loss);
  }

  // 1 for the subject's last token of each training row, packed; the reference engine fills rows up on the right.
  [[nodiscard]] at::Tensor routed_tokens() const {
    std::vector<float> routed;
    const auto all = learning_rows(*batch_, 0, std::ssize(batch_->rendered), Objective::kTargetNew);
    size_t longest = 0;
    for (const auto& row : all) longest = std::max(longest, row.ids.size());
    for (size_t r = 0; r < all.size(); ++r)
      for (size_t t = 0; t < (context_.engine == Engine::kReference ? longest : all[r].ids.size()); ++t)
        routed.push_back(static_cast<int64_t>(t) == batch_->rendered[r].rows[0].subject.second - 1 ? 1.0F : 0.0F);
    return at::tensor(routed, at::kFloat);
  }

  void descend(const at::Tensor& nll_gradient, const at::Tensor& margin_loss) {
    const at::Tensor margin = torch::autograd::grad({margin_loss}, {delta_DF_})[0];
    const at::NoGradGuard no_grad;
    at::Tensor value = delta_DF_.detach();
    const at::Tensor gradient = nll_gradient.defined() ? nll_gradient + margin : margin;
    value.sub_(gradient * mask_DF_ * h_.edit_lr);
    if (h_.norm_constraint) value.clamp_(-*h_.norm_constraint, *h_.norm_constraint);
  }

  const WiseHparams& h_;
  const models::Model& model_;
  const models::EditSite& site_;
  const EditContext& context_;
  at::Tensor home_;
  const RenderedBatch* batch_ = nullptr;
  at::Tensor in_RF_, out_PF_, delta_DF_, mask_DF_;
};

class Wise final : public RuntimeEditor {
 public:
  Wise(WiseHparams hparams, const RecipeInputs& in)
      : RuntimeEditor(in), hparams_(std::move(hparams)), layer_(chosen_layer(hparams_, in.model, in.raw)) {}

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact>, const RenderedBatch& batch,
                                  const std::optional<RuntimePart>& before, const EditContext& context,
                                  EditResult& result) override {
    const models::EditSite site = model.edit_site(layer_);
    std::vector<WiseMemory> memories = before ? wise_memories(*before, site, name()) : std::vector<WiseMemory>{};
    const auto shard = static_cast<size_t>(hparams_.save_freq);
    for (size_t next = 0; next < batch.rendered.size();) {
      // A memory that is not full goes on.
      std::optional<WiseMemory> grown;
      if (!memories.empty() && memories.back().case_ids.size() < shard) {
        grown = std::move(memories.back());
        memories.pop_back();
      }
      const size_t room = shard - (grown ? grown->case_ids.size() : 0);
      const RenderedBatch part = slice(batch, next, std::min(batch.rendered.size(), next + room));
      next += part.rendered.size();
      uint64_t earlier = 0;  // facts of finished memories: each shard has another mask, the same while it grows
      for (const auto& memory : memories) earlier += memory.case_ids.size();
      memories.push_back(WiseTraining(hparams_, model, site, context)
                             .run(part, grown ? &*grown : nullptr, context.seed + earlier, result));
      merge(memories);
    }
    return wise_part(memories, site);
  }

 private:
  // The last memories become one once they hold merge_freq facts; all of them without retrieval.
  void merge(std::vector<WiseMemory>& memories) const {
    size_t first = memories.size();
    int64_t facts = 0;
    while (first > 0 && static_cast<int64_t>(memories[first - 1].case_ids.size()) < hparams_.merge_freq)
      facts += static_cast<int64_t>(memories[--first].case_ids.size());
    if (!hparams_.retrieve) first = 0;
    if (memories.size() - first < 2 || (hparams_.retrieve && facts < hparams_.merge_freq)) return;
    const std::vector<WiseMemory> group(memories.begin() + static_cast<int64_t>(first), memories.end());
    WiseMemory one;
    one.delta_DF = merged(group, hparams_);
    one.threshold = group[0].threshold;
    for (const auto& memory : group) {
      one.threshold = std::min(one.threshold, memory.threshold);
      one.case_ids.insert(one.case_ids.end(), memory.case_ids.begin(), memory.case_ids.end());
    }
    memories.resize(first);
    memories.push_back(std::move(one));
  }

  WiseHparams hparams_;
  int layer_;
};

// WISE beside a model: each token asks every side memory how much it would change the layer's output. The one that
// would change it most, if more than its threshold, is added; others keep the main memory's output, byte for byte.
std::vector<hooks::HookHandle> attach_memories(const models::Model& model, const models::EditSite& site,
                                               const std::vector<WiseMemory>& memories) {
  if (memories.empty()) return {};
  const at::Tensor home = model.weight(site.weight_name);
  std::vector<at::Tensor> deltas_DF;
  std::vector<double> thresholds;
  for (const auto& memory : memories) {
    deltas_DF.push_back(devices::route_like(memory.delta_DF, home, devices::Purpose::kDelta));
    thresholds.push_back(memory.threshold);
  }
  const at::Tensor threshold_M1 =
      devices::route_like(at::tensor(thresholds, at::kDouble).to(at::kFloat), home, devices::Purpose::kDelta)
          .unsqueeze(1);
  return detail::attach_answer(
      model, hooks::Site::kMlpDownIn, hooks::Site::kMlpDownOut, site.layer,
      [=](const at::Tensor& keys, const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        const at::Tensor keys_NF = keys.to(at::kFloat);
        const auto change_MND = mapped(deltas_DF, [&](const auto& delta_DF) { return keys_NF.mm(delta_DF.t()); });
        const at::Tensor all_MND = at::stack(change_MND);
        at::Tensor activation_MN = all_MND.norm(2, 2);
        activation_MN = at::where(activation_MN > threshold_M1, activation_MN, at::zeros_like(activation_MN));
        const auto [strongest_N, which_N] = activation_MN.max(0);
        const at::Tensor routed_N = strongest_N > 0;
        if (!routed_N.any().item<bool>()) return at::Tensor();
        const at::Tensor index_1ND = which_N.view({1, -1, 1}).expand({1, all_MND.size(1), all_MND.size(2)});
        const at::Tensor added_ND = all_MND.gather(0, index_1ND).squeeze(0);
        return at::where(routed_N.unsqueeze(1), (x.to(at::kFloat) + added_ND).to(x.scalar_type()), x);
      });
}

RuntimeEdit make_wise_runtime(const RuntimePart& part, const models::Model& model, const std::string& where) {
  const models::EditSite site = detail::part_site(part, model, where);
  return {.attach = [site, memories = wise_memories(part, site, where)](const models::Model& to) {
    return attach_memories(to, site, memories);
  }};
}

}  // namespace

RuntimePart wise_part(const std::vector<WiseMemory>& memories, const models::EditSite& site) {
  RuntimePart part;
  part.kind = "wise";
  auto list = nlohmann::json::array();
  for (const auto& memory : memories) {
    part.tensors["memory." + std::to_string(list.size())] = memory.delta_DF;
    list.push_back({{"threshold", memory.threshold}, {"case_ids", memory.case_ids}});
  }
  part.values = {{"layer", site.layer}, {"shape", {site.out_features, site.in_features}}, {"memories", list}};
  return part;
}

std::vector<WiseMemory> wise_memories(const RuntimePart& part, const models::EditSite& site, const std::string& where) {
  std::vector<WiseMemory> memories;
  for (const auto& entry : part.values.at("memories")) {
    WiseMemory memory;
    memory.delta_DF = detail::part_tensor(part, "memory." + std::to_string(memories.size()),
                                          {site.out_features, site.in_features}, where)
                          .to(at::kFloat);
    memory.threshold = entry.at("threshold").get<double>();
    memory.case_ids = entry.at("case_ids").get<std::vector<int64_t>>();
    memories.push_back(std::move(memory));
  }
  return memories;
}

EditorInfo make_wise() {
  using H = WiseHparams;
  static const auto schema =
      hparams::Schema<H>("wise")
          .include(layer_choice_schema())
          .field("mask_ratio", &H::mask_ratio, "share of a memory's entries that may move", {.max = 1, .above = 0})
          .field("edit_lr", &H::edit_lr, "learning rate of gradient descent", {.max = 1e30, .above = 0})
          .field("n_iter", &H::n_iter, "most steps for one memory", {.min = 1})
          .field("norm_constraint", &H::norm_constraint, "largest change of any entry; none disables it", {.above = 0})
          .field("act_margin", &H::act_margin,
                 "alpha, beta, gamma: how little the memory may change other tokens, how much it must change "
                 "the facts', and how far apart they must be",
                 {.min = 0, .min_items = 3})
          .field("act_ratio", &H::act_ratio, "threshold in units of the smallest change at a fact", {.above = 0})
          .field("save_freq", &H::save_freq, "facts of one memory", {.min = 1})
          .field("merge_freq", &H::merge_freq, "facts after which their memories become one", {.min = 1})
          .field("merge_alg", &H::merge_alg, "how memories are merged", {.one_of = {"ties", "linear"}})
          .field("densities", &H::densities, "share of the largest entries that ties keeps", {.max = 1, .above = 0})
          .field("weights", &H::weights, "weight of the memories together in a linear merge", {.above = 0})
          .field("retrieve", &H::retrieve, "several memories, of which each token takes one; false: one alone")
          .field("replay", &H::replay, "must be false: earlier facts are not trained on again")
          .field("objective_optimization", &H::objective_optimization, "which tokens are learnt: the target's",
                 {.one_of = {"only_label"}})
          .field("stop_loss", &H::stop_loss, "mean loss at which training of a memory stops", {.min = 0})
          .field("loc_prompts", &H::loc_prompts, "sentences that no memory may answer")
          .check("act_ratio", "less than 1: from 1 on a memory is shut at a fact of its own",
                 [](const H& h) { return h.act_ratio < 1; })
          .check("weights", "1 with merge_alg ties, in whose mean a weight of all memories cancels",
                 [](const H& h) { return h.weights == 1 || h.merge_alg != "ties"; })
          .check("replay", "false", [](const H& h) { return !h.replay; })
          .check("act_margin", "three numbers", [](const H& h) { return h.act_margin.size() == 3; })
          .check("merge_freq", "a multiple of save_freq", [](const H& h) { return h.merge_freq % h.save_freq == 0; });
  return runtime_entry<Wise>(
      "wise", "side memories beside the weights, entered by activation",
      "Wang et al., WISE: Rethinking the Knowledge Memory for Lifelong Model Editing of Large Language Models, "
      "NeurIPS 2024",
      schema, make_wise_runtime);
}

}  // namespace emend::editors
