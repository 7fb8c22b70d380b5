// One line for a look inside: a pass over texts, with what lies at its sites, and with changes on the way.
//
//   const auto run = model.trace("The Eiffel Tower is in", {{Site::kAttnPattern, 3}});
//   run[{Site::kAttnPattern, 3}]                                                          // [rows, heads, T, T]
//   model.trace("The Eiffel Tower is in", {}, {Patch::zero({Site::kAttnZ, 3}).heads({2})}).logits
//
// Everything is laid out by rows and tokens (Trace), zero where a row is shorter than the longest. Gradients follow the
// caller's grad mode. For passes in pieces, with a cache, or that stop early: hooks/hook_session.h.
#pragma once

#include <emend/models/model.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <map>

namespace emend::models {

/// What a pass reads: a text, texts, or rows of token ids.
struct Prompts {
  Prompts(const char* text) : texts{text} {}
  Prompts(std::string text) : texts{std::move(text)} {}
  Prompts(std::vector<std::string> several) : texts(std::move(several)) {}
  Prompts(std::initializer_list<const char*> several) : texts(several.begin(), several.end()) {}
  Prompts(std::vector<std::vector<int64_t>> token_ids) : ids(std::move(token_ids)) {}

  std::vector<std::string> texts;         ///< with what the tokenizer puts in front of a text
  std::vector<std::vector<int64_t>> ids;  ///< instead of texts, as they are
};

/// A token that may come next.
struct NextToken {
  int64_t id = 0;
  std::string text;
  double probability = 0;
};

/// What a pass showed.
///   rows B, tokens of the longest row T; sites in the layout of hooks/site.h with [B,T] in front, [B,T,h,d], but
///   scores and patterns [B,h,T,S]
struct Trace {
  TokenBatch batch;
  std::vector<Encoding> encodings;               ///< a row's ids, and the bytes of the text that each stands for
  std::vector<std::string> texts;                ///< as given; empty if ids were
  std::vector<std::vector<std::string>> tokens;  ///< a row's tokens as text; ids as numbers without a tokenizer
  at::Tensor logits;                             ///< [B,T,V]
  std::map<hooks::SiteRef, at::Tensor> captures;

  /// Throws Error(kInvalidArgument) for a site that was not asked for.
  [[nodiscard]] const at::Tensor& operator[](const hooks::SiteRef& site) const;
  /// One token of a row, [D], [h,d], [h,S]; a negative `token` counts from the row's end.
  [[nodiscard]] at::Tensor at(const hooks::SiteRef& site, int64_t row, int64_t token) const;
  /// First and one past the last token of `part`, a subject say, where it first stands in the row's text. Throws
  /// Error(kInvalidArgument) if it is not there.
  [[nodiscard]] std::pair<int64_t, int64_t> span(std::string_view part, int64_t row = 0) const;
};

/// A change at a site, of all tokens and heads unless they are named.
class Patch {
 public:
  /// What `function` makes of the tensor, in the layout of Trace: it returns a tensor of the same shape, or changes
  /// the one it was given (a copy) and returns an undefined one.
  Patch(hooks::SiteRef site, hooks::HookFn function);
  [[nodiscard]] static Patch zero(hooks::SiteRef site);
  /// The mean over all tokens of the pass; of scores and patterns over those that see a key (a share of exactly 0:
  /// unseen). A pattern's rows keep their sums.
  [[nodiscard]] static Patch mean(hooks::SiteRef site);
  /// A tensor that fits what a trace has there, in its layout, by broadcasting; on any device, in any dtype. In scores
  /// hidden keys stay hidden; a pattern is put there as it is.
  [[nodiscard]] static Patch set(hooks::SiteRef site, at::Tensor value);
  [[nodiscard]] static Patch add(hooks::SiteRef site, at::Tensor value);
  /// What another pass had there, at the same tokens: counted from a row's begin, negative ones from its end. `from`
  /// holds as many rows, or one for all; without tokens() rows must be of the same length.
  [[nodiscard]] static Patch swap(hooks::SiteRef site, const Trace& from);

  /// The same, added to what is there.
  [[nodiscard]] Patch added() const;
  /// Only at these tokens of each row; negative ones count from its end.
  [[nodiscard]] Patch tokens(std::vector<int64_t> positions) const;
  /// Only these heads (of keys and values: key-value heads; of kRouter and kExpertOut: experts).
  [[nodiscard]] Patch heads(std::vector<int64_t> heads) const;

  [[nodiscard]] const hooks::SiteRef& site() const noexcept { return site_; }
  /// The packed tensor of `batch` with the change. Throws Error(kInvalidArgument) naming site and misfit.
  [[nodiscard]] at::Tensor operator()(const at::Tensor& packed, const TokenBatch& batch) const;

 private:
  using Value = std::function<at::Tensor(const at::Tensor&, const TokenBatch&, const Patch&)>;
  Patch(hooks::SiteRef site, Value value) : site_(site), value_(std::move(value)) {}
  [[nodiscard]] std::vector<int64_t> chosen(const TokenBatch& batch, int64_t row) const;
  [[noreturn]] void misfit(const std::string& got, const std::string& expected, const std::string& advice) const;
  hooks::SiteRef site_;
  Value value_;
  std::optional<std::vector<int64_t>> tokens_, heads_;
};

}  // namespace emend::models
