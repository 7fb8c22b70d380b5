#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/kernels.h>
#include <emend/models/detail/attention.h>
#include <emend/models/detail/few_queries.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace emend::models::detail {
namespace {

// y = x[index]; the gradient of x is the gradient of y gathered by `back`. Right whenever each row of x is wanted at
// most once in y: other rows of y repeat rows of x whose copies have no gradient.
class Gather : public torch::autograd::Function<Gather> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& index,
                            const at::Tensor& back) {
    context->save_for_backward({back});
    return x.index_select(0, index);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].index_select(0, context->get_saved_variables()[0]), {}, {}};
  }
};

// y = x[index], where index has no repeats; the rows of x that are not in it get a gradient of 0.
class Pick : public torch::autograd::Function<Pick> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& index) {
    context->save_for_backward({index});
    context->saved_data["rows"] = x.size(0);
    return x.index_select(0, index);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto shape = gradients[0].sizes().vec();
    shape[0] = context->saved_data["rows"].toInt();
    return {gradients[0].new_zeros(shape).index_copy_(0, context->get_saved_variables()[0], gradients[0]), {}};
  }
};

std::vector<double> alibi_slopes(int64_t n_heads) {
  int64_t power = 1;
  while (2 * power <= n_heads) power *= 2;
  std::vector<double> slopes;
  const double p = static_cast<double>(power);
  for (int64_t k = 0; k < power; ++k) slopes.push_back(std::pow(2.0, -8.0 * static_cast<double>(k + 1) / p));
  for (int64_t k = 0; k < n_heads - power; ++k)
    slopes.push_back(std::pow(2.0, -4.0 * static_cast<double>(2 * k + 1) / p));
  return slopes;
}

}  // namespace

AttentionLayout::AttentionLayout(const TokenBatch& batch, const KvCache* cache, KeySource key_source)
    : rows(batch.rows()),
      longest(batch.longest()),
      source(key_source),
      padding(batch.is_padding()),
      row_begin(batch.row_begin()) {
  prefix.assign(rows, 0);
  if (cache && !cache->empty()) prefix = cache->lengths();
  for (int64_t r = 0; r < rows; ++r) {
    own.push_back(batch.length(r));
    equal_own = equal_own && own[r] == own[0];
    equal_prefix = equal_prefix && prefix[r] == prefix[0];
    longest_prefix = std::max(longest_prefix, prefix[r]);
    key_slots = std::max(key_slots, prefix[r] + own[r]);
  }
  has_padding = std::find(padding.begin(), padding.end(), true) != padding.end();
  if (source == KeySource::kOwn) key_slots = longest;
  if (source == KeySource::kJoined) key_slots = longest_prefix + longest;
}

// Slots are ordered by how many tokens of the row come before; a window and ALiBi count in these.
at::Tensor AttentionLayout::make_mask(const ModelConfig& config, int64_t window, at::ScalarType dtype,
                                      bool& causal) const {
  const bool alibi = config.positions == Positions::kAlibi;
  const bool windowed = window > 0 && window < longest_prefix + longest;
  const bool shared = equal_prefix && !has_padding;
  causal = shared && source == KeySource::kOwn && !windowed && !alibi && longest > 1 && config.attention_softcap == 0;
  if (causal || (shared && longest == 1 && equal_own && !windowed && !alibi)) return {};

  const int64_t n_rows = shared ? 1 : rows;
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  at::Tensor mask = at::full({n_rows, 1, longest, key_slots}, kHidden, at::kFloat);
  auto* out = mask.mutable_data_ptr<float>();
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t before = prefix[r], own_begin = source == KeySource::kJoined ? longest_prefix : before;
    for (int64_t k = 0; k < longest; ++k, out += key_slots) {
      const int64_t order = before + k;  // of the query
      const int64_t first = windowed ? std::max<int64_t>(0, order - window + 1) : 0;
      for (int64_t j = first; j < before; ++j) out[j] = 0;
      for (int64_t j = std::max(first, before); j <= order; ++j) {
        const int64_t slot = own_begin + (j - before);
        const bool hidden = has_padding && j - before < own[r] && padding[row_begin[r] + j - before];
        if (slot < key_slots && !hidden) out[slot] = 0;
      }
      // Itself always: padding then has something to look at, and its result is not read.
      out[std::min(own_begin + k, key_slots - 1)] = 0;
    }
  }
  if (alibi) {
    at::Tensor order = at::empty({n_rows, 1, 1, key_slots}, at::kFloat);
    auto* position = order.mutable_data_ptr<float>();
    for (int64_t r = 0; r < n_rows; ++r)
      for (int64_t j = 0; j < key_slots; ++j)
        *position++ = static_cast<float>(
            source == KeySource::kJoined && j >= longest_prefix ? prefix[r] + j - longest_prefix : j);
    at::Tensor slopes = at::tensor(alibi_slopes(config.n_heads), at::kDouble).to(at::kFloat).view({1, -1, 1, 1});
    at::Tensor bias;
    if (config.alibi_like_falcon) {
      bias = (slopes.to(at::kBFloat16) * order.to(at::kBFloat16)).to(at::kFloat) * config.attention_scale;
    } else {
      bias = slopes * order;
    }
    mask = mask + bias;
  }
  return mask.to(dtype);
}

at::Tensor unpack_heads(const at::Tensor& x_Nhd, const AttentionLayout& layout, const AttentionTables& tables) {
  at::Tensor x = x_Nhd;
  if (!layout.equal_own)
    x = devices::wants_gradient(x) ? Gather::apply(x, tables.unpack_index, tables.pack_index)
                                   : x.index_select(0, tables.unpack_index);
  return x.unflatten(0, {layout.rows, layout.longest}).transpose(1, 2);
}

at::Tensor pack_heads(const at::Tensor& x_BhTd, const AttentionLayout& layout, const AttentionTables& tables) {
  const int64_t width = x_BhTd.size(1) * x_BhTd.size(3);
  const at::Tensor x = x_BhTd.transpose(1, 2).reshape({layout.rows * layout.longest, width});
  if (layout.equal_own) return x;
  return devices::wants_gradient(x) ? Pick::apply(x, tables.pack_index) : x.index_select(0, tables.pack_index);
}

namespace {

// A CPU's half-precision attention sets up a product for every row and head, which at the sizes of suffixes and single
// tokens takes ten times as long as the products themselves. In float32 it is called directly; and for few queries the
// heads of a group, which share their keys, are one product.
constexpr int64_t kFewQueries = 64;

bool is_narrow_on_cpu(const at::Tensor& x) {
  return !x.is_cuda() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
}

at::Tensor attend_by_group(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                           const at::Tensor& mask, double scale) {
  const int64_t rows = q_BhTd.size(0), heads = q_BhTd.size(1), queries = q_BhTd.size(2), width = q_BhTd.size(3);
  const int64_t groups = k_BgSd.size(1), together = heads / groups * queries;
  const at::Tensor q = q_BhTd.reshape({rows, groups, together, width});
  at::Tensor scores = (q.matmul(k_BgSd.transpose(-1, -2)) * scale).view({rows, heads, queries, k_BgSd.size(2)});
  if (mask.defined()) scores = scores + mask;
  return at::softmax(scores, -1)
      .view({rows, groups, together, k_BgSd.size(2)})
      .matmul(v_BgSd)
      .view({rows, heads, queries, v_BgSd.size(3)});
}

at::Tensor attend_in_float32(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                             const AttentionTables::Mask& mask, double scale) {
  const at::Tensor q = q_BhTd.to(at::kFloat), k = k_BgSd.to(at::kFloat), v = v_BgSd.to(at::kFloat);
  const at::Tensor added = mask.mask.defined() ? mask.mask.to(at::kFloat) : at::Tensor();
  if (!mask.causal && q.size(2) <= kFewQueries) return attend_by_group(q, k, v, added, scale).to(q_BhTd.scalar_type());
  return at::scaled_dot_product_attention(q, k, v, added.defined() ? std::optional(added) : std::nullopt, 0.0,
                                          mask.causal, scale, q.size(1) != k.size(1))
      .to(q_BhTd.scalar_type());
}

at::Tensor attend_at_once(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                          const AttentionTables::Mask& mask, double scale, double softcap) {
  const int64_t repeat = q_BhTd.size(1) / k_BgSd.size(1);
  if (softcap == 0 && !mask.causal && takes_few_queries(q_BhTd, k_BgSd, v_BgSd))
    return attend_few(q_BhTd, k_BgSd, v_BgSd, mask.mask, scale);
  if (softcap == 0 && is_narrow_on_cpu(q_BhTd)) return attend_in_float32(q_BhTd, k_BgSd, v_BgSd, mask, scale);
  if (softcap == 0) {
    const bool gradient = devices::wants_gradient(q_BhTd) || devices::wants_gradient(k_BgSd);
    const auto way = attention_way({.cuda = q_BhTd.is_cuda(),
                                    .dtype = q_BhTd.scalar_type(),
                                    .repeat = repeat,
                                    .queries = q_BhTd.size(2),
                                    .width = q_BhTd.size(3),
                                    .gradient = gradient},
                                   mask);
    if (way == AttentionWay::kProducts) return attend_by_group(q_BhTd, k_BgSd, v_BgSd, mask.mask, scale);
    const bool again = way == AttentionWay::kRepeated;
    const auto additive = mask.mask.defined() ? std::optional(mask.mask) : std::nullopt;
    return at::scaled_dot_product_attention(q_BhTd, again ? k_BgSd.repeat_interleave(repeat, 1) : k_BgSd,
                                            again ? v_BgSd.repeat_interleave(repeat, 1) : v_BgSd, additive, 0.0,
                                            mask.causal, scale, repeat > 1 && !again);
  }
  return attend_openly(q_BhTd, k_BgSd, v_BgSd, mask, scale, softcap, {}, {});
}

}  // namespace

AttentionWay attention_way(const AttentionCase& call, const AttentionTables::Mask& mask) {
  constexpr int64_t kWide = 64;
  if (!call.cuda) return AttentionWay::kLibrary;
  const bool few = call.queries <= kFewQueries && !mask.causal;
  if (call.repeat == 1)
    return call.gradient && few && mask.mask.defined() && call.width > kWide ? AttentionWay::kProducts
                                                                             : AttentionWay::kLibrary;
  const bool narrow = call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  if (narrow && !mask.mask.defined()) return AttentionWay::kLibrary;
  return few ? AttentionWay::kProducts : AttentionWay::kRepeated;
}

at::Tensor attend_openly(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                         const AttentionTables::Mask& mask, double scale, double softcap,
                         const AttentionHook& at_scores, const AttentionHook& at_pattern) {
  const int64_t repeat = q_BhTd.size(1) / k_BgSd.size(1);
  const at::Tensor k = repeat > 1 ? k_BgSd.repeat_interleave(repeat, 1) : k_BgSd;
  const at::Tensor v = repeat > 1 ? v_BgSd.repeat_interleave(repeat, 1) : v_BgSd;
  at::Tensor scores = (q_BhTd * scale).matmul(k.transpose(-1, -2));
  if (softcap != 0) scores = softcap * at::tanh(scores / softcap);
  if (mask.mask.defined()) scores = scores + mask.mask;
  if (mask.causal) {
    const at::Tensor later = at::ones({scores.size(2), scores.size(3)}, scores.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  if (at_scores) scores = at_scores(std::move(scores));
  const at::ScalarType wide = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor pattern = at::softmax(scores, -1, wide).to(v.scalar_type());
  if (at_pattern) pattern = at_pattern(std::move(pattern));
  return pattern.matmul(v);
}

at::Tensor attend(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                  const AttentionTables::Mask& mask, double scale, double softcap, int64_t scores_at_once) {
  const int64_t queries = q_BhTd.size(2), scores_a_query = q_BhTd.size(0) * q_BhTd.size(1) * k_BgSd.size(2);
  const int64_t run = std::max<int64_t>(1, scores_at_once / std::max<int64_t>(1, scores_a_query));
  // CPUs and GPUs have kernels for causal text that never hold all scores; float64 on a GPU has not.
  const bool fused = q_BhTd.is_cpu() || (q_BhTd.is_cuda() && q_BhTd.scalar_type() != at::kDouble);
  const bool by_products = softcap != 0 || (!mask.causal && queries <= kFewQueries);  // of all queries and keys
  const bool bounded = !mask.mask.defined() && !by_products && (!mask.causal || fused);
  if (queries <= run || bounded || devices::wants_gradient(q_BhTd) || devices::wants_gradient(k_BgSd))
    return attend_at_once(q_BhTd, k_BgSd, v_BgSd, mask, scale, softcap);
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < queries; begin += run) {
    const int64_t n = std::min(run, queries - begin);
    const int64_t seen = mask.causal ? begin + n : k_BgSd.size(2);
    AttentionTables::Mask part;
    if (mask.causal)
      part.mask = at::full({1, 1, n, seen}, -std::numeric_limits<double>::infinity(), q_BhTd.options()).triu(begin + 1);
    else
      part.mask = mask.mask.defined() && mask.mask.size(2) > 1 ? mask.mask.narrow(2, begin, n) : mask.mask;
    parts.push_back(attend_at_once(q_BhTd.narrow(2, begin, n), k_BgSd.narrow(2, 0, seen), v_BgSd.narrow(2, 0, seen),
                                   part, scale, softcap));
  }
  return at::cat(parts, 2);
}

}  // namespace emend::models::detail
