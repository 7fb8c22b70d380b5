#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/trace_parts.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <tuple>

namespace emend::evaluation::detail {

using hooks::Site;

TraceTokens trace_tokens(const models::Tokenizer& tokenizer, const KnownFact& fact) {
  const size_t begin = fact.subject.empty() ? std::string::npos : fact.prompt.find(fact.subject);
  if (begin == std::string::npos)
    throw Error(ErrorClass::kInvalidArgument, {"causal tracing of \"" + fact.prompt + "\"",
                                               "the subject \"" + fact.subject + "\" is not in the prompt",
                                               "a prompt that contains its subject", "check the facts file"});
  auto encoding = tokenizer.encode_prompt(fact.prompt);
  TraceTokens tokens;
  std::tie(tokens.subject_begin, tokens.subject_end) = encoding.overlapping(begin, begin + fact.subject.size());
  tokens.ids = std::move(encoding.ids);
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

}  // namespace emend::evaluation::detail
