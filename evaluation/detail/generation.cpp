#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/datasets/corpus.h>
#include <emend/evaluation/detail/generation.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::evaluation::detail {
namespace {

using nlohmann::json;

[[noreturn]] void damaged(const std::string& where, const std::string& got) {
  throw Error(ErrorClass::kCorruption,
              {where, got, R"(a list of {"relation_id", "target_id", "samples": [{"name", "text"}]})",
               "use attribute_snippets.json of the ROME release or a file of its form"});
}

std::vector<std::string> read_corpus(const std::filesystem::path& path) {
  std::vector<std::string> documents;
  datasets::read_corpus(path, [&](datasets::Document document) {
    documents.push_back(std::move(document.text));
    return true;
  });
  return documents;
}

std::string published_form(const std::string& text) {
  return replace_all(compatibility_form(text), "\n\n", " ");
}

// Texts of prompts [begin, end), sampled together; `first`: the number of prompts[0].
std::vector<std::string> sample_batch(const models::Model& model, const std::vector<std::string>& prompts, size_t first,
                                      size_t begin, size_t end, int64_t length, const EvaluateOptions& options) {
  const auto& tokenizer = model.tokenizer();
  std::vector<std::vector<int64_t>> ids;
  size_t shortest = static_cast<size_t>(length), longest = 0;
  for (size_t i = begin; i < end; ++i) {
    ids.push_back(encode_text(tokenizer, prompts[i]));
    shortest = std::min(shortest, ids.back().size());
    longest = std::max(longest, ids.back().size());
  }
  models::GenerateOptions generate;
  generate.max_new_tokens = length - static_cast<int64_t>(shortest);
  generate.temperature = 1;
  generate.top_k = 5;
  generate.seed = options.seed;
  generate.first_row = static_cast<int64_t>(first + begin);  // a text's numbers do not depend on its batch
  generate.cancel = options.cancel;
  // Room for all, or the longest prompt is refused.
  const int64_t room = std::max<int64_t>(1, models::room_behind(model, static_cast<int64_t>(longest)));
  generate.max_new_tokens = std::min(generate.max_new_tokens, room);
  const auto sampled = generate.max_new_tokens > 0 ? models::generate(model, ids, generate) : decltype(ids)(ids.size());
  std::vector<std::string> texts;
  for (size_t r = 0; r < ids.size(); ++r) {
    const size_t left = static_cast<size_t>(length) - std::min(static_cast<size_t>(length), ids[r].size());
    ids[r].insert(ids[r].end(), sampled[r].begin(), sampled[r].begin() + std::min(left, sampled[r].size()));
    texts.push_back(published_form(tokenizer.decode(ids[r], /*skip_special=*/true)));
  }
  return texts;
}

}  // namespace

std::vector<std::string> generate_texts(const models::Model& model, const std::vector<std::string>& prompts,
                                        const EvaluateOptions& options, size_t first) {
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
      batches.push_back(sample_batch(model, prompts, first, begins[b], end, length, options));
      if (options.progress)
        options.progress({"generate", static_cast<double>(end), static_cast<double>(prompts.size()),
                          std::to_string(end) + "/" + std::to_string(prompts.size()) + " texts"});
    }
    return batches;
  };
  std::vector<std::string> texts;
  for (const auto& batch : options.sharing.map(costs, work)) texts.insert(texts.end(), batch.begin(), batch.end());
  return texts;
}

Snippets::Snippets(const std::filesystem::path& path, const std::filesystem::path& idf_corpus) {
  const json list = read_json(path, {.max_bytes = size_t{512} << 20});
  if (!list.is_array()) damaged(path.string(), "no JSON list");
  std::vector<std::string> documents;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& entry = list[i];
    const std::string where = path.string() + ": entry " + std::to_string(i);
    const auto text_of = [&](const json& object, const char* key) {
      if (!object.is_object() || !object.contains(key) || !object[key].is_string())
        damaged(where, std::string("no text \"") + key + "\"");
      return object[key].get<std::string>();
    };
    auto& samples = samples_[{text_of(entry, "relation_id"), text_of(entry, "target_id")}];
    if (!entry.contains("samples") || !entry["samples"].is_array()) damaged(where, "no list \"samples\"");
    for (const auto& sample : entry["samples"]) {
      samples.push_back({text_of(sample, "name"), text_of(sample, "text")});
      documents.push_back(samples.back().text);
    }
  }
  if (!idf_corpus.empty()) documents = read_corpus(idf_corpus);
  vectors_.emplace(documents);
}

std::optional<double> Snippets::similarity(const datasets::Fact& fact, const std::vector<std::string>& texts) const {
  const auto found = samples_.find({fact.relation_id, target_id(fact, "new")});
  if (found == samples_.end() || found->second.empty()) return std::nullopt;
  const auto text_of = [](const auto& sample) -> const std::string& { return sample.text; };
  return vectors_->similarity(join(texts, " "), join(found->second, " ", text_of));
}

std::string Snippets::own_text(const datasets::Fact& fact) const {
  std::string text;
  for (const char* which : {"new", "true"}) {
    const auto found = samples_.find({fact.relation_id, target_id(fact, which)});
    if (found == samples_.end()) continue;
    for (const auto& sample : found->second)
      if (sample.name == fact.subject) append_item(text, sample.text, " ");
  }
  return text;
}

std::string target_id(const datasets::Fact& fact, const std::string& which) {
  const auto found = fact.extra.find("target_" + which + "_id");
  return found != fact.extra.end() && found->is_string() ? found->get<std::string>() : "";
}

json file_key(const std::filesystem::path& path) {
  return path.empty() ? json() : json(sha256_hex(read_file(path)));
}

}  // namespace emend::evaluation::detail
