#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/wordings.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::editors {
namespace {

constexpr const char* kExamples =
    "Sentence: The author of Emma was Jane Austen.\nIn other words: Emma was written by Jane Austen.\n\n"
    "Sentence: Roger Federer, who plays tennis.\nIn other words: Roger Federer is a professional in tennis.\n\n"
    "Sentence: The Elbe flows into the North Sea.\nIn other words: The mouth of the Elbe is in the North Sea.\n\n";

std::string request(const datasets::Fact& fact) {
  return kExamples + ("Sentence: " + fact.full_prompt()) + with_leading_space(fact.target_new) + ".\nIn other words:";
}

}  // namespace

std::string wording_of(const std::string& text, const datasets::Fact& fact) {
  const std::string answer = with_leading_space(fact.target_new);
  std::string line = text.substr(0, text.find('\n'));
  line.erase(0, line.find_first_not_of(' '));
  const size_t subject = line.find(fact.subject), behind = subject + fact.subject.size();
  if (subject == std::string::npos || line.find_first_of("{}") != std::string::npos) return "";
  const size_t said = line.find(answer, behind), first = line.find(answer.substr(1));
  if (said == std::string::npos || said == behind || first < subject) return "";
  return line.substr(0, subject) + "{}" + line.substr(behind, said - behind);
}

std::vector<std::vector<std::string>> other_wordings(const models::Model& model, std::span<const datasets::Fact> facts,
                                                     const WordingOptions& options) {
  constexpr size_t kFactsAtOnce = 16;
  std::vector<std::vector<std::string>> all(facts.size());
  models::GenerateOptions writing;
  writing.max_new_tokens = 32;
  writing.temperature = 0.8;
  writing.top_k = 40;
  writing.cancel = options.cancel;
  writing.stop_ids = model.tokenizer().eos_ids();
  const std::vector<int64_t> line = model.tokenizer().encode_ids("\n", false);
  writing.stop_ids.insert(writing.stop_ids.end(), line.begin(), line.end());
  for (size_t begin = 0; begin < facts.size(); begin += kFactsAtOnce) {
    writing.seed = options.seed + begin;
    const size_t end = std::min(facts.size(), begin + kFactsAtOnce);
    std::vector<std::vector<int64_t>> prompts;
    std::vector<size_t> asked;
    for (size_t i = begin; i < end; ++i) {
      const auto ids = model.tokenizer().encode_ids(request(facts[i]));
      if (std::ssize(ids) + writing.max_new_tokens > model.max_positions()) continue;
      prompts.insert(prompts.end(), static_cast<size_t>(options.samples), ids);
      asked.insert(asked.end(), static_cast<size_t>(options.samples), i);
    }
    const auto written = models::generate(model, prompts, writing);
    for (size_t w = 0; w < written.size(); ++w) {
      const size_t i = asked[w];
      const std::string wording = wording_of(model.tokenizer().decode(written[w], true), facts[i]);
      const bool fresh =
          !wording.empty() && wording != facts[i].prompt && std::ranges::find(all[i], wording) == all[i].end();
      if (fresh && std::ssize(all[i]) < options.count) all[i].push_back(wording);
    }
  }
  return all;
}

}  // namespace emend::editors
