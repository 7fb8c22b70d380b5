#include <ATen/ATen.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/latch_prompts.h>
#include <emend/editors/detail/passing_mentions.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace emend::editors::detail {
namespace {

using Ids = std::vector<int64_t>;

struct Scored {
  Ids ids;
  size_t begin = 0;  // of what is scored; not the first token
};

// −log p of each row's tokens from `begin` on. Each of them has logits, which are large: few rows at once.
std::vector<std::vector<double>> surprises(const models::Model& model, const std::vector<Scored>& rows, int64_t at_once,
                                           const CancelToken& cancel) {
  std::vector<std::vector<double>> all(rows.size());
  models::parts_side_by_side(model, rows.size(), at_once, std::min<int64_t>(at_once, 4), [&](size_t begin, size_t end) {
    cancel.check("targets");
    std::vector<Ids> some;
    for (size_t r = begin; r < end; ++r) some.push_back(rows[r].ids);
    const auto batch = models::TokenBatch::from_rows(some);
    Ids before;
    for (size_t r = begin; r < end; ++r)
      for (size_t t = rows[r].begin; t < rows[r].ids.size(); ++t)
        before.push_back(batch.token(static_cast<int64_t>(r - begin), static_cast<int64_t>(t) - 1));
    const at::Tensor log_p_NV = at::log_softmax(
        devices::to_host(model.forward(batch, {.logit_tokens = before}).needed_logits()).to(at::kFloat), 1);
    for (size_t r = begin, n = 0; r < end; ++r)
      for (size_t t = rows[r].begin; t < rows[r].ids.size(); ++t, ++n)
        all[r].push_back(-log_p_NV[static_cast<int64_t>(n)][rows[r].ids[t]].item<double>());
  });
  return all;
}

}  // namespace

std::vector<double> surprise_of_names(const models::Model& model, std::span<const std::string> subjects,
                                      const CancelToken& cancel) {
  constexpr std::array kBeginnings = {"In", "The", "It was", "For"};
  constexpr int64_t kRowsAtOnce = 32;
  constexpr size_t kMostTokens = 16;
  std::vector<Scored> rows;
  for (const std::string& subject : subjects)
    for (const std::string beginning : kBeginnings) {
      const Ids front = model.tokenizer().encode_ids(beginning);
      Ids whole = model.tokenizer().encode_ids(beginning + " " + subject);
      const size_t begin = std::clamp<size_t>(whole.size() - 1, 1, front.size());
      whole.resize(std::min({whole.size(), begin + kMostTokens, static_cast<size_t>(model.max_positions())}));
      rows.push_back({std::move(whole), begin});
    }
  const auto each = surprises(model, rows, kRowsAtOnce, cancel);
  std::vector<double> all;
  for (size_t s = 0; s < subjects.size(); ++s) {
    double mean = 0;
    for (size_t b = 0; b < kBeginnings.size(); ++b) {
      double sum = 0;
      for (const double one : each[s * kBeginnings.size() + b]) sum += one;
      mean += std::exp(-sum) / kBeginnings.size();
    }
    all.push_back(-std::log(mean));
  }
  return all;
}

std::map<std::string, std::vector<TargetRow>> passing_mentions(const LatchHparams& hparams,
                                                               std::span<const std::string> subjects,
                                                               const LatchTexts& texts, const models::Model& reader,
                                                               const EditContext& context) {
  constexpr double kRare = 18;
  constexpr size_t kTokens = 32, kRows = 2;
  constexpr int64_t kRowsAtOnce = 4;
  constexpr std::array kSentences = {"{}.", "This is about {}.", "He talked about {}."};
  const FactToken token = parse_fact_token(hparams.fact_token);
  if (token == FactToken::kLast) return {};  // a prompt's end is no mention
  std::vector<const Ids*> pieces;
  for (const Ids& row : texts.rows)
    if (row.size() > kTokens) pieces.push_back(&row);
  const auto& tokenizer = reader.tokenizer();
  const auto surprise = surprise_of_names(reader, subjects, context.cancel);
  std::vector<Scored> rows;
  std::vector<std::pair<size_t, int64_t>> whose;  // subject and looked-up token
  for (size_t s = 0; s < subjects.size() && !pieces.empty(); ++s) {
    if (!(surprise[s] < kRare)) continue;
    for (size_t r = 0; r < kRows; ++r) {
      const size_t number = rows.size();
      PromptRow row = gate_prompt(tokenizer, kSentences[number % kSentences.size()], subjects[s], token);
      const size_t begin = row.ids.size() + 1;
      const Ids& piece = *pieces[number * pieces.size() / (kRows * subjects.size())];
      row.ids.insert(row.ids.end(), piece.begin(), piece.begin() + kTokens);
      if (std::ssize(row.ids) > reader.max_positions()) continue;
      rows.push_back({std::move(row.ids), begin});
      whose.emplace_back(s, row.lookup);
    }
  }
  const auto floors = surprises(reader, rows, kRowsAtOnce, context.cancel);
  std::map<std::string, std::vector<TargetRow>> all;
  for (size_t r = 0; r < rows.size(); ++r) {
    auto& [ids, begin] = rows[r];
    TargetRow row{ids, whose[r].second, {}, 0, true, floors[r]};
    for (size_t t = begin; t < ids.size(); ++t) row.labels.emplace_back(static_cast<int64_t>(t) - 1, ids[t]);
    row.ids.pop_back();
    all[subjects[whose[r].first]].push_back(std::move(row));
  }
  for (auto& [subject, mentions] : all)
    for (TargetRow& row : mentions) row.weight = 1.0 / static_cast<double>(mentions.size());
  return all;
}

}  // namespace emend::editors::detail
