// The parts of a causal trace, and the naive computation that tests compare with.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/trace_parts.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/products.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <numeric>

namespace emend::evaluation {

using hooks::Site;

namespace detail {

TraceTokens trace_tokens(const models::Tokenizer& tokenizer, const KnownFact& fact) {
  const size_t begin = fact.subject.empty() ? std::string::npos : fact.prompt.find(fact.subject);
  if (begin == std::string::npos)
    throw Error(ErrorClass::kInvalidArgument, {"causal tracing of \"" + fact.prompt + "\"",
                                               "the subject \"" + fact.subject + "\" is not in the prompt",
                                               "a prompt that contains its subject", "check the facts file"});
  const size_t end = begin + fact.subject.size();
  const auto encoding = tokenizer.encode(fact.prompt);
  const auto prefix = static_cast<int64_t>(tokenizer.prefix_ids().size());
  TraceTokens tokens;
  tokens.ids = tokenizer.prefix_ids();
  tokens.subject_begin = -1;
  for (size_t i = 0; i < encoding.size(); ++i) {
    tokens.ids.push_back(encoding.ids[i]);
    const auto [from, to] = encoding.offsets[i];
    if (from >= end || to <= begin) continue;
    if (tokens.subject_begin < 0) tokens.subject_begin = prefix + static_cast<int64_t>(i);
    tokens.subject_end = prefix + static_cast<int64_t>(i) + 1;
  }
  if (tokens.subject_begin < 0)
    throw Error(ErrorClass::kInvalidArgument, {"causal tracing of \"" + fact.prompt + "\"",
                                               "no token holds the subject", "a subject with tokens", ""});
  return tokens;
}

Site trace_site(TraceKind kind) {
  return kind == TraceKind::kMlp ? Site::kMlpOut : kind == TraceKind::kAttention ? Site::kAttnOut : Site::kLayerOut;
}

std::pair<int, int> trace_layers(TraceKind kind, int layer, int window, int n_layers) {
  if (kind == TraceKind::kState) return {layer, layer + 1};
  return {std::max(0, layer - window / 2), std::min(n_layers, layer + (window + 1) / 2)};
}

at::Tensor trace_noise(const TraceOptions& options, int64_t tokens, int64_t width) {
  auto generator = at::detail::createCPUGenerator(options.seed);
  return at::randn({options.samples, tokens, width}, generator, at::TensorOptions().dtype(at::kFloat)) * options.noise;
}

std::vector<double> answer_probabilities(const at::Tensor& logits_MV, int64_t answer) {
  const at::Tensor p = at::softmax(wide_logits(logits_MV), -1).select(1, answer);
  const at::Tensor host = devices::to_host(p, devices::Purpose::kHost).to(at::kDouble).contiguous();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

}  // namespace detail

FactTrace trace_fact_reference(const models::Model& model, const KnownFact& fact, const TraceOptions& options) {
  const models::PlainProducts plain_products;
  const at::NoGradGuard no_grad;
  const auto tokens = detail::trace_tokens(model.tokenizer(), fact);
  const auto length = static_cast<int64_t>(tokens.ids.size());
  const int layers = model.n_layers();
  // Row 0 is clean, the others are noised; everything is computed for all of them in every pass.
  const auto batch = models::TokenBatch::from_rows(
      std::vector<std::vector<int64_t>>(static_cast<size_t>(options.samples) + 1, tokens.ids));
  const at::Tensor noise_SnD =
      detail::trace_noise(options, tokens.subject_end - tokens.subject_begin, model.hidden_size());
  const auto pass = [&](TraceKind kind, int64_t token, int low, int high) {
    hooks::HookSession session(model.hooks());
    session.edit({Site::kEmbedding, -1}, [&](const at::Tensor& x) {
      at::Tensor out = x.clone();
      for (int s = 0; s < options.samples; ++s)
        out.narrow(0, batch.token(s + 1, tokens.subject_begin), noise_SnD.size(1))
            .add_(noise_SnD[s].to(x.scalar_type()));
      return out;
    });
    for (int l = low; l < high; ++l)
      session.edit({detail::trace_site(kind), l}, [&](const at::Tensor& x) {
        at::Tensor out = x.clone();
        for (int s = 0; s < options.samples; ++s) out[batch.token(s + 1, token)].copy_(x[batch.token(0, token)]);
        return out;
      });
    session.attach();
    const at::Tensor logits = model.forward(batch).logits;
    session.finish();
    return logits.view({options.samples + 1, length, -1}).select(1, length - 1);
  };
  FactTrace trace;
  trace.fact = fact;
  trace.subject_begin = tokens.subject_begin;
  trace.subject_end = tokens.subject_end;
  trace.draws = options.samples;
  const auto mean_of_draws = [&](const at::Tensor& logits) {
    const auto p = detail::answer_probabilities(logits.narrow(0, 1, options.samples), trace.answer);
    return std::accumulate(p.begin(), p.end(), 0.0) / static_cast<double>(p.size());
  };
  const at::Tensor plain = pass(TraceKind::kState, 0, 0, 0);
  trace.answer = plain[0].argmax().item<int64_t>();
  trace.clean = detail::answer_probabilities(plain.narrow(0, 0, 1), trace.answer)[0];
  trace.corrupted = mean_of_draws(plain);
  for (TraceKind kind : options.kinds)
    for (int64_t t = 0; t < length; ++t) {
      auto& row = trace.restored[kind].emplace_back();
      for (int l = 0; l < layers; ++l) {
        const auto [low, high] = detail::trace_layers(kind, l, options.window, layers);
        row.push_back(mean_of_draws(pass(kind, t, low, high)));
      }
    }
  return trace;
}

}  // namespace emend::evaluation
