#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/models/detail/decoder_pass.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace emend::models {

using devices::Purpose;
using hooks::Site;

namespace {

thread_local std::shared_ptr<PassTables>* kept_tables = nullptr;

[[noreturn]] void bad_pass(const std::string& got, const std::string& expected, const std::string& advice) {
  refuse({"forward pass", got, expected, advice});
}

at::Tensor index_on(const std::vector<int64_t>& values, c10::Device device, Purpose purpose) {
  return devices::route_to(at::tensor(values, at::kLong), device, purpose);
}

// Own keys go into the cache's buffer, where attention reads them, unless a gradient may have to flow through them.
detail::KeySource key_source(const ForwardOptions& options) {
  if (!options.cache) return detail::KeySource::kOwn;
  if (options.append && !at::GradMode::is_enabled()) return detail::KeySource::kCache;
  return options.cache->empty() ? detail::KeySource::kOwn : detail::KeySource::kJoined;
}

}  // namespace

KeptTables::KeptTables(std::shared_ptr<PassTables>& kept) noexcept : before_(std::exchange(kept_tables, &kept)) {}

KeptTables::~KeptTables() {
  kept_tables = before_;
}

DecoderPass::DecoderPass(const Model::State& model, const TokenBatch& batch, const ForwardOptions& options)
    : model_(model),
      config_(model.config),
      batch_(batch),
      options_(options),
      end_layer_(options.end_layer < 0 ? static_cast<int>(config_.n_layers) : options.end_layer),
      next_layer_(options.first_layer),
      layout_(checked_batch(), options.cache, key_source(options)) {
  decide_positions();
  find_tables();
}

void DecoderPass::find_tables() {
  PassTables::Key key;
  if (kept_tables)
    key = {&model_,           positions_,     lengths_,        batch_.columns(),
           layout_.row_begin, layout_.prefix, layout_.padding, layout_.source};
  if (kept_tables && *kept_tables && (*kept_tables)->key == key) {
    tables_ = *kept_tables;
    return;
  }
  tables_.reset(new PassTables{std::move(key), {}});
  if (kept_tables) *kept_tables = tables_;
}

const TokenBatch& DecoderPass::checked_batch() const {
  check_batch();
  check_cache();
  return batch_;
}

void DecoderPass::check_batch() const {
  const int n_layers = static_cast<int>(config_.n_layers);
  if (batch_.rows() < 1) bad_pass("an empty batch", "at least one row of tokens", "add rows");
  if (options_.first_layer < 0 || options_.first_layer > n_layers || options_.end_layer < -1 ||
      end_layer_ < options_.first_layer || end_layer_ > n_layers)
    bad_pass("layers " + std::to_string(options_.first_layer) + " to " + std::to_string(options_.end_layer),
             "a range within 0 to " + std::to_string(n_layers), "check first_layer and end_layer");
  if (options_.first_layer > 0 && !options_.hidden.defined())
    bad_pass("first_layer " + std::to_string(options_.first_layer) + " without hidden states", "`hidden`, its input",
             "give the input of the first layer that runs");
  if (options_.first_layer < model_.first_layer)
    bad_pass("layer " + std::to_string(options_.first_layer) + " of a copy that begins with layer " +
                 std::to_string(model_.first_layer),
             "a layer that the copy has", "run the layers below with the model itself");
  if (options_.hidden.defined()) {
    if (options_.hidden.dim() != 2 || options_.hidden.size(0) != batch_.tokens() ||
        options_.hidden.size(1) != config_.hidden_size)
      bad_pass("hidden states of shape " + shape_text(options_.hidden.sizes()),
               shape_text({batch_.tokens(), config_.hidden_size}), "pack them as the batch is packed");
    return;  // the ids are not looked up
  }
  for (int64_t r = 0; r < batch_.rows(); ++r) {
    for (int64_t i = batch_.row_begin()[r]; i < batch_.row_begin()[r + 1]; ++i) {
      const int64_t id = batch_.ids()[i];
      if (id < 0 || id >= config_.vocab_size)
        bad_pass("row " + std::to_string(r) + ", token " + std::to_string(i - batch_.row_begin()[r]) + ": id " +
                     std::to_string(id),
                 "an id from 0 to " + std::to_string(config_.vocab_size - 1),
                 "tokenise with the model's own tokenizer");
    }
  }
}

void DecoderPass::check_cache() const {
  const KvCache* cache = options_.cache;
  if (!cache) return;
  if (cache->n_layers_ != config_.n_layers)
    bad_pass("a cache of " + std::to_string(cache->n_layers_) + " layers", std::to_string(config_.n_layers),
             "create the cache for this model");
  if (cache->empty()) return;
  if (static_cast<int64_t>(cache->lengths().size()) != batch_.rows())
    bad_pass("a cache of " + std::to_string(cache->lengths().size()) + " rows for a batch of " +
                 std::to_string(batch_.rows()),
             "as many rows", "select the cache's rows with select_rows");
  for (int layer = options_.first_layer; layer < end_layer_; ++layer)
    if (!cache->complete(layer))
      bad_pass("the cache lacks keys of layer " + std::to_string(layer), "keys of all earlier tokens",
               "that layer was dropped or did not run in an earlier pass");
}

void DecoderPass::decide_positions() {
  positions_ = batch_.positions();
  if (config_.position_rule == PositionRule::kColumns) positions_ = batch_.columns();
  const bool from_mask = config_.position_rule == PositionRule::kFromMask && !batch_.explicit_positions();
  for (int64_t r = 0; r < batch_.rows(); ++r) {
    int64_t real = 0, largest = -1;
    for (int64_t i = batch_.row_begin()[r]; i < batch_.row_begin()[r + 1]; ++i) {
      const bool padding = batch_.is_padding()[i];
      if (from_mask) positions_[i] = padding ? 0 : real;
      real += !padding;
      largest = std::max(largest, positions_[i]);
    }
    // Qwen v1 counts the prompt's real tokens, also while a cached text goes on; others look at the largest position.
    const int64_t whole = batch_.full_lengths().empty() ? 0 : batch_.full_lengths()[r];
    int64_t length = std::max(whole, largest + 1);
    if (config_.position_rule == PositionRule::kColumns) {
      length = std::max(whole, real);
      if (options_.cache && !options_.cache->empty()) length = options_.cache->prompt_lengths_[r];
    }
    lengths_.push_back(length);
  }
  if (config_.positions != Positions::kLearned || options_.hidden.defined()) return;
  for (size_t i = 0; i < positions_.size(); ++i)
    if (positions_[i] < 0 || positions_[i] >= config_.max_positions)
      bad_pass("position " + std::to_string(positions_[i]),
               "a position below " + std::to_string(config_.max_positions) + ", the size of the model's position table",
               "shorten the text or split it into windows");
}

at::Tensor DecoderPass::embed() const {
  const at::Tensor& table = model_.top[Part::kEmbedding].weight;
  at::Tensor x = table.index_select(0, index_on(batch_.ids(), table.device(), Purpose::kInput));
  // The factor is rounded to the weights' dtype, as in the published implementation.
  if (config_.embedding_scale != 1) x = x * at::scalar_tensor(config_.embedding_scale, x.scalar_type()).item();
  if (const auto& project = model_.top[Part::kProjectIn]; project.weight.defined())
    x = detail::apply_linear(x, project, false);
  if (const at::Tensor& rows = model_.top[Part::kPositions].weight; rows.defined()) {
    std::vector<int64_t> index = positions_;
    for (int64_t& i : index) i += config_.position_offset;
    const at::Tensor added = rows.index_select(0, index_on(index, rows.device(), Purpose::kInput));
    x = x + devices::route_like(added, x, Purpose::kHidden);
  }
  return model_.hooks.point(Site::kEmbedding, -1)(std::move(x));
}

ForwardResult DecoderPass::run() {
  ForwardResult result;
  at::Tensor x;
  try {
    x = options_.hidden.defined() ? options_.hidden.to(model_.dtype) : embed();
    while (next_layer_ < end_layer_) {
      x = run_layer(next_layer_, std::move(x));
      ++next_layer_;
    }
    result.hidden = x;
    const bool whole = end_layer_ == config_.n_layers;
    if (whole && !(options_.logit_tokens && options_.logit_tokens->empty())) {
      at::Tensor rows = x;
      if (options_.logit_tokens) {
        for (const int64_t token : *options_.logit_tokens)
          if (token < 0 || token >= batch_.tokens())
            bad_pass("logits of token " + std::to_string(token),
                     "a packed token below " + std::to_string(batch_.tokens()),
                     "packed tokens count through all rows of the batch");
        rows = x.index_select(0, index_on(*options_.logit_tokens, x.device(), Purpose::kInput));
      }
      result.logits = detail::project_rows(model_, rows, /*raw_head=*/false, /*fire_hooks=*/true);
    }
  } catch (const hooks::StopForward&) {
    result = ForwardResult{};
    result.stopped = true;
  }
  remember_in_cache(options_.first_layer, next_layer_);
  return result;
}

void DecoderPass::remember_in_cache(int first_run, int end_run) {
  KvCache* cache = options_.cache;
  if (!cache || !options_.append) return;
  if (cache->empty()) {
    cache->lengths_.assign(batch_.rows(), 0);
    cache->prompt_lengths_ = lengths_;
  }
  for (int64_t r = 0; r < batch_.rows(); ++r) cache->lengths_[r] += batch_.length(r);
  for (int layer = 0; layer < cache->n_layers_; ++layer)
    if (layer < first_run || layer >= end_run) cache->incomplete_[layer] = true;
}

at::Tensor DecoderPass::add_post_norm(const at::Tensor& branch, Part norm, const detail::LayerWeights& weights) const {
  return config_.norm_order == NormOrder::kSandwich ? detail::apply_norm(branch, weights[norm], config_) : branch;
}

at::Tensor DecoderPass::run_layer(int layer, at::Tensor x) {
  const detail::LayerWeights& weights = model_.layers[layer];
  const auto point = [&](Site site) -> const hooks::HookPoint& { return model_.hooks.point(site, layer); };
  const auto mlp = [&](at::Tensor in) {
    return point(Site::kMlpOut)(
        detail::apply_mlp(point(Site::kMlpIn)(std::move(in)), weights, config_, model_.conv1d(), model_.hooks, layer));
  };
  const auto attend = [&](at::Tensor in) {
    return point(Site::kAttnOut)(attention(layer, point(Site::kAttnIn)(std::move(in))));
  };
  x = point(Site::kLayerIn)(devices::route_to(x, model_.plan.layers[layer], Purpose::kHidden));

  if (config_.norm_order == NormOrder::kPost) {
    x = detail::apply_norm(x + attend(x), weights[Part::kAttnNorm], config_);
    x = detail::apply_norm(x + mlp(x), weights[Part::kMlpNorm], config_);
    return point(Site::kLayerOut)(std::move(x));
  }
  const at::Tensor normed = detail::apply_norm(x, weights[Part::kAttnNorm], config_);
  const at::Tensor attended = add_post_norm(attend(normed), Part::kAttnPostNorm, weights);
  if (config_.residual == Residual::kParallel) {
    const at::Tensor in = config_.mlp_norm ? detail::apply_norm(x, weights[Part::kMlpNorm], config_) : normed;
    return point(Site::kLayerOut)(x + attended + add_post_norm(mlp(in), Part::kMlpPostNorm, weights));
  }
  auto [sum, after] = detail::add_and_norm(std::move(x), attended, weights[Part::kMlpNorm], config_);
  x = std::move(sum);
  const at::Tensor out = mlp(std::move(after));
  return point(Site::kLayerOut)(x + add_post_norm(out, Part::kMlpPostNorm, weights));
}

void DecoderPass::project_qkv(int layer, const at::Tensor& x, at::Tensor& q, at::Tensor& k, at::Tensor& v) const {
  const detail::LayerWeights& weights = model_.layers[layer];
  const bool conv1d = model_.conv1d();
  const int64_t heads = config_.n_heads, kv_heads = config_.n_kv_heads, d = config_.head_dim;
  if (config_.qkv == Qkv::kSeparate) {
    q = detail::apply_linear(x, weights[Part::kQ], conv1d).unflatten(-1, {heads, d});
    k = detail::apply_linear(x, weights[Part::kK], conv1d).unflatten(-1, {kv_heads, d});
    v = detail::apply_linear(x, weights[Part::kV], conv1d).unflatten(-1, {kv_heads, d});
    return;
  }
  const at::Tensor fused = detail::apply_linear(x, weights[Part::kQkv], conv1d);
  if (config_.qkv == Qkv::kBlocks) {
    const auto parts = fused.unflatten(-1, {heads + 2 * kv_heads, d}).split_with_sizes({heads, kv_heads, kv_heads}, 1);
    q = parts[0], k = parts[1], v = parts[2];
  } else if (config_.qkv == Qkv::kPerHead) {
    const at::Tensor by_head = fused.unflatten(-1, {heads, 3, d});
    q = by_head.select(2, 0), k = by_head.select(2, 1), v = by_head.select(2, 2);
  } else {
    const int64_t group = heads / kv_heads;
    const at::Tensor by_group = fused.unflatten(-1, {kv_heads, group + 2, d});
    q = by_group.narrow(2, 0, group).flatten(1, 2);
    k = by_group.select(2, group), v = by_group.select(2, group + 1);
  }
}

at::Tensor DecoderPass::attention(int layer, const at::Tensor& x) {
  DeviceTables& here = tables(layer);
  const detail::LayerWeights& weights = model_.layers[layer];
  const auto point = [&](Site site) -> const hooks::HookPoint& { return model_.hooks.point(site, layer); };
  at::Tensor q, k, v;
  project_qkv(layer, x, q, k, v);
  q = point(Site::kAttnQ)(std::move(q));
  k = point(Site::kAttnK)(std::move(k));
  v = point(Site::kAttnV)(std::move(v));
  if (config_.qk_norm) {
    q = detail::apply_head_norm(q, weights[Part::kQNorm].weight, config_);
    k = detail::apply_head_norm(k, weights[Part::kKNorm].weight, config_);
  }
  bool stored = false;
  if (config_.positions == Positions::kRotary) {
    const detail::RotaryTable& table = rotary(layer, here);
    stored = layout_.source == detail::KeySource::kCache && point(Site::kAttnKRotary).idle() && devices::own_kernels(q);
    if (stored) {
      reserve_cache(layer, k, here);
      q = devices::rotate_into_cache(q, k, v, table.cos, table.sin, table.interleaved, options_.cache->keys_[layer],
                                     options_.cache->values_[layer], here.cache_row, here.cache_slot);
    } else {
      q = detail::apply_rotary(q, table);
      k = detail::apply_rotary(k, table);
    }
  }
  if (here.logn.defined()) q = q * here.logn;
  q = point(Site::kAttnQRotary)(std::move(q));
  k = point(Site::kAttnKRotary)(std::move(k));
  if (options_.cache && options_.append && !stored) store(layer, k, v, here);
  q = detail::unpack_heads(q, layout_, here.attention);
  with_cached(layer, k, v, here);
  const double scale = config_.attention_scale / (config_.scale_by_inverse_layer ? layer + 1 : 1);
  const bool fused = point(Site::kAttnScores).idle() && point(Site::kAttnPattern).idle();
  const at::Tensor mixed = fused ? detail::attend(q, k, v, mask(layer, here), scale, config_.attention_softcap)
                                 : detail::attend_openly(q, k, v, mask(layer, here), scale, config_.attention_softcap,
                                                         slots_hook(point(Site::kAttnScores), here),
                                                         slots_hook(point(Site::kAttnPattern), here));
  at::Tensor z = detail::pack_heads(mixed, layout_, here.attention);
  if (const auto& at_z = point(Site::kAttnZ); !at_z.idle())
    z = at_z(z.unflatten(1, {config_.n_heads, config_.head_dim})).flatten(1);
  return detail::apply_linear(z, weights[Part::kAttnOut], model_.conv1d());
}

// A point whose tensor is packed, where attention has it unpacked: [B, heads, T, S].
detail::AttentionHook DecoderPass::slots_hook(const hooks::HookPoint& point, const DeviceTables& here) const {
  if (point.idle()) return {};
  return [this, &point, &here](at::Tensor x) {
    const int64_t heads = x.size(1), slots = x.size(3);
    const at::Tensor packed = detail::pack_heads(x, layout_, here.attention).unflatten(1, {heads, slots});
    return detail::unpack_heads(point(packed), layout_, here.attention);
  };
}

// Room for the batch's tokens in a layer of the cache, and where they go there.
void DecoderPass::reserve_cache(int layer, const at::Tensor& k_Ngd, DeviceTables& here) {
  int64_t slots = 0;
  for (int64_t r = 0; r < layout_.rows; ++r) slots = std::max(slots, layout_.prefix[r] + layout_.own[r]);
  const auto like = k_Ngd.narrow(0, 0, 1).unsqueeze(2).expand({layout_.rows, k_Ngd.size(1), 1, k_Ngd.size(2)});
  options_.cache->reserve(layer, like, slots);
  if (here.cache_row.defined()) return;
  std::vector<int64_t> row, slot;
  for (int64_t r = 0; r < layout_.rows; ++r)
    for (int64_t t = 0; t < layout_.own[r]; ++t) row.push_back(r), slot.push_back(layout_.prefix[r] + t);
  here.cache_row = index_on(row, k_Ngd.device(), Purpose::kInput);
  here.cache_slot = index_on(slot, k_Ngd.device(), Purpose::kInput);
}

void DecoderPass::store(int layer, const at::Tensor& k_Ngd, const at::Tensor& v_Ngd, DeviceTables& here) {
  const at::NoGradGuard no_grad;
  KvCache& cache = *options_.cache;
  if (layout_.equal_own && layout_.equal_prefix) {
    const int64_t begin = layout_.prefix[0], n = layout_.own[0];
    const at::Tensor k_BgTd = detail::unpack_heads(k_Ngd, layout_, here.attention);
    cache.reserve(layer, k_BgTd, begin + n);
    cache.keys_[layer].narrow(2, begin, n).copy_(k_BgTd);
    cache.values_[layer].narrow(2, begin, n).copy_(detail::unpack_heads(v_Ngd, layout_, here.attention));
    return;
  }
  reserve_cache(layer, k_Ngd, here);
  for (const auto& [into, from] : {std::pair(cache.keys_[layer], k_Ngd), std::pair(cache.values_[layer], v_Ngd)})
    into.transpose(1, 2).index_put_({here.cache_row, here.cache_slot}, from);
}

// The keys and values that attention reads, [B, kv heads, S, d], instead of the batch's own.
void DecoderPass::with_cached(int layer, at::Tensor& k, at::Tensor& v, const DeviceTables& here) const {
  const bool cached = layout_.source == detail::KeySource::kCache,
             joined = layout_.source == detail::KeySource::kJoined;
  for (at::Tensor* x : {&k, &v}) {
    const at::Tensor& kept = options_.cache ? (x == &k ? options_.cache->keys_ : options_.cache->values_)[layer] : *x;
    if (cached) {
      *x = kept.narrow(2, 0, layout_.key_slots);
      continue;
    }
    *x = detail::unpack_heads(*x, layout_, here.attention);
    if (joined && layout_.longest_prefix > 0) *x = at::cat({kept.narrow(2, 0, layout_.longest_prefix), *x}, 2);
  }
}

DeviceTables& DecoderPass::tables(int layer) {
  const c10::Device device = model_.plan.layers[layer];
  const auto [it, fresh] = tables_->devices.try_emplace(device);
  if (!fresh) return it->second;
  DeviceTables& here = it->second;
  if (!layout_.equal_own) {
    std::vector<int64_t> unpack, pack;
    for (int64_t r = 0; r < layout_.rows; ++r) {
      for (int64_t k = 0; k < layout_.longest; ++k)
        unpack.push_back(layout_.row_begin[r] + std::min(k, layout_.own[r] - 1));
      for (int64_t k = 0; k < layout_.own[r]; ++k) pack.push_back(r * layout_.longest + k);
    }
    here.attention.unpack_index = index_on(unpack, device, Purpose::kInput);
    here.attention.pack_index = index_on(pack, device, Purpose::kInput);
  }
  if (config_.logn_length > 0) {
    std::vector<double> factors;
    bool any = false;
    for (const int64_t column : batch_.columns()) {
      const bool past = column + 1 > config_.logn_length;
      any = any || past;
      factors.push_back(
          past ? std::log(static_cast<double>(column + 1)) / std::log(static_cast<double>(config_.logn_length)) : 1);
    }
    if (any)
      here.logn = devices::route_to(at::tensor(factors, at::kDouble).to(model_.dtype).view({-1, 1, 1}), device,
                                    Purpose::kTable);
  }
  return here;
}

const detail::RotaryTable& DecoderPass::rotary(int layer, DeviceTables& here) {
  const int which = config_.rotary_of_layer[layer];
  const auto [it, fresh] = here.rotary.try_emplace(which);
  if (fresh) {
    it->second = detail::rotary_table(config_.rotaries[which], positions_, lengths_, batch_.row_begin());
    for (at::Tensor* table : {&it->second.cos, &it->second.sin})
      *table = devices::route_to(table->to(model_.dtype), model_.plan.layers[layer], Purpose::kTable);
  }
  return it->second;
}

const detail::AttentionTables::Mask& DecoderPass::mask(int layer, DeviceTables& here) {
  const auto [it, fresh] = here.attention.masks.try_emplace(config_.window(layer));
  if (fresh) {
    const at::Tensor made = layout_.make_mask(config_, it->first, model_.dtype, it->second.causal);
    it->second.mask = devices::route_to(made, model_.plan.layers[layer], Purpose::kTable);
  }
  return it->second;
}

at::Tensor detail::project_rows(const Model::State& model, const at::Tensor& hidden_MD, bool raw_head,
                                bool fire_hooks) {
  const ModelConfig& config = model.config;
  at::Tensor x = devices::route_to(hidden_MD, model.plan.final_norm, Purpose::kHidden);
  if (config.final_norm) x = apply_norm(x, model.top[Part::kFinalNorm], config);
  if (const Linear& project = model.top[Part::kProjectOut]; project.weight.defined())
    x = apply_linear(x, project, false);
  if (fire_hooks) x = model.hooks.point(Site::kFinalNorm, -1)(std::move(x));
  const Linear& head = model.top[Part::kHead];
  x = devices::route_to(x, model.plan.head, Purpose::kHidden);
  at::Tensor logits = apply_linear(x, head, false);
  if (config.normalised_head && !raw_head)
    logits = logits / at::linalg_vector_norm(head.weight, 2, at::IntArrayRef{1}).clamp_min(1e-12);
  if (config.logit_softcap > 0 && !raw_head) logits = config.logit_softcap * at::tanh(logits / config.logit_softcap);
  return fire_hooks ? model.hooks.point(Site::kLogits, -1)(std::move(logits)) : logits;
}

}  // namespace emend::models
