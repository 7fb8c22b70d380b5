#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/trace.h>

#include <algorithm>

namespace emend::models {

using devices::Purpose;
using hooks::Site;
using hooks::SiteRef;

namespace {

bool has_slots(Site site) {
  return site == Site::kAttnScores || site == Site::kAttnPattern;
}

bool has_heads(Site site) {
  return (site >= Site::kAttnQ && site <= Site::kAttnZ) || site == Site::kRouter || site == Site::kExpertOut;
}

at::Tensor like(const at::Tensor& value, const at::Tensor& x) {
  return devices::route_like(value, x, Purpose::kHidden, devices::Dtype::kMatch);
}

// From a site's packed tensor to the layout of Trace, and back.
at::Tensor by_rows(const at::Tensor& packed, const TokenBatch& batch, Site site) {
  const at::Tensor x = batch.unpack(packed);
  return has_slots(site) ? x.transpose(1, 2) : x;
}

at::Tensor packed_again(const at::Tensor& by_rows, const TokenBatch& batch, Site site) {
  return batch.pack(has_slots(site) ? by_rows.transpose(1, 2) : by_rows);
}

}  // namespace

const at::Tensor& Trace::operator[](const SiteRef& site) const {
  const auto found = captures.find(site);
  if (found == captures.end())
    refuse({"trace", to_string(site) + " was not asked for", "a site that the trace captured",
            "name it in the call of trace()"});
  return found->second;
}

at::Tensor Trace::at(const SiteRef& site, int64_t row, int64_t token) const {
  const int64_t place = batch.token(row, token) - batch.row_begin()[row];
  return (*this)[site][row].select(has_slots(site.site) ? 1 : 0, place);
}

std::pair<int64_t, int64_t> Trace::span(std::string_view part, int64_t row) const {
  (void)batch.token(row, 0);  // refuses a row that there is not
  const bool known = row < std::ssize(texts);
  const size_t begin = known && !part.empty() ? texts[row].find(part) : std::string::npos;
  const std::pair<int64_t, int64_t> none{-1, -1},
      found = begin == std::string::npos ? none : encodings[row].overlapping(begin, begin + part.size());
  if (found == none)
    refuse({"trace, row " + std::to_string(row), "\"" + std::string(part) + "\" is not in its text",
            "a part of a text that was traced", known ? "" : "rows of ids have no text"});
  return found;
}

Patch::Patch(SiteRef site, hooks::HookFn function)
    : Patch(site, [fn = std::move(function)](const at::Tensor& x, const TokenBatch& batch, const Patch& self) {
        const at::Tensor given = by_rows(x, batch, self.site_.site).clone(), made = fn(given);
        if (made.defined() && made.sizes() != given.sizes())
          self.misfit("the function made " + shape_text(made.sizes()), shape_text(given.sizes()),
                      "an edit keeps the shape");
        return like(packed_again(made.defined() ? made : given, batch, self.site_.site), x);
      }) {}

// Of scores: keys that are hidden stay hidden.
static at::Tensor visible(const at::Tensor& x, const at::Tensor& value, Site site) {
  return site == Site::kAttnScores ? at::where(x.isneginf(), x, value) : value;
}

Patch Patch::zero(SiteRef site) {
  return {site, Value([](const at::Tensor& x, const TokenBatch&, const Patch& self) {
            return visible(x, at::zeros_like(x), self.site_.site);
          })};
}

// The mean over the tokens that see a key, for these tokens.
static at::Tensor mean_of_seen(const at::Tensor& x, const at::Tensor& hidden) {
  return at::where(hidden, x, x.masked_fill(hidden, NAN).nanmean(0, true));
}

Patch Patch::mean(SiteRef site) {
  return {site, Value([](const at::Tensor& x, const TokenBatch&, const Patch& self) {
            if (self.site_.site == Site::kAttnScores) return mean_of_seen(x, x.isneginf());
            if (self.site_.site != Site::kAttnPattern) return x.mean(0, true).expand_as(x);
            const at::Tensor mean = mean_of_seen(x, x == 0), sum = mean.sum(-1, true);  // 0: hidden
            return mean * (x.sum(-1, true) / sum.masked_fill(sum == 0, 1));  // a token's shares add up as before
          })};
}

Patch Patch::set(SiteRef site, at::Tensor value) {
  return {site, Value([value](const at::Tensor& x, const TokenBatch& batch, const Patch& self) {
            const at::Tensor rows = by_rows(x, batch, self.site_.site);
            try {
              return visible(x, packed_again(like(value, x).expand_as(rows), batch, self.site_.site), self.site_.site);
            } catch (const c10::Error&) {
              self.misfit("a value of shape " + shape_text(value.sizes()), "one that fits " + shape_text(rows.sizes()),
                          self.tokens_ ? "of some tokens, too, the value is that of all of them" : "");
            }
          })};
}

Patch Patch::add(SiteRef site, at::Tensor value) {
  return set(site, std::move(value)).added();
}

Patch Patch::swap(SiteRef site, const Trace& from) {
  const at::Tensor theirs = packed_again(from[site], from.batch, site.site);
  return {site, Value([theirs, other = from.batch](const at::Tensor& x, const TokenBatch& batch, const Patch& self) {
            std::vector<int64_t> here, there;
            if (other.rows() != 1 && other.rows() != batch.rows())
              self.misfit("a trace of " + std::to_string(other.rows()) + " rows",
                          std::to_string(batch.rows()) + ", or one", "");
            for (int64_t r = 0; r < batch.rows(); ++r) {
              const int64_t q = other.rows() == 1 ? 0 : r;
              if (!self.tokens_ && other.length(q) != batch.length(r))
                self.misfit("a trace of " + std::to_string(other.length(q)) + " tokens",
                            "as many as row " + std::to_string(r) + " has, " + std::to_string(batch.length(r)),
                            "say which tokens to take with tokens(), from the row's end if that is where they agree");
              for (const int64_t k : self.chosen(batch, r)) {
                here.push_back(batch.token(r, k));
                there.push_back(other.token(q, k));
              }
            }
            const at::Tensor rows = theirs.index_select(0, devices::index_on(there, theirs));
            if (rows.sizes().slice(1) != x.sizes().slice(1))
              self.misfit("a trace with " + shape_text(rows.sizes()), shape_text(x.sizes()),
                          "scores and patterns need as many keys");
            return x.index_copy(0, devices::index_on(here, x), like(rows, x));
          })};
}

Patch Patch::added() const {
  Patch patch = *this;
  patch.value_ = [value = value_](const at::Tensor& x, const TokenBatch& batch, const Patch& self) {
    return x + value(x, batch, self);
  };
  return patch;
}

Patch Patch::tokens(std::vector<int64_t> positions) const {
  Patch patch = *this;
  patch.tokens_ = std::move(positions);
  return patch;
}

Patch Patch::heads(std::vector<int64_t> heads) const {
  Patch patch = *this;
  patch.heads_ = std::move(heads);
  return patch;
}

void Patch::misfit(const std::string& got, const std::string& expected, const std::string& advice) const {
  refuse({"patch at " + to_string(site_), got, expected, advice});
}

std::vector<int64_t> Patch::chosen(const TokenBatch& batch, int64_t row) const {
  if (tokens_) return *tokens_;
  std::vector<int64_t> all(static_cast<size_t>(batch.length(row)));
  for (size_t k = 0; k < all.size(); ++k) all[k] = static_cast<int64_t>(k);
  return all;
}

at::Tensor Patch::operator()(const at::Tensor& x, const TokenBatch& batch) const {
  if (x.size(0) != batch.tokens())
    misfit("patches of one token", "the packed tokens of the batch", "ask for the logits of all tokens");
  at::Tensor changed = value_(x, batch, *this);
  const auto keep_others = [&](const std::vector<int64_t>& places, int64_t dim) {
    std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
    sizes[static_cast<size_t>(dim)] = x.size(dim);
    const at::Tensor mask = at::zeros({x.size(dim)}, x.options().dtype(at::kBool))
                                .index_fill(0, devices::index_on(places, x), true)
                                .view(sizes);
    changed = at::where(mask, changed, x);
  };
  if (tokens_) {
    std::vector<int64_t> places;
    for (int64_t r = 0; r < batch.rows(); ++r)
      for (const int64_t k : *tokens_) places.push_back(batch.token(r, k));
    keep_others(places, 0);
  }
  if (heads_) {
    if (!has_heads(site_.site)) misfit("heads of a site that has none", "a site inside attention, or experts", "");
    for (const int64_t head : *heads_)
      if (head < 0 || head >= x.size(1))
        misfit("head " + std::to_string(head), "a head from 0 to " + std::to_string(x.size(1) - 1), "");
    keep_others(*heads_, 1);
  }
  return changed;
}

namespace {

TokenBatch batch_of(const Model& model, const Prompts& prompts, Trace* trace) {
  std::vector<std::vector<int64_t>> rows = prompts.ids;
  for (const std::string& text : prompts.texts) {
    Encoding encoding = model.tokenizer().encode_prompt(text);
    rows.push_back(encoding.ids);
    if (trace) trace->encodings.push_back(std::move(encoding));
  }
  if (!trace) return TokenBatch::from_rows(rows);
  trace->texts = prompts.texts;
  for (const auto& row : rows) {
    if (prompts.texts.empty()) trace->encodings.push_back({row, {}});
    trace->tokens.push_back(model.has_tokenizer() ? model.tokenizer().decode_each(row)
                                                  : mapped(row, [](int64_t id) { return std::to_string(id); }));
  }
  return TokenBatch::from_rows(rows);
}

void require_site(const Model& model, const SiteRef& ref) {
  if (!model.has_site(ref.site))
    throw Error(ErrorClass::kUnsupported,
                {"site " + to_string(ref), "the family " + model.config().family + " has no such place",
                 "a site of this model", "Model::has_site says which there are"});
}

}  // namespace

bool Model::has_site(Site site) const noexcept {
  const Mlp mlp = state_->config.mlp;
  switch (site) {
    case Site::kMlpGate:
      return mlp == Mlp::kGated || mlp == Mlp::kGatedFused;
    case Site::kMlpUp:
    case Site::kMlpDownIn:
    case Site::kMlpDownOut:
      return mlp != Mlp::kExperts;
    case Site::kRouter:
    case Site::kExpertOut:
      return mlp == Mlp::kExperts;
    default:
      return true;
  }
}

Trace Model::trace(const Prompts& prompts, const std::vector<SiteRef>& sites, const std::vector<Patch>& patches) const {
  Trace trace;
  trace.batch = batch_of(*this, prompts, &trace);
  const TokenBatch& batch = trace.batch;
  hooks::HookSession session(hooks());
  for (const Patch& patch : patches) {
    require_site(*this, patch.site());
    session.edit(patch.site(), [&](const at::Tensor& x) { return patch(x, batch); });
  }
  for (const SiteRef& ref : sites) {
    require_site(*this, ref);
    session.capture(ref, {.reference = true, .tokens = {}});
  }
  session.attach();
  trace.logits = batch.unpack(forward(batch).needed_logits());
  for (const SiteRef& ref : sites) trace.captures[ref] = by_rows(session.captured(ref), batch, ref.site);
  session.finish();
  return trace;
}

ForwardResult Model::forward(const Prompts& prompts) const {
  return forward(batch_of(*this, prompts, nullptr));
}

std::vector<NextToken> Model::next_tokens(const Prompts& prompt, int64_t count) const {
  if (count < 1) refuse({"next_tokens", "count " + std::to_string(count), "at least 1", ""});
  const at::NoGradGuard no_grad;
  const TokenBatch batch = batch_of(*this, prompt, nullptr);
  const ForwardOptions options{.logit_tokens = {{batch.token(0, -1)}}};
  const at::Tensor logits = devices::to_host(forward(batch, options).needed_logits()[0]).to(at::kDouble);
  if (!at::isfinite(logits).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"next_tokens", "logits that are not finite", "finite weights and hooks",
                                       "check the checkpoint (emend doctor) and what hooks write"});
  const auto [probabilities, ids] = at::softmax(logits, -1).topk(std::min(count, logits.size(0)), -1, true, true);
  std::vector<NextToken> next;
  for (int64_t i = 0; i < ids.size(0); ++i) {
    const auto id = ids[i].item<int64_t>();
    next.push_back({id, has_tokenizer() ? tokenizer().decode_more(std::vector{id}) : std::to_string(id),
                    probabilities[i].item<double>()});
  }
  return next;
}

at::Tensor Model::embedding() const {
  return state_->top[Part::kEmbedding].weight;
}

// The rows of queries (0), keys (1) or values (2) in a fused matrix [all, D], by head.
static at::Tensor fused_part(const at::Tensor& weight, const ModelConfig& c, int which) {
  const int64_t h = c.n_heads, g = c.n_kv_heads, d = c.head_dim;
  if (c.qkv == Qkv::kPerHead) return weight.unflatten(0, {h, 3, d}).select(1, which);
  if (c.qkv == Qkv::kBlocks)
    return weight.unflatten(0, {h + 2 * g, d}).narrow(0, which == 0 ? 0 : h + (which - 1) * g, which == 0 ? h : g);
  const at::Tensor by_group = weight.unflatten(0, {g, h / g + 2, d});
  return which == 0 ? by_group.narrow(1, 0, h / g).flatten(0, 1) : by_group.select(1, h / g + which - 1);
}

at::Tensor Model::weight_at(const SiteRef& ref) const {
  (void)hooks().at(ref);  // the layer exists
  const ModelConfig& c = state_->config;
  const auto whole = [&](Part part) {
    const at::Tensor weight = (ref.layer < 0 ? state_->top[part] : state_->layers[ref.layer][part]).weight;
    return state_->conv1d() && ref.layer >= 0 ? weight.t() : weight;
  };
  const auto attention = [&](int which, Part own, int64_t heads) {
    if (c.qkv != Qkv::kSeparate) return fused_part(whole(Part::kQkv), c, which);
    return whole(own).unflatten(0, {heads, c.head_dim});
  };
  const auto half = [&](Part own, int which) {
    return c.mlp == Mlp::kGatedFused ? whole(Part::kGateUp).chunk(2, 0)[which] : whole(own);
  };
  if (has_site(ref.site)) switch (ref.site) {
      case Site::kEmbedding:
        return whole(Part::kEmbedding);
      case Site::kAttnQ:
        return attention(0, Part::kQ, c.n_heads);
      case Site::kAttnK:
        return attention(1, Part::kK, c.n_kv_heads);
      case Site::kAttnV:
        return attention(2, Part::kV, c.n_kv_heads);
      case Site::kAttnOut:
        return whole(Part::kAttnOut);
      case Site::kMlpGate:
        return half(Part::kGate, 0);
      case Site::kMlpUp:
        return half(Part::kUp, 1);
      case Site::kRouter:
        return whole(Part::kRouter);
      case Site::kMlpDownOut:
      case Site::kMlpOut:
        if (c.mlp != Mlp::kExperts) return whole(Part::kDown);
        break;
      case Site::kLogits:
        return whole(Part::kHead);
      default:
        break;
    }
  throw Error(ErrorClass::kUnsupported, {"weight at " + to_string(ref), "no one matrix makes what lies there",
                                         "attn_q, attn_k, attn_v, attn_out, mlp_gate, mlp_up, mlp_out, router, logits",
                                         "weight() takes any weight by its name"});
}

}  // namespace emend::models
