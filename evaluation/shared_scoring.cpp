// Scoring by several processes: each takes a share of the distinct prompts, everyone gets every score.
#include <emend/core/error.h>
#include <emend/evaluation/detail/scoring.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

namespace emend::evaluation::detail {
namespace {

using nlohmann::json;

// Requests of one prompt, which stay together because the engine computes a prompt once.
struct PromptGroup {
  std::vector<size_t> requests;
  int64_t cost = 0;
};

// In the order of first appearance: prompts of one fact stand together, and share their beginnings.
std::vector<PromptGroup> group_by_prompt(const std::vector<ScoreRequest>& requests) {
  std::vector<PromptGroup> groups;
  std::unordered_map<std::string_view, size_t> group_of;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto [at, is_new] = group_of.emplace(requests[i].prompt, groups.size());
    if (is_new) groups.push_back({{}, static_cast<int64_t>(requests[i].prompt.size())});
    groups[at->second].requests.push_back(i);
    groups[at->second].cost += static_cast<int64_t>(requests[i].target.size());
  }
  return groups;
}

// One share: scores in the order of its requests, and what computing them took.
struct Share {
  std::vector<Score> scores;
  ScoreCounts counts;
};

std::string encode(const Share& share) {
  json scores = json::array();
  for (const auto& score : share.scores) scores.push_back({score.labels, score.predicted, score.log_probs});
  const auto& c = share.counts;
  const auto bytes =
      json::to_msgpack({scores, {c.requests, c.unique_prompts, c.tokens_given, c.tokens_run, c.rows_projected}});
  return {bytes.begin(), bytes.end()};
}

Share decode(std::string_view bytes) {
  try {
    const json document = json::from_msgpack(bytes.begin(), bytes.end());
    Share share;
    for (const auto& score : document.at(0))
      share.scores.push_back({score.at(0).get<std::vector<int64_t>>(), score.at(1).get<std::vector<int64_t>>(),
                              score.at(2).get<std::vector<double>>()});
    const auto& c = document.at(1);
    share.counts = {c.at(0), c.at(1), c.at(2), c.at(3), c.at(4)};
    return share;
  } catch (const json::exception& error) {
    throw Error(ErrorClass::kCorruption, {"scores of another process", error.what(), "scores",
                                          "run the same version of emend in every process"});
  }
}

}  // namespace

std::vector<Score> share_scores(const models::Model& model, const std::vector<ScoreRequest>& requests,
                                const ScoreOptions& options, ScoreCounts* counts) {
  const auto groups = group_by_prompt(requests);
  std::vector<int64_t> costs;
  for (const auto& group : groups) costs.push_back(group.cost);
  const auto numbers_of = [&](devices::ItemRange range) {
    std::vector<size_t> numbers;
    for (size_t g = range.begin; g < range.end; ++g)
      numbers.insert(numbers.end(), groups[g].requests.begin(), groups[g].requests.end());
    return numbers;
  };
  const int processes = options.sharing.processes();
  const auto shares = options.sharing.exchange([&] {
    ScoreOptions alone = options;
    alone.sharing = {};
    std::vector<ScoreRequest> mine;
    for (const size_t i : numbers_of(devices::share_of(costs, processes, options.sharing.rank())))
      mine.push_back(requests[i]);
    Share share;
    if (!mine.empty()) share.scores = score_requests(model, mine, alone, &share.counts);
    return encode(share);
  });
  std::vector<Score> scores(requests.size());
  if (counts) *counts = {};
  for (int r = 0; r < processes; ++r) {
    Share share = decode(shares[static_cast<size_t>(r)]);
    const auto numbers = numbers_of(devices::share_of(costs, processes, r));
    EMEND_CHECK(numbers.size() == share.scores.size(), "one score a request");
    for (size_t i = 0; i < numbers.size(); ++i) scores[numbers[i]] = std::move(share.scores[i]);
    if (counts) *counts += share.counts;
  }
  return scores;
}

}  // namespace emend::evaluation::detail
