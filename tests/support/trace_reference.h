// The naive computation of a causal trace (a full pass for each restored state), as an oracle.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/kernels.h>
#include <emend/evaluation/detail/trace_parts.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/products.h>

#include <numeric>

namespace emend::evaluation {

inline FactTrace trace_fact_reference(const models::Model& model, const datasets::Fact& fact,
                                      const TraceOptions& options) {
  const devices::PlainOperators plain_products;
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
    session.edit({hooks::Site::kEmbedding, -1}, [&](const at::Tensor& x) {
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
