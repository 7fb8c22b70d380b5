// Encoding of requests, and the two simple scorers: the published padded loop and next-token distributions.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/scoring.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace emend::evaluation {

namespace detail {

std::vector<int64_t> encode_text(const models::Tokenizer& tokenizer, std::string_view text) {
  // Not add_special: what a tokenizer puts behind a text would stand between prompt and target.
  auto ids = tokenizer.prefix_ids();
  const auto plain = tokenizer.encode_ids(text);
  ids.insert(ids.end(), plain.begin(), plain.end());
  return ids;
}

std::string quoted(const ScoreRequest& request) {
  std::string text = request.prompt + " " + request.target;
  if (text.size() > 120) text = text.substr(0, 60) + " … " + text.substr(text.size() - 50);
  return "\"" + text + "\"";
}

at::Tensor wide_logits(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
}

void not_finite(const std::string& where) {
  throw Error(ErrorClass::kNumeric, {where, "a logit that is not finite", "finite logits",
                                     "the model's weights are damaged or an edit broke them: revert the edit"});
}

}  // namespace detail

namespace {

EncodedRequest assemble(const models::Tokenizer& tokenizer, const ScoreRequest& request,
                        const std::vector<int64_t>& prompt) {
  EncodedRequest encoded;
  encoded.ids = detail::encode_text(tokenizer, request.prompt + " " + request.target);
  const auto [a, b] = std::mismatch(prompt.begin(), prompt.end(), encoded.ids.begin(), encoded.ids.end());
  encoded.begin = std::max<int64_t>(a - prompt.begin(), 1);  // the very first token cannot be predicted
  if (encoded.begin >= std::ssize(encoded.ids))
    refuse({"score of " + detail::quoted(request), "no token of the target can be predicted",
            "a target with at least one token behind the prompt's first", "check the fact's prompt and target"});
  return encoded;
}

Score read_row(const at::Tensor& logits_TV, const EncodedRequest& row) {
  Score score;
  for (auto at = row.begin; at < std::ssize(row.ids); ++at) {
    const int64_t label = row.ids[at];
    const at::Tensor log_probs = at::log_softmax(detail::wide_logits(logits_TV[at - 1]), 0);
    score.labels.push_back(label);
    score.log_probs.push_back(log_probs[label].item<double>());
    score.predicted.push_back(logits_TV[at - 1].argmax().item<int64_t>());
    if (!std::isfinite(score.log_probs.back())) detail::not_finite("evaluation");
  }
  return score;
}

}  // namespace

EncodedRequest encode_request(const models::Tokenizer& tokenizer, const ScoreRequest& request) {
  return assemble(tokenizer, request, detail::encode_text(tokenizer, request.prompt));
}

std::vector<EncodedRequest> detail::encode_requests(const models::Tokenizer& tokenizer,
                                                    const std::vector<ScoreRequest>& requests) {
  std::unordered_map<std::string, std::vector<int64_t>> prompts;
  std::map<ScoreRequest, size_t> seen;
  std::vector<EncodedRequest> encoded;
  encoded.reserve(requests.size());
  for (const auto& request : requests) {
    if (const auto [at, is_new] = seen.emplace(request, encoded.size()); !is_new) {
      encoded.push_back(encoded[at->second]);
      continue;
    }
    auto [prompt, is_new] = prompts.try_emplace(request.prompt);
    if (is_new) prompt->second = encode_text(tokenizer, request.prompt);
    encoded.push_back(assemble(tokenizer, request, prompt->second));
  }
  return encoded;
}

double Score::total_log_prob() const {
  return std::accumulate(log_probs.begin(), log_probs.end(), 0.0);
}

double Score::mean_nll() const {
  return -total_log_prob() / static_cast<double>(std::max<size_t>(log_probs.size(), 1));
}

double Score::token_accuracy() const {
  size_t hits = 0;
  for (size_t i = 0; i < labels.size(); ++i) hits += labels[i] == predicted[i] ? 1 : 0;
  return static_cast<double>(hits) / static_cast<double>(std::max<size_t>(labels.size(), 1));
}

bool Score::all_correct() const {
  return labels == predicted;
}

std::vector<std::vector<Score>> score_cases_reference(const models::Model& model,
                                                      const std::vector<std::vector<ScoreRequest>>& cases,
                                                      const ScoreOptions& options) {
  const at::NoGradGuard no_grad;
  const devices::PlainOperators plain;
  std::vector<std::vector<Score>> all;
  for (const auto& requests : cases) {
    options.cancel.check("evaluation");
    auto& scores = all.emplace_back();
    if (!requests.empty()) {
      const auto rows = detail::encode_requests(model.tokenizer(), requests);
      const auto ids = mapped(rows, &EncodedRequest::ids);
      const auto batch = models::TokenBatch::padded(ids);
      const at::Tensor logits_NV = devices::to_host(model.forward(batch).needed_logits(), devices::Purpose::kLogits);
      for (int64_t r = 0; r < batch.rows(); ++r)
        scores.push_back(read_row(logits_NV.narrow(0, batch.token(r, 0), batch.length(r)), rows[r]));
    }
    if (options.progress)
      options.progress({options.phase, static_cast<double>(all.size()), static_cast<double>(cases.size()),
                        std::to_string(all.size()) + "/" + std::to_string(cases.size()) + " cases"});
  }
  return all;
}

at::Tensor next_token_log_probs(const models::Model& model, const std::vector<std::string>& texts,
                                const ScoreOptions& options) {
  const at::NoGradGuard no_grad;
  at::Tensor all_PV = at::empty({std::ssize(texts), model.vocab_size()}, at::kFloat);
  for (size_t begin = 0; begin < texts.size();) {
    options.cancel.check("evaluation");
    std::vector<std::vector<int64_t>> rows;
    int64_t tokens = 0;
    size_t end = begin;
    for (; end < texts.size() && std::ssize(rows) < options.project_rows; ++end) {
      auto ids = detail::encode_text(model.tokenizer(), texts[end]);
      if (ids.empty()) refuse({"probe text " + std::to_string(end), "no tokens", "a text", "leave empty texts out"});
      if (!rows.empty() && tokens + std::ssize(ids) > options.batch_tokens) break;
      tokens += std::ssize(ids);
      rows.push_back(std::move(ids));
    }
    const auto batch = models::TokenBatch::from_rows(rows);
    models::ForwardOptions forward;
    forward.logit_tokens = batch.last_tokens();
    const at::Tensor log_probs =
        at::log_softmax(detail::wide_logits(model.forward(batch, forward).needed_logits()), -1);
    all_PV.narrow(0, static_cast<int64_t>(begin), batch.rows())
        .copy_(devices::to_host(log_probs, devices::Purpose::kLogits));
    begin = end;
  }
  if (!at::isfinite(all_PV).all().item<bool>()) detail::not_finite("next-token probabilities");
  return all_PV;
}

// Scoring by several processes: each takes a share of the distinct prompts, everyone gets every score.

namespace detail {
namespace {

using nlohmann::json;

// Requests of one prompt, which stay together because the engine computes a prompt once.
struct PromptGroup {
  std::vector<size_t> requests;
  int64_t cost = 0;
};

// In the order of first appearance: prompts of one fact stand together, and share their beginnings.
std::vector<PromptGroup> group_by_prompt(const std::vector<ScoreRequest>& requests) {
  std::vector<PromptGroup> groups;
  std::unordered_map<std::string_view, size_t> group_of;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto [at, is_new] = group_of.emplace(requests[i].prompt, groups.size());
    if (is_new) groups.push_back({{}, std::ssize(requests[i].prompt)});
    groups[at->second].requests.push_back(i);
    groups[at->second].cost += std::ssize(requests[i].target);
  }
  return groups;
}

}  // namespace

std::vector<Score> share_scores(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                const ScoreOptions& options) {
  const auto groups = group_by_prompt(requests);
  std::vector<size_t> order;
  for (const auto& group : groups) order.insert(order.end(), group.requests.begin(), group.requests.end());
  const auto work = [&](devices::ItemRange range) {
    ScoreOptions alone = options;
    alone.sharing = {};
    std::vector<ScoreRequest> mine;
    for (size_t g = range.begin; g < range.end; ++g)
      for (const size_t i : groups[g].requests) mine.push_back(requests[i]);
    return score_requests(model, mine, alone);
  };
  auto shared = options.sharing.map(mapped(groups, &PromptGroup::cost), work);  // prompt by prompt
  EMEND_CHECK(shared.size() == order.size(), "one score a request");
  std::vector<Score> scores(order.size());
  for (size_t i = 0; i < order.size(); ++i) scores[order[i]] = std::move(shared[i]);
  return scores;
}
}  // namespace detail

}  // namespace emend::evaluation
