// What every family must do, wherever its parts live. The conformance test runs it on the CPU; tests of other
// placements pass a functor.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/kv_cache.h>
#include <emend/models/products.h>
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
      using hooks::Site;
      const bool in_head = ref.site >= Site::kAttnQ && ref.site <= Site::kAttnZ;
      const bool slots = ref.site == Site::kAttnScores || ref.site == Site::kAttnPattern;
      const bool gated = ref.site >= Site::kMlpGate && ref.site <= Site::kMlpDownIn;
      const int64_t expected = slots                          ? batch().longest()
                               : in_head                      ? c.head_dim
                               : ref.site == Site::kRouter    ? c.n_experts
                               : ref.site == Site::kExpertOut ? c.hidden_size
                               : gated                        ? c.mlp_width
                               : ref.site == Site::kLogits    ? c.vocab_size
                               : ref.site == Site::kFinalNorm ? c.embedding_width
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

  /// What lies inside a block, against arithmetic written out here: projections, scores of the keys that a token may
  /// see, mixing, gates, experts. Biases are what a projection adds to every token.
  void inner_sites_agree(double tolerance) {
    using hooks::Site;
    const at::NoGradGuard no_grad;
    const auto seen = captures(batch());
    for (int l = 0; l < model_.n_layers(); ++l) {
      const auto at = [&](Site site) { return seen.at({site, l}).to(at::kDouble); };
      const auto projected = [&](Site in, Site out, bool by_head) {
        const at::Tensor w = devices::to_host(model_.weight_at({out, l})).to(at::kDouble);
        const at::Tensor x = at(in).flatten(1), rest = at(out).flatten(1) - x.matmul(w.flatten(0, -2).t());
        EXPECT_LE((rest - rest[0]).abs().max().item<double>(), tolerance) << to_string(hooks::SiteRef{out, l});
        EXPECT_EQ(w.dim(), by_head ? 3 : 2);
      };
      for (const Site site : {Site::kAttnQ, Site::kAttnK, Site::kAttnV}) projected(Site::kAttnIn, site, true);
      projected(Site::kAttnZ, Site::kAttnOut, false);
      attention_agrees(l, at, tolerance);
      if (dense_) {
        projected(Site::kMlpIn, Site::kMlpUp, false);
        projected(Site::kMlpDownIn, Site::kMlpDownOut, false);
        const bool gated = model_.has_site(Site::kMlpGate);
        if (gated) projected(Site::kMlpIn, Site::kMlpGate, false);
        const at::Tensor active =
            models::activate(at(gated ? Site::kMlpGate : Site::kMlpUp), model_.config().activation);
        const at::Tensor key = gated ? active * at(Site::kMlpUp) : active;
        EXPECT_LE((key - at(Site::kMlpDownIn)).abs().max().item<double>(), tolerance) << l;
      } else {
        projected(Site::kMlpIn, Site::kRouter, false);
        const auto [best, chosen] = at::softmax(at(Site::kRouter), -1).topk(model_.config().experts_per_token, -1);
        const at::Tensor shares = at::zeros_like(at(Site::kRouter)).scatter(1, chosen, best / best.sum(-1, true));
        const at::Tensor sum = (at(Site::kExpertOut) * shares.unsqueeze(-1)).sum(1);
        EXPECT_LE((sum - at(Site::kMlpOut)).abs().max().item<double>(), tolerance) << l;
        EXPECT_EQ(at(Site::kExpertOut).abs().amax(-1).masked_select(shares == 0).sum().item<double>(), 0) << l;
      }
    }
  }

  /// Every captured tensor of a batch, on the host.
  std::map<hooks::SiteRef, at::Tensor> captures(const models::TokenBatch& tokens,
                                                const models::ForwardOptions& options = {}) {
    hooks::HookSession session(model_.hooks());
    for (const hooks::SiteRef& ref : sites()) session.capture(ref);
    session.attach();
    (void)model_.forward(tokens, options);
    std::map<hooks::SiteRef, at::Tensor> seen;
    for (const hooks::SiteRef& ref : sites()) seen[ref] = devices::to_host(session.captured(ref));
    session.finish();
    return seen;
  }

  /// What a later piece shows with a cache, appending or not, equals what the whole text shows there.
  void inner_sites_equal_with_a_cache(double tolerance) {
    using hooks::Site;
    const at::NoGradGuard no_grad;
    const Rows rows = within_vocabulary({{3, 17, 40, 2, 2, 71, 9, 60}, {11, 12, 13, 14, 15, 16}});
    const std::vector<int64_t> first = {3, 3}, all = {8, 6};
    const auto full = models::TokenBatch::from_rows(rows);
    const auto whole = captures(full);
    std::vector<int64_t> places;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t k = first[r]; k < all[r]; ++k) places.push_back(full.token(static_cast<int64_t>(r), k));
    for (const bool append : {false, true}) {
      models::KvCache cache(model_.n_layers());
      fill(cache, rows, {0, 0}, first);
      const models::ForwardOptions options{.cache = &cache, .append = append};
      for (const auto& [ref, value] : captures(piece(rows, first, all), options)) {
        if (ref.site == Site::kAttnScores) continue;  // infinite where hidden; the pattern says the same
        const at::Tensor wanted = whole.at(ref).index_select(0, at::tensor(places, at::kLong));
        ASSERT_EQ(value.sizes(), wanted.sizes()) << to_string(ref);
        EXPECT_LE((value - wanted).abs().max().item<double>(), tolerance)
            << to_string(ref) << (append ? " appending" : "");
      }
    }
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
      const auto stopped = model_.forward(batch(), {.end_layer = l});
      EXPECT_EQ(stopped.logits.defined(), l == model_.n_layers());
      const models::ForwardOptions above{
          .first_layer = l,
          .hidden = stopped.hidden,
          .logit_tokens = std::vector<int64_t>{batch().token(2, -1), batch().token(0, 1)}};
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
    models::ForwardOptions from_layer{.first_layer = layer, .hidden = hidden_at(full, layer).requires_grad_(true)};
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
    const models::ForwardOptions with_cache{
        .first_layer = layer,
        .hidden = from_layer.hidden.detach().index_select(0, index).requires_grad_(true),
        .cache = &cache,
        .append = false};
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
  template <typename At>
  void attention_agrees(int layer, const At& at, double tolerance) {
    using hooks::Site;
    const auto& c = model_.config();
    const at::Tensor q = at(Site::kAttnQRotary), k = at(Site::kAttnKRotary), v = at(Site::kAttnV);
    const at::Tensor scores = at(Site::kAttnScores), pattern = at(Site::kAttnPattern);
    EXPECT_LE((at::softmax(scores, -1) - pattern).abs().max().item<double>(), tolerance) << layer;
    const double scale = c.attention_scale / (c.scale_by_inverse_layer ? layer + 1 : 1);
    for (int64_t r = 0; r < batch().rows(); ++r)
      for (int64_t t = 0; t < batch().length(r); ++t) {
        const int64_t n = batch().token(r, t), begin = batch().row_begin()[r];
        const int64_t first = c.window(layer) > 0 ? std::max<int64_t>(0, t - c.window(layer) + 1) : 0;
        for (int64_t h = 0; h < c.n_heads; ++h) {
          const int64_t g = h / (c.n_heads / c.n_kv_heads);
          at::Tensor mixed = at::zeros({c.head_dim}, at::kDouble);
          for (int64_t j = 0; j < scores.size(2); ++j) {
            const double score = scores[n][h][j].template item<double>();
            if (j < first || j > t) {
              EXPECT_EQ(score, -std::numeric_limits<double>::infinity())
                  << "layer " << layer << " token " << n << " key " << j;
              continue;
            }
            double expected = scale * q[n][h].dot(k[begin + j][g]).template item<double>();
            if (c.attention_softcap > 0) expected = c.attention_softcap * std::tanh(expected / c.attention_softcap);
            // ALiBi adds to a key the same for every query.
            if (c.positions == models::Positions::kAlibi)
              expected += scores[begin + j][h][j].template item<double>() -
                          scale * q[begin + j][h].dot(k[begin + j][g]).template item<double>();
            EXPECT_NEAR(score, expected, tolerance) << "layer " << layer << " token " << n << " key " << j;
            mixed += pattern[n][h][j] * v[begin + j][g];
          }
          EXPECT_LE((mixed - at(Site::kAttnZ)[n][h]).abs().max().template item<double>(), tolerance)
              << layer << " " << n;
        }
      }
  }

  static models::Model make(const FamilyFlavour& flavour, const Place& place, at::ScalarType dtype) {
    return debug_model(flavour.family, 11, flavour.flavour, {.dtype = dtype, .place = place});
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
      if (!model_.has_site(site)) continue;
      if (!hooks::is_layer_site(site))
        all.push_back({site});
      else
        for (int l = 0; l < model_.n_layers(); ++l) all.push_back({site, l});
    }
    return all;
  }

  at::Tensor hidden_at(const models::TokenBatch& tokens, int layer) {
    const at::NoGradGuard no_grad;
    return model_.forward(tokens, {.end_layer = layer}).hidden.detach().clone();
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
    (void)model_.forward(piece(rows, begins, ends), {.cache = &cache});
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

}  // namespace emend::testing
