#include <ATen/ATen.h>
#include <emend/core/utf8.h>
#include <emend/editors/steps/continuations.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cctype>
#include <string_view>

namespace emend::editors {

static constexpr int64_t kRowsAtOnce = 96, kFewest = 16;  // of texts that are written side by side

PromptRow answered(const PromptRow& prompt, const std::vector<int64_t>& answer) {
  PromptRow row = prompt;
  row.ids.insert(row.ids.end(), answer.begin(), answer.end());
  row.lookup = std::ssize(row.ids) - 1;
  return row;
}

bool lengthens(const models::Tokenizer& tokenizer, const std::vector<int64_t>& answer, int64_t id) {
  std::vector<int64_t> ids = answer;
  const std::string before = tokenizer.decode(ids);
  ids.push_back(id);
  const std::string after = tokenizer.decode(ids);
  if (before.empty() || after.size() <= before.size() || !in_spaced_word(before, before.size() - 1)) return false;
  const bool of_a_date = std::isdigit(static_cast<unsigned char>(before.back())) &&
                         std::string_view("-/:").find(after[before.size()]) != std::string_view::npos;
  return of_a_date || in_spaced_word(after, before.size());
}

std::vector<Continuation> continue_greedily(const models::Model& model,
                                            const std::vector<std::vector<int64_t>>& prompts, int64_t tokens,
                                            const CancelToken& cancel,
                                            const std::function<bool(size_t row, int64_t id)>& may_begin) {
  constexpr int64_t kCandidates = 50;
  if (prompts.empty()) return {};
  std::vector<Continuation> written(prompts.size());
  const auto ends = model.tokenizer().eos_ids();
  std::vector<std::pair<int64_t, double>> instead(prompts.size(), {-1, 0});  // of a first token: id and −log p
  const auto first_allowed = [&](const at::Tensor& log_p_V, size_t row) -> std::pair<int64_t, double> {
    const auto [log_p, ids] = log_p_V.topk(std::min(kCandidates, log_p_V.numel()));
    for (int64_t k = 0; k < ids.numel(); ++k) {
      const auto id = ids[k].item<int64_t>();
      if (std::ranges::find(ends, id) == ends.end() && may_begin(row, id))
        return {id, std::min(-log_p[k].item<double>(), kLikely)};
    }
    return {-1, 0};
  };
  models::parts_side_by_side(model, prompts.size(), kRowsAtOnce, kFewest, [&](size_t begin, size_t end) {
    models::GenerateOptions options;
    options.max_new_tokens = tokens;
    options.stop_ids = ends;
    options.cancel = cancel;
    options.on_logits = [&, begin](int64_t row, int64_t id, const at::Tensor& logits_V) {
      const size_t r = begin + static_cast<size_t>(row);
      const at::Tensor log_p_V = at::log_softmax(logits_V.to(at::kDouble), 0);
      if (may_begin && written[r].nll.empty() && !may_begin(r, id)) instead[r] = first_allowed(log_p_V, r);
      written[r].nll.push_back(-log_p_V[id].item<double>());
    };
    const auto first = prompts.begin();
    auto ids = models::generate_together(
        model, {first + static_cast<std::ptrdiff_t>(begin), first + static_cast<std::ptrdiff_t>(end)}, options);
    for (size_t i = 0; i < ids.size(); ++i) written[begin + i].ids = std::move(ids[i]);
  });
  std::vector<size_t> rows;
  std::vector<std::vector<int64_t>> anew;
  for (size_t r = 0; r < prompts.size(); ++r) {
    if (instead[r].first < 0) continue;
    rows.push_back(r);
    anew.push_back(prompts[r]);
    anew.back().push_back(instead[r].first);
  }
  const auto rest =
      tokens > 1 ? continue_greedily(model, anew, tokens - 1, cancel) : std::vector<Continuation>(anew.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    auto& [ids, nll] = written[rows[i]];
    ids = {instead[rows[i]].first};
    nll = {instead[rows[i]].second};
    ids.insert(ids.end(), rest[i].ids.begin(), rest[i].ids.end());
    nll.insert(nll.end(), rest[i].nll.begin(), rest[i].nll.end());
  }
  return written;
}

std::vector<bool> says(const models::Model& model, const std::vector<PromptRow>& prompts,
                       const std::vector<std::vector<int64_t>>& answers, const CancelToken& cancel) {
  std::vector<char> said(prompts.size(), 0);  // by several threads
  models::parts_side_by_side(model, prompts.size(), kRowsAtOnce, kFewest, [&](size_t begin, size_t end) {
    std::vector<std::vector<int64_t>> ids;
    std::vector<size_t> right(end - begin, 0);
    models::GenerateOptions options;
    options.max_new_tokens = 0;
    options.cancel = cancel;
    for (size_t p = begin; p < end; ++p) {
      ids.push_back(prompts[p].ids);
      options.max_new_tokens = std::max(options.max_new_tokens, std::ssize(answers[p]));
    }
    options.ends = [&](int64_t row, int64_t id) {
      const auto r = static_cast<size_t>(row);
      const auto& answer = answers[begin + r];
      if (id != answer[right[r]++]) return true;
      said[begin + r] = right[r] == answer.size() ? 1 : 0;
      return said[begin + r] != 0;
    };
    (void)models::generate_together(model, ids, options);
  });
  return {said.begin(), said.end()};
}

std::optional<TargetRow> going_on(const PromptRow& prompt, const std::vector<int64_t>& answer,
                                  const Continuation& continued) {
  if (continued.ids.empty()) return std::nullopt;
  const PromptRow with = answered(prompt, answer);
  TargetRow row{with.ids, with.lookup, {}, 0, true, {}};
  const int64_t first = with.lookup;
  row.ids.insert(row.ids.end(), continued.ids.begin(), continued.ids.end() - 1);
  for (size_t t = 0; t < continued.ids.size(); ++t)
    row.labels.emplace_back(first + static_cast<int64_t>(t), continued.ids[t]);
  row.floors.assign(continued.nll.begin(), continued.nll.begin() + std::ssize(continued.ids));
  return row;
}

}  // namespace emend::editors
