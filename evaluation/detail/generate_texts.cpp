#include <emend/evaluation/detail/generate_texts.h>
#include <emend/evaluation/detail/regex.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::evaluation::detail {
namespace {

std::string published_form(std::string text) {
  text = compatibility_form(text);
  for (size_t at = 0; (at = text.find("\n\n", at)) != std::string::npos;) text.replace(at, 2, " ");
  return text;
}

}  // namespace

std::vector<std::string> generate_texts(const models::Model& model, const std::vector<std::string>& prompts,
                                        const EvaluateOptions& options) {
  const auto& tokenizer = model.tokenizer();
  const int64_t length = std::min(options.generation_length, model.max_positions());
  const auto rows =
      static_cast<size_t>(std::clamp<int64_t>(4 * options.batch_tokens / std::max<int64_t>(length, 1), 8, 256));
  std::vector<std::string> texts;
  for (size_t begin = 0; begin < prompts.size(); begin += rows) {
    options.cancel.check("generation");
    const size_t end = std::min(begin + rows, prompts.size());
    std::vector<std::vector<int64_t>> ids;
    size_t shortest = static_cast<size_t>(length);
    for (size_t i = begin; i < end; ++i) {
      ids.push_back(encode_text(tokenizer, prompts[i]));
      shortest = std::min(shortest, ids.back().size());
    }
    models::GenerateOptions generate;
    generate.max_new_tokens = length - static_cast<int64_t>(shortest);
    generate.temperature = 1;
    generate.top_k = 5;
    generate.seed = options.seed + begin;  // rows of different batches must not draw the same numbers
    generate.cancel = options.cancel;
    const auto sampled =
        generate.max_new_tokens > 0 ? models::generate(model, ids, generate) : decltype(ids)(ids.size());
    for (size_t r = 0; r < ids.size(); ++r) {
      const size_t room = static_cast<size_t>(length) - std::min(static_cast<size_t>(length), ids[r].size());
      ids[r].insert(ids[r].end(), sampled[r].begin(),
                    sampled[r].begin() + static_cast<std::ptrdiff_t>(std::min(room, sampled[r].size())));
      texts.push_back(published_form(tokenizer.decode(ids[r], /*skip_special=*/true)));
    }
    if (options.progress)
      options.progress({"generate", static_cast<double>(end), static_cast<double>(prompts.size()),
                        std::to_string(end) + "/" + std::to_string(prompts.size()) + " texts"});
  }
  return texts;
}

}  // namespace emend::evaluation::detail
