#include <emend/models/detail/sampling.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace emend::models::detail {

// splitmix64: spreads neighbouring seeds and row numbers over the whole range.
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

RowRandom::RowRandom(uint64_t seed, int64_t row) : engine_(mix(mix(seed) ^ static_cast<uint64_t>(row))) {}

double RowRandom::uniform() {
  return static_cast<double>(engine_() >> 11) * 0x1.0p-53;
}

void penalise_repetition(float* logits, int64_t n, const std::vector<int64_t>& text, double penalty) {
  if (penalty == 1.0) return;
  for (const int64_t id : std::set<int64_t>(text.begin(), text.end())) {
    if (id < 0 || id >= n) continue;
    logits[id] = static_cast<float>(logits[id] < 0 ? logits[id] * penalty : logits[id] / penalty);
  }
}

int64_t choose_token(const float* logits, int64_t n, const GenerateOptions& options, RowRandom& random) {
  if (options.temperature == 0) return std::max_element(logits, logits + n) - logits;
  const auto better = [logits](int64_t a, int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  int64_t kept = options.top_k > 0 ? std::min(options.top_k, n) : n;
  std::vector<int64_t> order(kept);
  std::iota(order.begin(), order.end(), 0);
  std::make_heap(order.begin(), order.end(), better);  // the worst of the best in front
  for (int64_t i = kept; i < n; ++i) {
    if (!better(i, order.front())) continue;
    std::pop_heap(order.begin(), order.end(), better);
    order.back() = i;
    std::push_heap(order.begin(), order.end(), better);
  }
  std::sort_heap(order.begin(), order.end(), better);

  const double largest = logits[order[0]];
  std::vector<double> weight(kept);
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) total += weight[i] = std::exp((logits[order[i]] - largest) / options.temperature);
  if (options.top_p < 1) {
    double sum = 0;
    int64_t enough = 0;
    while (enough < kept && sum < options.top_p * total) sum += weight[enough++];
    kept = std::max<int64_t>(1, enough);
  }
  while (kept > 1 && weight[kept - 1] < options.min_p) --kept;  // weights are relative to the best token's, which is 1
  const double sum = std::accumulate(weight.begin(), weight.begin() + kept, 0.0);
  double left = random.uniform() * sum;
  for (int64_t i = 0; i < kept; ++i) {
    left -= weight[i];
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace emend::models::detail
