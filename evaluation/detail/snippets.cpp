#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/datasets/corpus.h>
#include <emend/evaluation/detail/snippets.h>

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
  datasets::CorpusReader reader(path);
  while (auto document = reader.next()) documents.push_back(std::move(document->text));
  return documents;
}

}  // namespace

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
