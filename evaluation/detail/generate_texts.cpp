#include <emend/evaluation/detail/generate_texts.h>
#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace emend::evaluation::detail {
namespace {

std::string published_form(std::string text) {
  text = compatibility_form(text);
  for (size_t at = 0; (at = text.find("\n\n", at)) != std::string::npos;) text.replace(at, 2, " ");
  return text;
}

// Texts of prompts [begin, end), sampled together.
std::vector<std::string> sample_batch(const models::Model& model, const std::vector<std::string>& prompts, size_t begin,
                                      size_t end, int64_t length, const EvaluateOptions& options) {
  const auto& tokenizer = model.tokenizer();
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
  const auto sampled = generate.max_new_tokens > 0 ? models::generate(model, ids, generate) : decltype(ids)(ids.size());
  std::vector<std::string> texts;
  for (size_t r = 0; r < ids.size(); ++r) {
    const size_t room = static_cast<size_t>(length) - std::min(static_cast<size_t>(length), ids[r].size());
    ids[r].insert(ids[r].end(), sampled[r].begin(),
                  sampled[r].begin() + static_cast<std::ptrdiff_t>(std::min(room, sampled[r].size())));
    texts.push_back(published_form(tokenizer.decode(ids[r], /*skip_special=*/true)));
  }
  return texts;
}

std::string encode_batches(const std::vector<std::vector<std::string>>& batches) {
  const auto bytes = nlohmann::json::to_msgpack(batches);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::vector<std::string>> decode_batches(std::string_view bytes) {
  return nlohmann::json::from_msgpack(bytes.begin(), bytes.end());
}

}  // namespace

std::vector<std::string> generate_texts(const models::Model& model, const std::vector<std::string>& prompts,
                                        const EvaluateOptions& options) {
  const int64_t length = std::min(options.generation_length, model.max_positions());
  const auto rows =
      static_cast<size_t>(std::clamp<int64_t>(4 * options.batch_tokens / std::max<int64_t>(length, 1), 8, 256));
  std::vector<size_t> begins;
  std::vector<int64_t> costs;
  for (size_t begin = 0; begin < prompts.size(); begin += rows) {
    begins.push_back(begin);
    costs.push_back(static_cast<int64_t>(std::min(rows, prompts.size() - begin)));
  }
  // Whole batches are shared out, so that every text is the one that a process on its own would sample.
  const auto work = [&](devices::ItemRange range) {
    std::vector<std::vector<std::string>> batches;
    for (size_t b = range.begin; b < range.end; ++b) {
      options.cancel.check("generation");
      const size_t end = std::min(begins[b] + rows, prompts.size());
      batches.push_back(sample_batch(model, prompts, begins[b], end, length, options));
      if (options.progress)
        options.progress({"generate", static_cast<double>(end), static_cast<double>(prompts.size()),
                          std::to_string(end) + "/" + std::to_string(prompts.size()) + " texts"});
    }
    return batches;
  };
  std::vector<std::string> texts;
  for (const auto& batch : options.sharing.map<std::vector<std::string>>(costs, work, encode_batches, decode_batches))
    texts.insert(texts.end(), batch.begin(), batch.end());
  return texts;
}

}  // namespace emend::evaluation::detail
