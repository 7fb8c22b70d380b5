#include "model_fixture.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/safetensors.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/family.h>
#include <emend/models/model.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

namespace emend::models {
namespace {

using Json = nlohmann::json;
using hooks::Site;

constexpr double kNotFinite = 1e30;  // JSON has no infinity

class FixtureRun {
 public:
  FixtureRun(const SafetensorsFile& expected, Model model) : expected_(expected), model_(std::move(model)) {}

  Json run() {
    for (const std::string side : {"right", "left"})
      if (expected_.contains(side + ".input_ids")) run_side(side);
    if (expected_.contains("grad.k") && expected_.contains("right.input_ids")) run_gradients();
    if (expected_.contains("edit.u") && expected_.contains("grad.k")) run_edit();
    if (expected_.contains("gen.input_ids"))
      generate("gen", integers("gen.input_ids"), at::ones_like(integers("gen.input_ids")), {});
    if (expected_.contains("genbatch.output_ids"))
      generate("genbatch", integers("left.input_ids"), integers("left.attention_mask"), positions("left"));
    return {{"family", model_.config().family},
            {"max_abs_diff", diffs_},
            {"missing", missing()},
            {"generation_equal", equal_}};
  }

 private:
  // Ids, masks and positions in any integer type.
  at::Tensor integers(const std::string& name) const { return expected_.tensor(name).to(at::kLong); }
  // Undefined if there are none.
  at::Tensor positions(const std::string& side) const {
    return expected_.contains(side + ".position_ids") ? integers(side + ".position_ids") : at::Tensor();
  }

  TokenBatch batch_of(const std::string& side, bool with_positions) const {
    return TokenBatch::from_padded(integers(side + ".input_ids"), integers(side + ".attention_mask"),
                                   with_positions ? positions(side) : at::Tensor());
  }

  // Packed [N, …] against [B, T, …] at the real tokens.
  void compare_packed(const std::string& name, const std::string& side, const at::Tensor& got) {
    if (!expected_.contains(name)) return;
    const at::Tensor mask = expected_.tensor(side + ".attention_mask").to(at::kBool), wanted = expected_.tensor(name);
    if (wanted.dim() != 3 || wanted.size(0) != mask.size(0) || wanted.size(1) != mask.size(1))
      misfit(name, wanted, "rows, tokens and a width, as the attention mask has them");
    compare(name, got, wanted.index({mask}));
  }

  [[noreturn]] void misfit(const std::string& name, const at::Tensor& wanted, const std::string& expected) const {
    std::ostringstream shape;
    shape << wanted.sizes();
    throw Error(ErrorClass::kCorruption, {expected_.path().string() + ": " + name, "shape " + shape.str(), expected,
                                          "record the fixture again: it does not belong to this checkpoint"});
  }

  void compare(const std::string& name, const at::Tensor& got, const at::Tensor& wanted) {
    if (got.numel() != wanted.numel()) misfit(name, wanted, std::to_string(got.numel()) + " values");
    const at::Tensor mine = devices::to_host(got.detach()).to(at::kDouble).reshape(wanted.sizes());
    const double diff = wanted.numel() == 0 ? 0 : (mine - wanted.to(at::kDouble)).abs().max().item<double>();
    const double shown = std::isfinite(diff) ? diff : kNotFinite;
    diffs_[name] = std::max(diffs_.value(name, 0.0), shown);
  }

  void run_side(const std::string& side) {
    const at::NoGradGuard no_grad;
    const TokenBatch batch = batch_of(side, side == "left" && expected_.contains("left.position_ids"));
    hooks::HookSession session(model_.hooks());
    const bool dense = model_.config().no_edit_site.empty();
    const Site rewritten = dense ? Site::kMlpDownOut : Site::kMlpOut;
    session.capture({Site::kLayerIn, 0});
    for (int l = 0; l < model_.n_layers(); ++l) {
      session.capture({Site::kLayerOut, l}).capture({Site::kAttnOut, l}).capture({rewritten, l});
      if (dense) session.capture({Site::kMlpDownIn, l});
    }
    session.attach();
    compare_packed(side + ".logits", side, model_.forward(batch).logits);
    compare_packed(side + ".hidden.0", side, session.captured({Site::kLayerIn, 0}));
    for (int l = 0; l < model_.n_layers(); ++l) {
      const std::string number = std::to_string(l);
      compare_packed(side + ".hidden." + std::to_string(l + 1), side, session.captured({Site::kLayerOut, l}));
      compare_packed(side + ".attn_out." + number, side, session.captured({Site::kAttnOut, l}));
      compare_packed(side + ".rewrite_out." + number, side, session.captured({rewritten, l}));
      if (dense) compare_packed(side + ".key." + number, side, session.captured({Site::kMlpDownIn, l}));
    }
    session.finish();
    if (expected_.contains(side + ".logits_default_positions"))
      compare_packed(side + ".logits_default_positions", side, model_.forward(batch_of(side, false)).logits);
  }

  int64_t number(const std::string& name) const { return expected_.tensor(name).item<int64_t>(); }

  at::Tensor loss_of(const at::Tensor& logits, const TokenBatch& batch) const {
    const int64_t token = batch.token(number("grad.row"), -1);
    return -at::log_softmax(logits[token], -1)[number("grad.target")];
  }

  void run_gradients() {
    const TokenBatch batch = batch_of("right", false);
    const int layer = static_cast<int>(number("grad.k"));
    const int64_t token = batch.token(number("grad.row"), number("grad.position"));
    for (const auto& [name, site] :
         {std::pair<std::string, Site>{"grad.layer", Site::kLayerOut}, {"grad.rewrite", Site::kMlpDownOut}}) {
      if (!expected_.contains(name + ".delta")) continue;
      for (const std::string point : {"zero", "delta"}) {
        if (!expected_.contains(name + ".grad_" + point)) continue;
        at::Tensor delta = expected_.tensor(name + ".delta").clone().to(model_.dtype());
        if (point == "zero") delta.zero_();
        delta.requires_grad_(true);
        hooks::HookSession session(model_.hooks());
        session.edit({site, layer}, [&](const at::Tensor& x) {
          const at::Tensor row = devices::route_like(delta, x, devices::Purpose::kDelta).unsqueeze(0);
          const at::Tensor at_token = devices::route_like(at::tensor({token}, at::kLong), x, devices::Purpose::kInput);
          return x.index_add(0, at_token, row);
        });
        session.attach();
        const at::Tensor logits = model_.forward(batch).logits;
        const at::Tensor loss = loss_of(logits, batch);
        compare(name + ".grad_" + point, torch::autograd::grad({loss}, {delta})[0],
                expected_.tensor(name + ".grad_" + point));
        if (expected_.contains(name + ".loss_" + point))
          compare(name + ".loss_" + point, loss, expected_.tensor(name + ".loss_" + point));
        if (point == "delta") compare_packed(name + ".logits_delta", "right", logits);
        session.finish();
      }
    }
    if (!expected_.contains("grad.weight")) return;
    at::Tensor weight = model_.weight(model_.edit_site(layer).weight_name);
    weight.requires_grad_(true);
    const at::Tensor loss = loss_of(model_.forward(batch).logits, batch);
    compare("grad.weight", torch::autograd::grad({loss}, {weight})[0], expected_.tensor("grad.weight"));
    weight.requires_grad_(false);
  }

  void run_edit() {
    const at::NoGradGuard no_grad;
    const EditSite site = model_.edit_site(static_cast<int>(number("grad.k")));
    at::Tensor weight = model_.weight(site.weight_name);
    const at::Tensor original = weight.clone();
    at::Tensor update = at::outer(expected_.tensor("edit.u"), expected_.tensor("edit.v"));
    if (site.orientation == Orientation::kInOut) update = update.t();
    weight.add_(devices::route_like(update.to(model_.dtype()), weight, devices::Purpose::kWeight));
    compare_packed("edit.logits", "right", model_.forward(batch_of("right", false)).logits);
    weight.copy_(original);
  }

  // Greedy, with a cache, every step's logits.
  void generate(const std::string& name, const at::Tensor& ids, const at::Tensor& mask, const at::Tensor& positions) {
    const at::NoGradGuard no_grad;
    const at::Tensor wanted_ids = integers(name + ".output_ids"),
                     wanted_logits = expected_.tensor(name + ".step_logits");
    const int64_t width = ids.size(1), steps = wanted_ids.size(1) - width;
    if (steps < 1 || wanted_ids.size(0) != ids.size(0) || wanted_logits.dim() != 3 || wanted_logits.size(1) != steps)
      misfit(name + ".output_ids", wanted_ids, "the input and a new token for each step of " + name + ".step_logits");
    TokenBatch batch = TokenBatch::from_padded(ids, mask, positions);
    KvCache cache(model_.n_layers(), width);
    auto next_position = mapped(batch.last_tokens(), [&](int64_t token) { return batch.positions()[token] + 1; });
    std::vector<at::Tensor> chosen{ids}, logits;
    for (int64_t step = 0; step < steps; ++step) {
      const ForwardOptions options{.cache = &cache, .logit_tokens = batch.last_tokens()};
      logits.push_back(devices::to_host(model_.forward(batch, options).logits));
      const at::Tensor best = logits.back().argmax(-1);
      chosen.push_back(best.unsqueeze(1));
      std::vector<std::vector<int64_t>> rows;
      for (int64_t r = 0; r < batch.rows(); ++r) rows.push_back({best[r].item<int64_t>()});
      batch = TokenBatch::continuing(rows, next_position, std::vector<int64_t>(rows.size(), width + step));
      for (int64_t& position : next_position) ++position;
    }
    const at::Tensor got_ids = at::cat(chosen, 1);
    equal_ = equal_ && at::equal(got_ids, wanted_ids);
    compare(name + ".output_ids", got_ids, wanted_ids);
    compare(name + ".step_logits", at::stack(logits, 1), wanted_logits);
  }

  // Everything in the file that is a result and was not produced.
  Json missing() const {
    Json names = Json::array();
    for (const auto& [name, info] : expected_.tensors()) {
      const bool input = name.ends_with("input_ids") || name.ends_with("attention_mask") ||
                         name.ends_with("position_ids") || name == "grad.k" || name == "grad.row" ||
                         name == "grad.position" || name == "grad.target" || name.ends_with(".delta") ||
                         name == "edit.u" || name == "edit.v";
      if (!input && !diffs_.contains(name)) names.push_back(name);
    }
    return names;
  }

  const SafetensorsFile& expected_;
  Model model_;
  Json diffs_ = Json::object();
  bool equal_ = true;
};

}  // namespace

Json eval_fixture(const std::filesystem::path& folder, const LoadOptions& options) {
  const SafetensorsFile expected(folder / "expected.safetensors");
  LoadOptions quiet = options;
  quiet.tokenizer = false;
  const auto run = [&](const std::string& config_name) {
    return FixtureRun(expected, load_model(std::make_shared<detail::HfCheckpoint>(folder, config_name), quiet)).run();
  };
  Json result = run("config.json");
  if (std::filesystem::exists(folder / "config.legacy.json")) {
    const Json legacy = run("config.legacy.json");
    for (auto& [name, diff] : result["max_abs_diff"].items())
      diff = std::max(diff.get<double>(), legacy["max_abs_diff"].value(name, kNotFinite));
    if (result["missing"].size() < legacy["missing"].size()) result["missing"] = legacy["missing"];
    result["generation_equal"] = result["generation_equal"].get<bool>() && legacy["generation_equal"].get<bool>();
    result["legacy"] = legacy;
  }
  return result;
}

}  // namespace emend::models
