#include <ATen/ATen.h>
#include <emend/devices/cores.h>
#include <emend/editors/steps/continuations.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

namespace emend::editors {

PromptRow answered(const PromptRow& prompt, const std::vector<int64_t>& answer) {
  PromptRow row = prompt;
  row.ids.insert(row.ids.end(), answer.begin(), answer.end());
  row.lookup = std::ssize(row.ids) - 1;
  return row;
}

std::vector<Continuation> continue_greedily(const models::Model& model,
                                            const std::vector<std::vector<int64_t>>& prompts, int64_t tokens,
                                            const CancelToken& cancel) {
  constexpr int64_t kRowsAtOnce = 96, kFewest = 16;
  if (prompts.empty()) return {};
  std::vector<Continuation> written(prompts.size());
  const int64_t n_rows = std::ssize(prompts), batches = devices::parts_for_cores(n_rows, kRowsAtOnce, kFewest);
  models::side_by_side(model, batches, [&](int64_t batch) {
    const auto begin = static_cast<size_t>(n_rows * batch / batches);
    const auto end = static_cast<size_t>(n_rows * (batch + 1) / batches);
    models::GenerateOptions options;
    options.max_new_tokens = tokens;
    options.stop_ids = model.tokenizer().eos_ids();
    options.cancel = cancel;
    options.on_logits = [&, begin](int64_t row, int64_t id, const at::Tensor& logits_V) {
      const double log_p = at::log_softmax(logits_V.to(at::kDouble), 0)[id].item<double>();
      written[begin + static_cast<size_t>(row)].nll.push_back(-log_p);
    };
    const auto first = prompts.begin();
    auto ids = models::generate_together(
        model, {first + static_cast<std::ptrdiff_t>(begin), first + static_cast<std::ptrdiff_t>(end)}, options);
    for (size_t i = 0; i < ids.size(); ++i) written[begin + i].ids = std::move(ids[i]);
  });
  return written;
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
