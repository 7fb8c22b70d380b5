#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/keys.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/products.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <functional>

namespace emend::editors {

// What LayerWalk::State has: with linkage, as that has.
namespace detail {

// Rows cut after the looked-up token, without repeats.
struct CutRows {
  std::vector<std::vector<int64_t>> unique;
  struct Read {
    int64_t row = 0, token = 0;  // of unique
  };
  std::vector<Read> reads;          // looked-up tokens, row by row, those of a row in ascending order
  std::vector<int64_t> first_read;  // of each unique row, and their number
  std::vector<int64_t> of_row;      // index into reads
  // Of each unique row: the group whose beginning it shares, and the tokens of that; 0 where it shares none.
  std::vector<int64_t> group, shared;
};

// Some of the unique rows, with what enters the layer that the walk has reached.
struct Chunk {
  std::vector<int64_t> rows;  // indices into CutRows::unique
  models::TokenBatch batch;
  at::Tensor hidden_ND;                // undefined at layer 0
  std::vector<int64_t> reads, tokens;  // indices into CutRows::reads, and where they are in the batch
  // Beginnings that the rows share, and which of them each row has; none, or each row has one.
  models::TokenBatch heads;
  at::Tensor heads_ND;
  std::vector<int64_t> head_of;

  /// Layers [first, end) of the heads; their keys and values go into `cache`, a row of the chunk each.
  at::Tensor run_heads(const models::Model& model, int first, int end, models::KvCache& cache) const {
    const models::ForwardOptions options{first, heads_ND, end, &cache, true, models::kNoTokens};
    const at::Tensor hidden = model.forward(heads, options).needed_hidden();
    cache = cache.select_rows(head_of);
    return hidden;
  }
};

}  // namespace detail

namespace {

using detail::Chunk, detail::CutRows;
using models::kNoTokens;

constexpr int64_t kChunkTokens = 4096;
constexpr int64_t kLeastShared = 64;  // tokens that a beginning has to save
constexpr size_t kReferenceBatch = 128;

// What `run` gives of a few rows at a time, a tensor a site.
std::vector<at::Tensor> in_batches(
    const std::vector<PromptRow>& rows, size_t sites,
    const std::function<std::vector<at::Tensor>(std::span<const PromptRow> some, size_t begin)>& run) {
  std::vector<std::vector<at::Tensor>> parts(sites);
  for (size_t begin = 0; begin < rows.size(); begin += kReferenceBatch) {
    const auto values = run(std::span(rows).subspan(begin, std::min(kReferenceBatch, rows.size() - begin)), begin);
    for (size_t s = 0; s < sites; ++s) parts[s].push_back(values[s]);
  }
  return mapped(parts, [](const auto& part) { return at::cat(part); });
}

// The published way: whole sentences, padded, through the whole model, the head included.
std::vector<at::Tensor> collect_padded(const models::Model& model, const std::vector<PromptRow>& rows,
                                       const std::vector<hooks::SiteRef>& sites, const EditContext& context) {
  const devices::PlainOperators plain;
  return in_batches(rows, sites.size(), [&](std::span<const PromptRow> some, size_t) {
    context.cancel.check("keys");
    const auto batch = models::TokenBatch::padded(mapped(some, &PromptRow::ids), detail::pad_token(model));
    std::vector<int64_t> lookup;
    for (const PromptRow& row : some) lookup.push_back(batch.token(std::ssize(lookup), row.lookup));
    hooks::HookSession session(model.hooks());
    for (const auto& site : sites) session.capture(site);
    session.attach();
    (void)model.forward(batch);
    auto values = mapped(sites, [&](const auto& site) {
      const at::Tensor all = session.captured(site);
      return all.index_select(0, devices::index_on(lookup, all));
    });
    session.finish();
    return values;
  });
}

std::vector<int64_t> up_to_lookup(const PromptRow& row) {
  return {row.ids.begin(), row.ids.begin() + row.lookup + 1};
}

// With `share_beginnings` a row that another one begins with is read on the way.
CutRows cut(const std::vector<PromptRow>& rows, bool share_beginnings = false) {
  CutRows cuts;
  std::map<std::vector<int64_t>, std::vector<size_t>> places;
  for (size_t i = 0; i < rows.size(); ++i) places[up_to_lookup(rows[i])].push_back(i);
  std::vector<decltype(places)::iterator> order;
  for (auto at = places.begin(); at != places.end(); ++at) order.push_back(at);
  if (!share_beginnings) std::ranges::sort(order, {}, [](const auto& at) { return at->second[0]; });
  cuts.of_row.resize(rows.size());
  for (const auto& at : order) {
    const auto& ids = at->first;
    const auto begins = [&](const std::vector<int64_t>& row) {
      return row.size() < ids.size() && std::equal(row.begin(), row.end(), ids.begin());
    };
    if (share_beginnings && !cuts.unique.empty() && begins(cuts.unique.back()))  // in their order the last row does
      cuts.unique.back() = ids;
    else
      cuts.unique.push_back(ids), cuts.first_read.push_back(std::ssize(cuts.reads));
    for (const size_t i : at->second) cuts.of_row[i] = std::ssize(cuts.reads);
    cuts.reads.push_back({std::ssize(cuts.unique) - 1, std::ssize(ids) - 1});
  }
  cuts.first_read.push_back(std::ssize(cuts.reads));
  cuts.group.assign(cuts.unique.size(), 0);
  cuts.shared.assign(cuts.unique.size(), 0);
  if (!share_beginnings) return cuts;
  auto unread = cuts.unique;
  for (auto read = cuts.reads.rbegin(); read != cuts.reads.rend(); ++read)
    unread[static_cast<size_t>(read->row)].resize(static_cast<size_t>(read->token));
  const auto groups = models::share_beginnings(unread, kLeastShared);
  for (size_t g = 0; g < groups.size(); ++g)
    for (const size_t row : groups[g].rows)
      cuts.group[row] = static_cast<int64_t>(g), cuts.shared[row] = groups[g].shared;
  return cuts;
}

Chunk make_chunk(const CutRows& cuts, std::vector<int64_t> rows) {
  Chunk chunk;
  std::vector<std::vector<int64_t>> heads, tails;
  std::vector<int64_t> begins;
  std::map<int64_t, int64_t> head_of_group;
  for (const int64_t row : rows) {
    const auto& ids = cuts.unique[static_cast<size_t>(row)];
    const auto split = ids.begin() + begins.emplace_back(cuts.shared[static_cast<size_t>(row)]);
    tails.emplace_back(split, ids.end());
    if (begins.back() == 0) continue;
    const auto [found, is_new] = head_of_group.emplace(cuts.group[static_cast<size_t>(row)], std::ssize(heads));
    if (is_new) heads.emplace_back(ids.begin(), split);
    chunk.head_of.push_back(found->second);
  }
  chunk.rows = std::move(rows);
  chunk.batch = heads.empty() ? models::TokenBatch::from_rows(tails) : models::TokenBatch::continuing(tails, begins);
  if (!heads.empty()) chunk.heads = models::TokenBatch::from_rows(heads);
  for (size_t r = 0; r < chunk.rows.size(); ++r) {
    const auto row = static_cast<size_t>(chunk.rows[r]);
    for (int64_t read = cuts.first_read[row]; read < cuts.first_read[row + 1]; ++read) {
      chunk.reads.push_back(read);
      chunk.tokens.push_back(
          chunk.batch.token(static_cast<int64_t>(r), cuts.reads[static_cast<size_t>(read)].token - cuts.shared[row]));
    }
  }
  return chunk;
}

// Chunks of at most kChunkTokens tokens, short rows first: attention pads to the longest of a chunk. Rows that share
// their beginnings are apart from those that do not, and have at most twice as many tokens there.
std::vector<Chunk> make_chunks(const CutRows& cuts) {
  std::vector<int64_t> order(cuts.unique.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  const auto shared = [&](int64_t row) { return cuts.shared[static_cast<size_t>(row)]; };
  const auto length = [&](int64_t row) { return std::ssize(cuts.unique[static_cast<size_t>(row)]) - shared(row); };
  const auto key = [&](int64_t row) {
    return std::tuple(shared(row), cuts.group[static_cast<size_t>(row)], length(row));
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
  std::vector<Chunk> chunks;
  std::vector<int64_t> rows;
  int64_t tokens = 0, before = 0;
  for (const int64_t row : order) {
    const bool full = tokens + length(row) > kChunkTokens || before + shared(row) > 2 * kChunkTokens;
    if (!rows.empty() && (full || (shared(row) > 0) != (before > 0))) {
      chunks.push_back(make_chunk(cuts, std::move(rows)));
      rows.clear();
      tokens = before = 0;
    }
    rows.push_back(row);
    tokens += length(row);
    before += shared(row);
  }
  if (!rows.empty()) chunks.push_back(make_chunk(cuts, std::move(rows)));
  return chunks;
}

// The wanted rows of a chunk as one of their own.
Chunk some_of(const CutRows& cuts, const Chunk& chunk, const std::vector<bool>& wanted) {
  std::vector<int64_t> rows, tokens, head_of;
  for (size_t r = 0; r < chunk.rows.size(); ++r) {
    if (!wanted[static_cast<size_t>(chunk.rows[r])]) continue;
    rows.push_back(chunk.rows[r]);
    if (!chunk.head_of.empty()) head_of.push_back(chunk.head_of[r]);
    const auto row = static_cast<int64_t>(r);
    for (int64_t k = 0; k < chunk.batch.length(row); ++k) tokens.push_back(chunk.batch.token(row, k));
  }
  if (rows.size() == chunk.rows.size()) return chunk;
  if (rows.empty()) return {};
  Chunk part = make_chunk(cuts, std::move(rows));
  part.heads = chunk.heads;
  part.heads_ND = chunk.heads_ND;
  part.head_of = std::move(head_of);
  if (chunk.hidden_ND.defined())
    part.hidden_ND = chunk.hidden_ND.index_select(0, devices::index_on(tokens, chunk.hidden_ND));
  return part;
}

// The sites' values at the last tokens of the chunk, from `layer` up; ends after the last site.
std::vector<at::Tensor> run_chunk(const models::Model& model, const Chunk& chunk, int layer,
                                  const std::vector<hooks::SiteRef>& sites) {
  const auto& order = hooks::all_sites();
  const auto rank = [&](const hooks::SiteRef& site) {
    return std::pair(site.layer, std::find(order.begin(), order.end(), site.site) - order.begin());
  };
  const auto last =
      *std::max_element(sites.begin(), sites.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  models::ForwardOptions options{.first_layer = layer, .hidden = chunk.hidden_ND, .logit_tokens = kNoTokens};
  models::KvCache cache(model.n_layers());
  if (!chunk.head_of.empty()) {
    (void)chunk.run_heads(model, layer, last.layer + 1, cache);
    options.end_layer = last.layer + 1;
    options.cache = &cache;
    options.append = false;
  }
  hooks::HookSession session(model.hooks());
  for (const auto& site : sites) session.capture(site, {.reference = false, .tokens = chunk.tokens});
  session.stop_after(last).attach();
  (void)model.forward(chunk.batch, options);
  const auto values = mapped(sites, [&](const auto& site) { return session.captured(site); });
  session.finish();
  return values;
}

// Values of reads in the order of `rows` (indices into reads), written there as the chunks come: keys of 10,000 facts
// are gigabytes, of which nothing is held twice.
class Gathered {
 public:
  Gathered(const std::vector<int64_t>& rows, size_t n_reads) : places_(n_reads), n_rows_(rows.size()) {
    for (size_t i = 0; i < rows.size(); ++i) places_[static_cast<size_t>(rows[i])].push_back(static_cast<int64_t>(i));
  }
  void add(const Chunk& chunk, const at::Tensor& values) {
    std::vector<int64_t> from, to;
    for (size_t r = 0; r < chunk.reads.size(); ++r)
      for (const int64_t place : places_[static_cast<size_t>(chunk.reads[r])]) {
        from.push_back(static_cast<int64_t>(r));
        to.push_back(place);
      }
    if (!all_.defined()) all_ = at::empty({static_cast<int64_t>(n_rows_), values.size(1)}, values.options());
    all_.index_copy_(0, devices::index_on(to, all_), values.index_select(0, devices::index_on(from, values)));
  }
  [[nodiscard]] const at::Tensor& all() const { return all_; }

 private:
  std::vector<std::vector<int64_t>> places_;
  size_t n_rows_;
  at::Tensor all_;
};

}  // namespace

at::Tensor average_keys(const at::Tensor& keys_PF, const ContextTemplates& contexts) {
  const auto n_contexts = static_cast<int64_t>(contexts.size());
  EMEND_CHECK(n_contexts > 0 && keys_PF.size(0) % n_contexts == 0, "keys of whole facts");
  const at::Tensor keys_NCF = keys_PF.view({-1, n_contexts, keys_PF.size(1)});
  at::Tensor sum;
  int64_t begin = 0;
  for (const auto& group : contexts.groups) {
    const auto size = static_cast<int64_t>(group.size());
    const at::Tensor mean = keys_NCF.narrow(1, begin, size).mean(1);
    sum = sum.defined() ? sum + mean : mean;
    begin += size;
  }
  return sum / static_cast<double>(contexts.groups.size());
}

std::vector<at::Tensor> collect_with(const models::Model& model, const std::vector<PromptRow>& rows,
                                     hooks::SiteRef site, const at::Tensor& values_ND,
                                     const std::vector<hooks::SiteRef>& sites, const EditContext& context) {
  const at::NoGradGuard no_grad;
  return in_batches(rows, sites.size(), [&](std::span<const PromptRow> some, size_t begin) {
    context.cancel.check("replay");
    const auto batch = models::TokenBatch::from_rows(mapped(some, up_to_lookup));
    const auto last = batch.last_tokens();
    const at::Tensor wanted_ND = values_ND.narrow(0, static_cast<int64_t>(begin), std::ssize(some));
    hooks::HookSession session(model.hooks());
    session.edit(site, [&](const at::Tensor& out) {
      const at::Tensor here = devices::route_like(wanted_ND, out, devices::Purpose::kKeys).to(out.scalar_type());
      return out.index_copy(0, devices::index_on(last, out), here);
    });
    for (const auto& one : sites) session.capture(one, {.reference = false, .tokens = last});
    session.attach();
    (void)model.forward(batch, {.logit_tokens = kNoTokens});
    auto values = mapped(sites, [&](const auto& one) { return session.captured(one); });
    session.finish();
    return values;
  });
}

std::vector<at::Tensor> collect_at_lookup(const models::Model& model, const std::vector<PromptRow>& rows,
                                          const std::vector<hooks::SiteRef>& sites, const EditContext& context) {
  return LayerWalk(model, rows, context).read(sites);
}

struct LayerWalk::State {
  const models::Model& model;
  const EditContext& context;
  int layer = 0;
  std::vector<PromptRow> rows = {};  // reference engine
  CutRows cuts = {};                 // fast engine, as the chunks
  std::vector<Chunk> chunks = {};
};

LayerWalk::LayerWalk(const models::Model& model, const std::vector<PromptRow>& rows, const EditContext& context,
                     bool share_beginnings)
    : state_(new State{model, context}) {
  EMEND_CHECK(!rows.empty(), "a walk without rows");
  if (context.engine == Engine::kReference) {
    state_->rows = rows;
    return;
  }
  // A beginning turns as its own row's length says.
  state_->cuts = cut(rows, share_beginnings && !model.config().rotary_depends_on_length());
  state_->chunks = make_chunks(state_->cuts);
}

LayerWalk::~LayerWalk() = default;

void LayerWalk::advance_to(int layer) {
  EMEND_CHECK(layer >= state_->layer, "a walk goes up");
  const at::NoGradGuard no_grad;
  const models::Model& model = state_->model;
  for (auto& chunk : state_->chunks) {
    const bool shares = !chunk.head_of.empty();
    for (int at = state_->layer, end; at < layer; at = end) {
      end = shares ? at + 1 : layer;  // keys and values of one layer at a time
      state_->context.cancel.check("keys");
      models::ForwardOptions options{
          .first_layer = at, .hidden = chunk.hidden_ND, .end_layer = end, .logit_tokens = kNoTokens};
      models::KvCache cache(model.n_layers());
      if (shares) {
        chunk.heads_ND = chunk.run_heads(model, at, end, cache);
        options.cache = &cache;
        options.append = false;
      }
      chunk.hidden_ND = model.forward(chunk.batch, options).needed_hidden();
    }
  }
  state_->layer = layer;
}

std::vector<at::Tensor> LayerWalk::read(const std::vector<hooks::SiteRef>& sites,
                                        const std::optional<std::vector<size_t>>& selected) const {
  const at::NoGradGuard no_grad;
  const auto& [model, context, layer, rows, cuts, chunks] = *state_;
  if (context.engine == Engine::kReference)
    return collect_padded(model, selected ? mapped(*selected, [&](size_t i) { return state_->rows[i]; }) : rows, sites,
                          context);
  const auto wanted = selected ? mapped(*selected, [&](size_t i) { return state_->cuts.of_row[i]; }) : cuts.of_row;
  std::vector<bool> is_wanted(cuts.unique.size(), false);
  for (const int64_t read : wanted) is_wanted[static_cast<size_t>(cuts.reads[static_cast<size_t>(read)].row)] = true;
  std::vector<Gathered> gathered(sites.size(), Gathered(wanted, cuts.reads.size()));
  for (const auto& chunk : chunks) {
    context.cancel.check("keys");
    const Chunk part = some_of(cuts, chunk, is_wanted);
    if (part.rows.empty()) continue;
    const auto values = run_chunk(model, part, layer, sites);
    for (size_t s = 0; s < sites.size(); ++s) gathered[s].add(part, values[s]);
  }
  return mapped(gathered, &Gathered::all);
}

at::Tensor LayerWalk::keys() const {
  return read({{hooks::Site::kMlpDownIn, state_->layer}})[0];
}

at::Tensor LayerWalk::values(hooks::SiteRef site, const std::vector<size_t>& selected) const {
  EMEND_CHECK(site.layer >= state_->layer && !selected.empty(), "values at or above the walk's layer");
  return read({site}, selected)[0];
}

}  // namespace emend::editors
