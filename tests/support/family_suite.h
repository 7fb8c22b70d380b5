// What every family must do, wherever its parts live. The conformance test runs it on the CPU; tests of other
// placements pass a functor.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/kv_cache.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/debug_models.h"

namespace emend::testing {

using Place = std::function<devices::PlacementPlan(const models::ModelConfig&, const models::Checkpoint&)>;
using Rows = std::vector<std::vector<int64_t>>;

/// Rows of different lengths within the smallest debug vocabulary.
inline Rows suite_rows() {
  return {{3, 17, 40, 2, 2, 71, 9, 60, 33, 5}, {8}, {11, 12, 13, 14, 15, 16}, {80, 1, 80}};
}

class FamilySuite {
 public:
  FamilySuite(const FamilyFlavour& flavour, const Place& place, at::ScalarType dtype = at::kFloat)
      : FamilySuite(make(flavour, place, dtype)) {}
  explicit FamilySuite(models::Model model) : model_(std::move(model)), dense_(model_.config().no_edit_site.empty()) {}

  models::Model& model() { return model_; }

  /// Every site fires, once a pass, with the right width.
  void every_site_fires() {
    hooks::HookSession session(model_.hooks());
    std::map<hooks::SiteRef, int> count;
    std::map<hooks::SiteRef, int64_t> width;
    for (const hooks::SiteRef& ref : sites())
      session.edit(ref, [&, ref](const at::Tensor& x) {
        ++count[ref];
        width[ref] = x.size(-1);
        EXPECT_EQ(x.size(0), batch().tokens()) << hooks::to_string(ref);
        return at::Tensor();
      });
    session.attach();
    const at::NoGradGuard no_grad;
    (void)model_.forward(batch());
    session.finish();
    for (const hooks::SiteRef& ref : sites()) {
      EXPECT_EQ(count[ref], 1) << hooks::to_string(ref);
      const auto& c = model_.config();
      const int64_t expected = ref.site == hooks::Site::kMlpDownIn   ? c.mlp_width
                               : ref.site == hooks::Site::kLogits    ? c.vocab_size
                               : ref.site == hooks::Site::kFinalNorm ? c.embedding_width
                                                                     : c.hidden_size;
      EXPECT_EQ(width[ref], expected) << hooks::to_string(ref);
    }
  }

  /// A replacement at a site reaches the logits.
  void every_site_can_be_edited() {
    const at::NoGradGuard no_grad;
    const at::Tensor plain = logits(batch());
    for (const hooks::SiteRef& ref : sites()) {
      hooks::HookSession session(model_.hooks());
      session.edit(ref, [](const at::Tensor& x) { return x + at::sin(at::arange(x.numel(), x.options())).view_as(x); });
      session.attach();
      EXPECT_GT((logits(batch()) - plain).abs().max().item<double>(), 1e-4) << hooks::to_string(ref);
      session.finish();
    }
    EXPECT_TRUE(at::equal(logits(batch()), plain));
  }

  /// Rows of different lengths computed together equal each row alone.
  void packing_changes_nothing(double tolerance) {
    const at::NoGradGuard no_grad;
    const at::Tensor together = logits(batch());
    const Rows rows = within_vocabulary(suite_rows());
    for (size_t r = 0; r < rows.size(); ++r) {
      const at::Tensor alone = logits(models::TokenBatch::from_rows({rows[r]}));
      const at::Tensor mine = together.narrow(0, batch().row_begin()[r], static_cast<int64_t>(rows[r].size()));
      EXPECT_LE((alone - mine).abs().max().item<double>(), tolerance) << "row " << r;
    }
  }

  /// Running above a layer from captured hidden states equals running the whole model.
  void restart_equals_whole(double tolerance) {
    const at::NoGradGuard no_grad;
    const at::Tensor whole = logits(batch());
    for (int l = 0; l <= model_.n_layers(); ++l) {
      models::ForwardOptions below;
      below.end_layer = l;
      const auto stopped = model_.forward(batch(), below);
      EXPECT_EQ(stopped.logits.defined(), l == model_.n_layers());
      models::ForwardOptions above;
      above.first_layer = l;
      above.hidden = stopped.hidden;
      above.logit_tokens = std::vector<int64_t>{batch().token(2, -1), batch().token(0, 1)};
      const at::Tensor two = devices::to_host(model_.forward(batch(), above).logits);
      EXPECT_LE((two[0] - whole[batch().token(2, -1)]).abs().max().item<double>(), tolerance) << l;
      EXPECT_LE((two[1] - whole[batch().token(0, 1)]).abs().max().item<double>(), tolerance) << l;
    }
  }

  /// A cache filled in pieces, then read without appending and with gradients, equals one pass over the whole text.
  void cache_equals_whole(double tolerance) {
    const Rows rows = within_vocabulary({{3, 17, 40, 2, 2, 71, 9, 60}, {11, 12, 13, 14, 15}, {80, 1, 80, 7, 7, 7, 7}});
    const std::vector<int64_t> first = {3, 2, 3}, second = {5, 3, 4};
    const auto full = models::TokenBatch::from_rows(rows);
    const int layer = model_.n_layers() / 2;
    models::ForwardOptions from_layer;
    from_layer.first_layer = layer;
    from_layer.hidden = hidden_at(full, layer).requires_grad_(true);
    const at::Tensor whole = devices::to_host(model_.forward(full, from_layer).logits);
    const at::Tensor weights = at::sin(at::arange(whole.numel(), whole.options())).view_as(whole);

    models::KvCache cache(model_.n_layers());
    {
      const at::NoGradGuard no_grad;
      fill(cache, rows, {0, 0, 0}, first);
      fill(cache, rows, first, second);
    }
    EXPECT_EQ(cache.lengths(), second);
    models::TokenBatch rest = piece(rows, second, {8, 5, 7});
    std::vector<int64_t> places;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t k = second[r]; k < static_cast<int64_t>(rows[r].size()); ++k) places.push_back(full.token(r, k));
    const at::Tensor index =
        devices::route_like(at::tensor(places, at::kLong), from_layer.hidden, devices::Purpose::kOther);
    models::ForwardOptions with_cache;
    with_cache.first_layer = layer;
    with_cache.hidden = from_layer.hidden.detach().index_select(0, index).requires_grad_(true);
    with_cache.cache = &cache;
    with_cache.append = false;
    const at::Tensor part = devices::to_host(model_.forward(rest, with_cache).logits);
    const at::Tensor wanted = whole.index_select(0, at::tensor(places, at::kLong));
    EXPECT_LE((part - wanted).abs().max().item<double>(), tolerance);
    EXPECT_EQ(cache.lengths(), second);

    // Only the loss of the later tokens, so that both gradients are of the same function of them.
    const at::Tensor share = weights.index_select(0, at::tensor(places, at::kLong));
    const auto whole_gradient =
        torch::autograd::grad({(wanted * share).sum()}, {from_layer.hidden})[0].index_select(0, index);
    const auto part_gradient = torch::autograd::grad({(part * share).sum()}, {with_cache.hidden})[0];
    EXPECT_LE((whole_gradient - part_gradient).abs().max().item<double>(), 10 * tolerance);
  }

  /// The declared orientation: adding u·vᵀ to the matrix adds u·(v·key) to its output.
  void edit_site_is_oriented(double tolerance) {
    const at::NoGradGuard no_grad;
    if (!dense_) {
      EXPECT_THROW((void)model_.edit_site(0), Error);
      return;
    }
    for (int l = 0; l < model_.n_layers(); ++l) {
      const models::EditSite site = model_.edit_site(l);
      const auto [keys, before] = keys_and_values(l);
      EXPECT_EQ(keys.size(1), site.in_features);
      EXPECT_EQ(before.size(1), site.out_features);
      const at::Tensor u = at::randn({site.out_features}), v = at::randn({site.in_features});
      at::Tensor weight = model_.weight(site.weight_name);
      const at::Tensor original = weight.clone(), update = at::outer(u, v).to(model_.dtype());
      const at::Tensor stored = site.orientation == models::Orientation::kInOut ? update.t().contiguous() : update;
      model_.set_weight(site.weight_name, original + devices::route_like(stored, weight, devices::Purpose::kWeight));
      const at::Tensor after = keys_and_values(l).second;
      const at::Tensor expected = before + keys.mv(v.to(model_.dtype())).unsqueeze(1) * u.to(model_.dtype());
      EXPECT_LE((after - expected).abs().max().item<double>(), tolerance * 20) << l;
      model_.set_weight(site.weight_name, original);
    }
  }

  at::Tensor logits(const models::TokenBatch& tokens) {
    return devices::to_host(model_.forward(tokens).logits.detach());
  }

 private:
  static models::Model make(const FamilyFlavour& flavour, const Place& place, at::ScalarType dtype) {
    models::LoadOptions options;
    options.dtype = dtype;
    options.place = place;
    return debug_model(flavour.family, 11, flavour.flavour, options);
  }

  // Ids that the model's vocabulary has.
  Rows within_vocabulary(Rows rows) const {
    for (auto& row : rows)
      for (int64_t& id : row) id %= model_.vocab_size();
    return rows;
  }
  models::TokenBatch batch() const { return models::TokenBatch::from_rows(within_vocabulary(suite_rows())); }

  std::vector<hooks::SiteRef> sites() const {
    std::vector<hooks::SiteRef> all;
    for (const hooks::Site site : hooks::all_sites()) {
      if (!dense_ && (site == hooks::Site::kMlpDownIn || site == hooks::Site::kMlpDownOut)) continue;
      if (!hooks::is_layer_site(site))
        all.push_back({site});
      else
        for (int l = 0; l < model_.n_layers(); ++l) all.push_back({site, l});
    }
    return all;
  }

  at::Tensor hidden_at(const models::TokenBatch& tokens, int layer) {
    const at::NoGradGuard no_grad;
    models::ForwardOptions options;
    options.end_layer = layer;
    return model_.forward(tokens, options).hidden.detach().clone();
  }

  // Tokens begins[r] … ends[r]-1 of each row.
  static models::TokenBatch piece(const Rows& rows, const std::vector<int64_t>& begins,
                                  const std::vector<int64_t>& ends) {
    Rows parts;
    std::vector<int64_t> full;
    for (size_t r = 0; r < rows.size(); ++r) {
      parts.emplace_back(rows[r].begin() + begins[r], rows[r].begin() + ends[r]);
      full.push_back(static_cast<int64_t>(rows[r].size()));
    }
    auto tokens = models::TokenBatch::continuing(parts, begins);
    tokens.set_full_lengths(full);
    return tokens;
  }

  void fill(models::KvCache& cache, const Rows& rows, const std::vector<int64_t>& begins,
            const std::vector<int64_t>& ends) {
    models::ForwardOptions options;
    options.cache = &cache;
    (void)model_.forward(piece(rows, begins, ends), options);
  }

  std::pair<at::Tensor, at::Tensor> keys_and_values(int layer) {
    const hooks::SiteRef in{hooks::Site::kMlpDownIn, layer}, out{hooks::Site::kMlpDownOut, layer};
    hooks::HookSession session(model_.hooks());
    session.capture(in).capture(out).stop_after(out).attach();
    EXPECT_TRUE(model_.forward(batch()).stopped);
    const auto pair = std::pair(devices::to_host(session.captured(in)), devices::to_host(session.captured(out)));
    session.finish();
    return pair;
  }

  models::Model model_;
  bool dense_;
};

inline std::string flavour_name(const ::testing::TestParamInfo<FamilyFlavour>& info) {
  return info.param.family + "_" + info.param.flavour;
}

}  // namespace emend::testing
