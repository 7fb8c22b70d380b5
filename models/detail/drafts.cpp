#include <emend/models/detail/drafts.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace emend::models::detail {
namespace {

constexpr int64_t kLongest = 8;  // tokens of agreement that are told apart

// Tokens before draft[place] that agree with the end of the text.
int64_t agreement(const std::vector<int64_t>& draft, size_t place, std::span<const int64_t> written) {
  int64_t n = 0;
  while (n < kLongest && static_cast<size_t>(n) < std::min(place, written.size()) &&
         draft[place - 1 - static_cast<size_t>(n)] == written[written.size() - 1 - static_cast<size_t>(n)])
    ++n;
  return n;
}

bool begins_with(const std::vector<int64_t>& draft, std::span<const int64_t> written) {
  return draft.size() >= written.size() && std::equal(written.begin(), written.end(), draft.begin());
}

// Time of a pass over so many tokens, that of one token being 1. Between the points of the table it is linear.
double pass_time(int64_t tokens, bool on_host) {
  if (!on_host) return 1 + static_cast<double>(tokens) / 256;
  static constexpr std::array<std::pair<double, double>, 9> kTimes = {
      {{1, 1}, {2, 1.25}, {4, 1.9}, {8, 2.55}, {15, 3.6}, {16, 2.4}, {32, 3.2}, {64, 4.6}, {512, 24.8}}};
  const auto n = static_cast<double>(tokens);
  size_t upper = 1;
  while (upper + 1 < kTimes.size() && kTimes[upper].first < n) ++upper;
  const auto [x0, y0] = kTimes[upper - 1];
  const auto [x1, y1] = kTimes[upper];
  return y0 + (y1 - y0) * (n - x0) / (x1 - x0);
}

}  // namespace

Guess guess_next(const std::vector<std::vector<int64_t>>& drafts, std::span<const int64_t> written, int64_t most,
                 const Record& record) {
  int64_t best = -1;
  const std::vector<int64_t>* from = nullptr;
  size_t at = 0;
  const auto offer = [&](const std::vector<int64_t>& draft, size_t place, int64_t agreed) {
    if (agreed <= best || place >= draft.size()) return;
    best = agreed, from = &draft, at = place;
  };
  for (const auto& draft : drafts)
    if (begins_with(draft, written)) offer(draft, written.size(), kLongest + 1);
  if (!from && !written.empty())
    for (const auto& draft : drafts)
      for (size_t place = 1; place < draft.size(); ++place)
        if (const int64_t agreed = agreement(draft, place, written); agreed > 0) offer(draft, place, agreed);
  Guess guess;
  if (!from || most <= 0) return guess;
  const auto n = std::min(static_cast<size_t>(most), from->size() - at);
  const auto begin = from->begin() + static_cast<std::ptrdiff_t>(at);
  guess.tokens.assign(begin, begin + static_cast<std::ptrdiff_t>(n));
  const bool whole = best > kLongest;
  const auto agreed = static_cast<double>(whole ? record.trust + std::ssize(written) : best);
  guess.chance = agreed / (agreed + 1 + static_cast<double>(whole ? 0 : record.wrong));
  return guess;
}

std::vector<int64_t> worth_checking(const std::vector<Guess>& guesses, int64_t anyway, int64_t limit, bool on_host) {
  std::vector<std::pair<double, size_t>> tokens;  // how likely, of which row
  for (size_t r = 0; r < guesses.size(); ++r)
    for (size_t k = 1; k <= guesses[r].tokens.size(); ++k)
      tokens.emplace_back(std::pow(guesses[r].chance, static_cast<double>(k)), r);
  std::ranges::stable_sort(tokens, [](const auto& a, const auto& b) { return a.first > b.first; });
  const auto rows = std::ssize(guesses);
  double won = static_cast<double>(rows), best = won / pass_time(anyway, on_host);
  size_t taken = 0;
  for (size_t n = 1; n <= tokens.size() && rows + static_cast<int64_t>(n) <= limit; ++n) {
    won += tokens[n - 1].first;
    const double rate = won / pass_time(anyway + static_cast<int64_t>(n), on_host);
    if (rate <= best) continue;
    best = rate;
    taken = n;
  }
  std::vector<int64_t> counts(guesses.size(), 0);
  for (size_t n = 0; n < taken; ++n) ++counts[tokens[n].second];
  return counts;
}

}  // namespace emend::models::detail
