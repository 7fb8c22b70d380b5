#include <emend/core/error.h>
#include <emend/core/splitmix64.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/editors/steps/contexts.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <array>

namespace emend::editors {
namespace {

constexpr std::array kSeedWords = {"The", "Therefore", "Because", "I", "You"};
constexpr int64_t kTopK = 5;

size_t count_slots(const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find("{}"); at != std::string::npos; at = text.find("{}", at + 2)) ++count;
  return count;
}

// A sampled text as a template.
std::string as_template(const std::string& text) {
  std::string clean = replace_all(compatibility_form(text), "\n\n", " ");
  for (char& c : clean)
    if (c == '{' || c == '}' || c == '\0') c = ' ';
  return clean + ". {}";
}

// A different random stream for each call.
uint64_t mix(uint64_t seed, uint64_t call) {
  return splitmix64(seed + 0x9e3779b97f4a7c15ULL * call);
}

// `count` continuations of each seed word, up to `length` tokens in all.
std::vector<std::string> sample_texts(const models::Model& model, int64_t length, int64_t count, uint64_t seed) {
  const auto& tokenizer = model.tokenizer();
  std::map<int64_t, std::vector<std::vector<int64_t>>> prompts_by_new;  // new tokens -> prompts
  std::map<int64_t, std::vector<size_t>> places;
  size_t place = 0;
  for (const char* word : kSeedWords) {
    const auto ids = tokenizer.encode_prompt(word).ids;
    const int64_t wanted = std::max<int64_t>(0, length - static_cast<int64_t>(ids.size()));
    for (int64_t i = 0; i < count; ++i, ++place) {
      prompts_by_new[wanted].push_back(ids);
      places[wanted].push_back(place);
    }
  }
  std::vector<std::string> texts(place);
  for (const auto& [wanted, prompts] : prompts_by_new) {
    std::vector<std::vector<int64_t>> continued(prompts.size());
    if (wanted > 0) {
      models::GenerateOptions options;
      options.max_new_tokens = wanted;
      options.temperature = 1;
      options.top_k = kTopK;
      options.seed = mix(seed, static_cast<uint64_t>(wanted));
      continued = models::generate(model, prompts, options);
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      std::vector<int64_t> ids = prompts[i];
      ids.insert(ids.end(), continued[i].begin(), continued[i].end());
      texts[places[wanted][i]] = as_template(tokenizer.decode(ids, true));
    }
  }
  return texts;
}

}  // namespace

std::vector<std::string> ContextTemplates::flat() const {
  std::vector<std::string> all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
  return all;
}

size_t ContextTemplates::size() const {
  size_t count = 0;
  for (const auto& group : groups) count += group.size();
  return count;
}

nlohmann::json ContextTemplates::to_json() const {
  nlohmann::json json = {{"templates", groups}, {"sampled", sampled}};
  if (sampled) json["seed"] = seed;
  return json;
}

ContextTemplates parse_contexts(const nlohmann::json& json, const std::string& where) {
  const auto fail = [&](const std::string& got) {
    refuse({where, got,
            "a list of templates with one {} each, or a list of such lists, the first template being \"{}\"",
            "for example [[\"{}\"], [\"It is so. {}\"]]"});
  };
  const nlohmann::json& list = json.is_object() && json.contains("templates") ? json["templates"] : json;
  if (!list.is_array() || list.empty()) fail("no list of templates");
  ContextTemplates contexts;
  const auto add = [&](std::vector<std::string>& group, const nlohmann::json& item) {
    if (!item.is_string()) fail("a template that is no string: " + item.dump().substr(0, 80));
    if (count_slots(item.get<std::string>()) != 1)
      fail("\"" + item.get<std::string>() + "\" with " + std::to_string(count_slots(item)) + " places {}");
    group.push_back(item);
  };
  for (const auto& items : list.front().is_string() ? nlohmann::json::array({list}) : list) {
    if (!items.is_array() || items.empty()) fail("a group that is no list of templates");
    contexts.groups.emplace_back();
    for (const auto& item : items) add(contexts.groups.back(), item);
  }
  if (contexts.groups[0][0] != "{}") fail("the first template is \"" + contexts.groups[0][0] + "\"");
  return contexts;
}

ContextTemplates sample_contexts(const models::Model& model, const std::vector<std::vector<int64_t>>& length_params,
                                 ContextGrouping grouping, uint64_t seed, const Log& log) {
  ContextTemplates contexts{{{"{}"}}, true, seed};
  uint64_t call = 0;
  for (const auto& pair : length_params) {
    const int64_t words = kSeedWords.size();
    auto texts = sample_texts(model, pair.at(0), std::max<int64_t>(1, pair.at(1) / words), mix(seed, 1000 + call++));
    if (grouping == ContextGrouping::kPlainApart) {
      contexts.groups.push_back(std::move(texts));
    } else {
      contexts.groups[0].insert(contexts.groups[0].end(), texts.begin(), texts.end());
    }
  }
  log.event(LogLevel::kInfo, "contexts.sampled",
            "sampled " + std::to_string(contexts.size() - 1) + " context templates", contexts.to_json());
  return contexts;
}

}  // namespace emend::editors
