// IKE: Can We Edit Factual Knowledge by In-Context Learning? (Zheng et al., EMNLP 2023).
//
//   The facts are kept as text. In front of a prompt stand the k edited facts that it resembles most, as demonstrations
//   "New Fact: … Prompt: …"; a prompt that resembles none more than `threshold` is asked as it is.
//
// No weight and no activation changes, and nothing is trained. The published method fills the demonstrations up with
// facts of a training set; here they are the edited facts themselves.
#include <emend/core/text.h>
#include <emend/editors/steps/runtime_editor.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace emend::editors {
namespace {

struct IkeHparams {
  int64_t k = 4;
  double threshold = 0.5;
};

class Ike final : public RuntimeEditor {
 public:
  Ike(IkeHparams hparams, const RecipeInputs& in) : RuntimeEditor(in), hparams_(hparams) {}

 protected:
  [[nodiscard]] RuntimePart learn(models::Model& model, std::span<const datasets::Fact> facts,
                                  const RenderedBatch& batch, const std::optional<RuntimePart>& before,
                                  const EditContext&, EditResult& result) override {
    RuntimePart part;
    part.kind = "ike";
    part.values = {{"k", hparams_.k},
                   {"threshold", hparams_.threshold},
                   {"facts", before ? before->values.at("facts") : nlohmann::json::array()}};
    for (size_t i = 0; i < batch.rendered.size(); ++i) {
      const datasets::Fact& fact = facts[batch.places[i]];
      auto& list = part.values["facts"];
      const std::string prompt = fact.full_prompt();
      const auto older = std::ranges::find_if(list, [&](const auto& told) { return told.at("prompt") == prompt; });
      if (older != list.end()) list.erase(older);  // the newer answer counts
      list.push_back({{"prompt", prompt}, {"target", fact.target_new}, {"case_id", fact.case_id}});
      Target target;
      target.status = FactStatus::kConverged;
      result.outcomes[batch.places[i]] = make_outcome(model.tokenizer(), batch.rendered[i], target);
    }
    return part;
  }

 private:
  IkeHparams hparams_;
};

// IKE beside a model: the edited facts that a prompt resembles are told in front of it.
//
// Similarity is the cosine of TF-IDF vectors over the edited prompts: words of the subject are rare and weigh much,
// words of the relation are common and weigh little. (The published code asks a sentence encoder, and is given the
// right fact; here nobody says which fact a prompt is about.)
using Words = std::map<std::string, double>;

struct Demonstration {
  std::string prompt, target;
  Words vector;
};

class IkeRuntime {
 public:
  IkeRuntime(std::vector<Demonstration> facts, int64_t k, double threshold)
      : facts_(std::move(facts)), k_(k), threshold_(threshold) {
    for (const auto& fact : facts_) {
      const auto words = words_in(fact.prompt);
      for (const auto& word : std::set<std::string>(words.begin(), words.end())) frequency_[word] += 1;
    }
    for (auto& fact : facts_) fact.vector = vector_of(fact.prompt);
  }

  [[nodiscard]] std::string prefix(std::string_view prompt) const {
    const Words query = vector_of(prompt);
    std::vector<std::pair<double, size_t>> ranked;
    for (size_t i = 0; i < facts_.size(); ++i) {
      double similarity = 0;
      for (const auto& [word, weight] : query)
        if (const auto found = facts_[i].vector.find(word); found != facts_[i].vector.end())
          similarity += weight * found->second;
      constexpr double kRounding = 1e-9;  // a prompt is as like itself as can be
      if (similarity >= threshold_ - kRounding) ranked.emplace_back(similarity, i);
    }
    // The most similar fact stands last, next to the prompt.
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    if (static_cast<int64_t>(ranked.size()) > k_) ranked.resize(static_cast<size_t>(k_));
    std::string text;
    for (auto it = ranked.rbegin(); it != ranked.rend(); ++it) {
      const std::string fact = facts_[it->second].prompt + with_leading_space(facts_[it->second].target);
      text += "New Fact: " + fact + "\nPrompt: " + fact + "\n\n";
    }
    return text.empty() ? text : text + "Prompt: ";
  }

 private:
  [[nodiscard]] Words vector_of(std::string_view text) const {
    Words vector;
    const double n = static_cast<double>(facts_.size());
    for (const auto& word : words_in(text)) {
      const auto found = frequency_.find(word);
      const double count = found == frequency_.end() ? 0 : found->second;
      vector[word] += std::log((1 + n) / (1 + count)) + 1;
    }
    double square = 0;
    for (const auto& [word, weight] : vector) square += weight * weight;
    for (auto& [word, weight] : vector) weight /= std::sqrt(square);
    return vector;
  }

  std::vector<Demonstration> facts_;
  int64_t k_;
  double threshold_;
  std::map<std::string, double> frequency_;
};

RuntimeEdit make_ike_runtime(const RuntimePart& part, const models::Model&, const std::string& where) {
  std::vector<Demonstration> facts;
  for (const auto& entry : part.values.at("facts"))
    facts.push_back({entry.at("prompt").get<std::string>(), entry.at("target").get<std::string>(), {}});
  const auto k = part.values.at("k").get<int64_t>();
  const auto threshold = part.values.at("threshold").get<double>();
  if (k < 1 || !(threshold >= 0 && threshold <= 1))
    throw Error(ErrorClass::kCorruption, {where, "demonstrations with k " + std::to_string(k),
                                          "k of at least 1 and a threshold from 0 to 1", ""});
  return {.prefix = [told = IkeRuntime(std::move(facts), k, threshold)](std::string_view prompt) {
    return told.prefix(prompt);
  }};
}

}  // namespace

EditorInfo make_ike() {
  using H = IkeHparams;
  static const auto schema =
      hparams::Schema<H>("ike")
          .field("k", &H::k, "most facts told in front of a prompt", {.min = 1})
          .field("threshold", &H::threshold, "least similarity of prompt and fact",
                 {.formula = "cosine of TF-IDF vectors", .min = 0, .max = 1})
          .unused("sentence_model_name", "similarity is that of TF-IDF vectors; no sentence encoder is loaded");
  return runtime_entry<Ike>("ike", "no change at all: similar edited facts are told in front of a prompt",
                            "Zheng et al., Can We Edit Factual Knowledge by In-Context Learning?, EMNLP 2023", schema,
                            make_ike_runtime, /*trains=*/false);
}

}  // namespace emend::editors
