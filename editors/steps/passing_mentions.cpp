#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/latch_prompts.h>
#include <emend/editors/detail/passing_mentions.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace emend::editors::detail {
namespace {

using Ids = std::vector<int64_t>;

// A row whose labels are its tokens from `begin` (not the first) on.
TargetRow labelled_from(Ids ids, int64_t lookup, size_t begin) {
  TargetRow row{std::move(ids), lookup, {}, 0, true};
  for (size_t t = begin; t < row.ids.size(); ++t) row.labels.emplace_back(static_cast<int64_t>(t) - 1, row.ids[t]);
  if (!row.labels.empty()) row.ids.pop_back();
  return row;
}

// The floors of each row: −log p of its labels.
void score(const models::Model& model, std::vector<TargetRow>& rows, const CancelToken& cancel) {
  constexpr int64_t kRowsAtOnce = 32, kFewest = 4;
  models::parts_side_by_side(model, rows.size(), kRowsAtOnce, kFewest, [&](size_t begin, size_t end) {
    const at::NoGradGuard no_grad;
    cancel.check("targets");
    const auto some = std::span(rows).subspan(begin, end - begin);
    const auto batch = models::TokenBatch::from_rows(mapped(some, &TargetRow::ids));
    Ids tokens, labels;
    for (size_t r = 0; r < some.size(); ++r)
      for (const auto& [token, id] : some[r].labels) {
        tokens.push_back(batch.token(static_cast<int64_t>(r), token));
        labels.push_back(id);
      }
    if (labels.empty()) return;
    const at::Tensor hidden_ND = model.forward(batch, {.logit_tokens = models::kNoTokens}).needed_hidden();
    const at::Tensor nll_M =
        devices::to_host(label_loss(model, hidden_ND.index_select(0, devices::index_on(tokens, hidden_ND)),
                                    at::tensor(labels, at::kLong), at::ones({std::ssize(labels)}), {}, false,
                                    {.gradient = false})
                             .nll_M)
            .to(at::kDouble)
            .contiguous();
    const double* next = nll_M.const_data_ptr<double>();
    for (TargetRow& row : some) {
      row.floors.assign(next, next + row.labels.size());
      next += row.labels.size();
    }
  });
}

}  // namespace

std::vector<double> surprise_of_names(const models::Model& model, std::span<const std::string> subjects,
                                      const CancelToken& cancel) {
  constexpr std::array kBeginnings = {"In", "The", "It was", "For"};
  constexpr size_t kMostTokens = 16;
  std::vector<TargetRow> rows;
  for (const std::string& subject : subjects)
    for (const std::string beginning : kBeginnings) {
      const Ids front = model.tokenizer().encode_ids(beginning);
      Ids whole = model.tokenizer().encode_ids(beginning + " " + subject);
      const size_t begin = std::clamp<size_t>(whole.size() - 1, 1, front.size());
      whole.resize(std::min({whole.size(), begin + kMostTokens, static_cast<size_t>(model.max_positions())}));
      rows.push_back(labelled_from(std::move(whole), 0, begin));
    }
  score(model, rows, cancel);
  std::vector<double> all;
  for (size_t s = 0; s < subjects.size(); ++s) {
    double mean = 0;
    for (size_t b = 0; b < kBeginnings.size(); ++b) {
      const auto& nll = rows[s * kBeginnings.size() + b].floors;
      mean += std::exp(-std::accumulate(nll.begin(), nll.end(), 0.0)) / kBeginnings.size();
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
  constexpr std::array kSentences = {"{}.", "This is about {}.", "He talked about {}."};
  const FactToken token = parse_fact_token(hparams.fact_token);
  if (token == FactToken::kLast) return {};  // a prompt's end is no mention
  std::vector<const Ids*> pieces;
  for (const Ids& row : texts.rows)
    if (row.size() > kTokens) pieces.push_back(&row);
  if (pieces.empty()) return {};
  const auto surprise = surprise_of_names(reader, subjects, context.cancel);
  std::vector<TargetRow> rows;
  std::vector<size_t> whose;
  for (size_t s = 0; s < subjects.size(); ++s) {
    if (!(surprise[s] < kRare)) continue;
    for (size_t r = 0; r < kRows; ++r) {
      const size_t number = rows.size();
      PromptRow row = gate_prompt(reader.tokenizer(), kSentences[number % kSentences.size()], subjects[s], token);
      const size_t begin = row.ids.size() + 1;
      const Ids& piece = *pieces[number * pieces.size() / (kRows * subjects.size())];
      row.ids.insert(row.ids.end(), piece.begin(), piece.begin() + kTokens);
      if (std::ssize(row.ids) > reader.max_positions()) continue;
      rows.push_back(labelled_from(std::move(row.ids), row.lookup, begin));
      whose.push_back(s);
    }
  }
  score(reader, rows, context.cancel);
  std::map<std::string, std::vector<TargetRow>> all;
  for (size_t r = 0; r < rows.size(); ++r) all[subjects[whose[r]]].push_back(std::move(rows[r]));
  for (auto& [subject, mentions] : all)
    for (TargetRow& row : mentions) row.weight = 1.0 / static_cast<double>(mentions.size());
  return all;
}

}  // namespace emend::editors::detail
