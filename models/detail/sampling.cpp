#include <ATen/ATen.h>
#include <emend/core/splitmix64.h>
#include <emend/models/detail/sampling.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace emend::models::detail {
namespace {

// Ids from the largest logit down, of equal ones the smaller id first; put in order as far as they are asked for.
class Descending {
 public:
  Descending(const float* logits, int64_t n, int64_t first) : logits_(logits), n_(n) {
    // The first-th largest of the blocks' largest: that many logits at least are no smaller.
    constexpr int64_t kBlock = 64;
    const int64_t blocks = n / kBlock;
    if (first >= blocks) {
      sort_to(first);
      return;
    }
    const at::Tensor all = at::from_blob(const_cast<float*>(logits), {blocks, kBlock}, at::kFloat);
    const at::Tensor largest = all.amax(1), ranked = std::get<0>(largest.topk(first));
    const float* of_block = largest.const_data_ptr<float>();
    const float bound = ranked.const_data_ptr<float>()[first - 1];
    const auto take = [&](int64_t begin, int64_t end) {
      for (int64_t id = begin; id < end; ++id)
        if (logits[id] >= bound) order_.push_back(id);
    };
    for (int64_t b = 0; b < blocks; ++b)
      if (of_block[b] >= bound) take(b * kBlock, (b + 1) * kBlock);
    take(blocks * kBlock, n);
    sorted_ = std::ssize(order_);
    std::ranges::sort(order_, Before{logits_});
  }
  int64_t operator[](int64_t i) {
    if (i >= sorted_) sort_to(8 * i);
    return order_[static_cast<size_t>(i)];
  }

 private:
  struct Before {
    const float* logits;
    bool operator()(int64_t a, int64_t b) const { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); }
  };
  void sort_to(int64_t end) {
    if (std::ssize(order_) < n_) {
      order_.resize(static_cast<size_t>(n_));
      std::iota(order_.begin(), order_.end(), 0);
      sorted_ = 0;
    }
    end = std::min(end, n_);
    std::partial_sort(order_.begin() + sorted_, order_.begin() + end, order_.end(), Before{logits_});
    sorted_ = end;
  }

  const float* logits_;
  int64_t n_ = 0, sorted_ = 0;
  std::vector<int64_t> order_;
};

// Σ exp((logit − largest) / temperature).
double weight_of_all(const float* logits, int64_t n, double largest, double temperature) {
  const at::Tensor all = at::from_blob(const_cast<float*>(logits), {n}, at::kFloat);
  return all.to(at::kDouble).sub_(largest).div_(temperature).exp_().sum().item<double>();
}

}  // namespace

RowRandom::RowRandom(uint64_t seed, int64_t row) : engine_(splitmix64(splitmix64(seed) ^ static_cast<uint64_t>(row))) {}

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
  constexpr int64_t kFirst = 64;  // few draws need more of a whole vocabulary
  if (options.temperature == 0) return std::max_element(logits, logits + n) - logits;
  int64_t kept = options.top_k > 0 ? std::min(options.top_k, n) : n;
  Descending order(logits, n, kept < n ? kept : kFirst);
  const double largest = logits[order[0]];
  const auto weight = [&](int64_t i) { return std::exp((logits[order[i]] - largest) / options.temperature); };
  double total = 0;
  if (kept == n) total = weight_of_all(logits, n, largest, options.temperature);
  for (int64_t i = 0; kept < n && i < kept; ++i) total += weight(i);
  double sum = total;
  if (options.top_p < 1 || options.min_p > 0) {
    int64_t enough = 0;
    for (sum = 0; enough < kept && (options.top_p == 1 || sum < options.top_p * total); ++enough) {
      const double next = weight(enough);
      if (enough > 0 && next < options.min_p) break;  // weights are relative to the best token's, which is 1
      sum += next;
    }
    kept = std::max<int64_t>(1, enough);
  }
  double left = random.uniform() * sum;
  for (int64_t i = 0; i < kept; ++i) {
    left -= weight(i);
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace emend::models::detail
