#include <emend/editors/detail/target_budget.h>
#include <emend/models/config.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace emend::editors::detail {
namespace {

constexpr int64_t kUsual = int64_t{512} << 20;  // on a CPU that has it, and where free memory cannot be told
constexpr int64_t kTokensOnCpu = 256;
constexpr int64_t kFloat = 4;
// Newcomers make their first step by themselves, so they come in groups of this share of the room at least.
constexpr double kRefillShare = 0.25;

int64_t element(const models::Model& model) {
  return static_cast<int64_t>(c10::elementSize(model.dtype()));
}

// What autograd keeps of a token: about eight tensors of the hidden width and four of the MLP's a layer.
int64_t token_bytes(const models::Model& upper, int first_layer) {
  const int64_t width = 8 * upper.hidden_size() + 4 * upper.config().mlp_width;
  return width * std::max(1, upper.n_layers() - first_layer) * element(upper);
}

int64_t longest_suffix(const TargetProblem& problem) {
  int64_t longest = 1;
  for (const auto& row : problem.rows) longest = std::max(longest, static_cast<int64_t>(row.ids.size()) - row.lookup);
  return longest;
}

}  // namespace

int64_t problem_bytes(const models::Model& upper, const TargetProblem& problem, int first_layer) {
  const auto kl_rows = static_cast<int64_t>(problem.kl_rows.size());
  int64_t suffix = kl_rows, prefix = 0;
  for (const auto& row : problem.rows) {
    suffix += static_cast<int64_t>(row.ids.size()) - row.lookup;
    prefix += row.lookup;
  }
  for (const auto& row : problem.kl_rows) prefix += row.lookup;
  const auto& config = upper.config();
  const int64_t key_bytes = 2 * config.n_kv_heads * config.head_dim * std::max(0, upper.n_layers() - first_layer);
  return suffix * token_bytes(upper, first_layer) + prefix * key_bytes * element(upper) +
         kl_rows * upper.vocab_size() * kFloat;
}

int64_t tightest_room(std::span<const devices::DeviceInfo> machine, std::span<const at::Device> layers,
                      int64_t most_on_cpu) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& info : machine) {
    const auto own = std::count(layers.begin(), layers.end(), info.device);
    if (own == 0) continue;
    const int64_t room = info.total_bytes == 0 ? kUsual : info.free_bytes / (info.device.is_cpu() ? 4 : 3);
    least = std::min(least, room / own * static_cast<int64_t>(layers.size()));
    if (info.device.is_cpu()) least = std::min(least, std::max(kUsual, most_on_cpu));
  }
  return least == std::numeric_limits<int64_t>::max() ? kUsual : least;
}

int64_t active_bytes(const models::Model& upper, int first_layer) {
  const std::span layers = upper.placement().layers;
  return tightest_room(devices::visible_devices(),
                       layers.subspan(static_cast<size_t>(std::min(first_layer, upper.n_layers() - 1))),
                       kTokensOnCpu * token_bytes(upper, first_layer));
}

int lanes_for(size_t gpus, size_t facts) {
  constexpr size_t kMany = 512;
  return gpus == 1 && facts >= kMany ? 2 : static_cast<int>(std::max<size_t>(1, gpus));
}

TargetQueue::TargetQueue(const models::Model& upper, std::span<const TargetProblem> problems, int first_layer,
                         int64_t most_facts, int lanes)
    : order_(problems.size()),
      most_facts_(most_facts > 0 ? most_facts : static_cast<int64_t>(problems.size())),
      most_bytes_(most_facts > 0 ? std::numeric_limits<int64_t>::max() : active_bytes(upper, first_layer)) {
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(),
                   [&](size_t a, size_t b) { return longest_suffix(problems[a]) > longest_suffix(problems[b]); });
  for (const auto& problem : problems) bytes_.push_back(problem_bytes(upper, problem, first_layer));
  most_facts_ = std::max<int64_t>(1, (most_facts_ + lanes - 1) / lanes);
  most_bytes_ /= lanes;
}

std::vector<size_t> TargetQueue::take(const std::vector<size_t>& active) {
  int64_t bytes = 0;
  for (const size_t problem : active) bytes += bytes_[problem];
  const int64_t bytes_before = bytes;
  std::vector<size_t> taken;
  size_t end = next_;
  for (; end < order_.size(); ++end) {
    const int64_t more = bytes_[order_[end]];
    const auto count = static_cast<int64_t>(active.size() + taken.size());
    if (count > 0 && (count >= most_facts_ || bytes > most_bytes_ - more)) break;
    taken.push_back(order_[end]);
    bytes += more;
  }
  const bool last = end == order_.size();
  const auto share = [](auto part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); };
  const bool few =
      share(taken.size(), most_facts_) < kRefillShare && share(bytes - bytes_before, most_bytes_) < kRefillShare;
  if (!active.empty() && !last && few) return {};
  next_ = end;
  return taken;
}

}  // namespace emend::editors::detail
