#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/solver.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/products.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace emend::editors {

namespace detail {
namespace {

// Packed indices of the tokens that count.
at::Tensor counted_tokens(const models::TokenBatch& batch) {
  std::vector<int64_t> tokens;
  for (int64_t r = 0; r < batch.rows(); ++r)
    for (int64_t k = 1; k < batch.length(r); ++k) tokens.push_back(batch.token(r, k));
  return at::tensor(tokens, at::kLong);
}

void add_to_half(const models::Model& model, const std::vector<const std::vector<int64_t>*>& rows,
                 const std::vector<int>& layers, const StatisticsOptions& options, devices::Collectives* group,
                 Sums& sums, const std::function<void(int64_t)>& seen) {
  const at::NoGradGuard no_grad;
  const bool skip = options.first_token == FirstToken::kSkip;
  auto order = rows;
  std::erase_if(order, [&](const auto* row) { return row->size() <= (skip ? 1U : 0U); });
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->size() > b->size(); });
  sums.documents += static_cast<int64_t>(order.size());

  at::Tensor counted;  // of the batch at hand; undefined: all
  const int last = *std::max_element(layers.begin(), layers.end());
  hooks::HookSession session(model.hooks());
  for (const int layer : std::set<int>(layers.begin(), layers.end())) {
    session.edit({hooks::Site::kMlpDownIn, layer}, [&sums, &counted, layer](const at::Tensor& x) {
      at::Tensor keys_NF = x;
      if (counted.defined())
        keys_NF = keys_NF.index_select(0, devices::route_like(counted, x, devices::Purpose::kInput));
      if (keys_NF.scalar_type() != at::kDouble) keys_NF = keys_NF.to(at::kFloat);
      at::Tensor& sum_FF = sums.sums_FF[layer];
      if (!sum_FF.defined()) sum_FF = at::zeros({x.size(1), x.size(1)}, x.options().dtype(at::kDouble));
      add_products(sum_FF, keys_NF);
      return at::Tensor();
    });
  }
  session.stop_after({hooks::Site::kMlpDownIn, last}).attach();
  bool fired = false;
  for (size_t begin = 0; begin < order.size();) {
    options.cancel.check("statistics");
    std::vector<std::vector<int64_t>> batch_rows;
    int64_t tokens = 0;
    while (begin < order.size() &&
           (batch_rows.empty() || tokens + static_cast<int64_t>(order[begin]->size()) <= options.batch_tokens)) {
      batch_rows.push_back(*order[begin]);
      tokens += static_cast<int64_t>(order[begin++]->size());
    }
    if (!group || sums.number++ % group->size() == group->rank()) {
      const auto batch = models::TokenBatch::from_rows(batch_rows);
      if (skip) counted = counted_tokens(batch);
      (void)model.forward(batch, {.logit_tokens = models::kNoTokens});
      fired = true;
      sums.count += tokens - (skip ? batch.rows() : 0);
    }
    seen(tokens);
  }
  fired ? session.finish() : session.detach();
}

}  // namespace

void add_products(const at::Tensor& sum_FF, const at::Tensor& keys_NF, const at::Tensor& weight_N, int64_t block) {
  const at::Tensor keys_FN = keys_NF.t().contiguous();
  const at::Tensor weighted_FN = weight_N.defined() ? keys_FN * weight_N.to(keys_FN.scalar_type()) : keys_FN;
  const int64_t width = keys_FN.size(0);
  for (int64_t begin = 0; begin < width; begin += block) {
    const at::Tensor columns = weighted_FN.narrow(0, begin, std::min(block, width - begin));
    const at::Tensor rows = keys_FN.narrow(0, begin, width - begin);
    sum_FF.narrow(0, begin, rows.size(0)).narrow(1, begin, columns.size(0)).add_(models::product(rows, columns));
  }
}

std::string name_of(FirstToken first) {
  return first == FirstToken::kCount ? "count" : "skip";
}

int64_t tokens_of(const std::vector<std::vector<int64_t>>& rows) {
  int64_t tokens = 0;
  for (const auto& row : rows) tokens += static_cast<int64_t>(row.size());
  return tokens;
}

void add_rows(const models::Model& model, const std::vector<std::vector<int64_t>>& rows, const std::vector<int>& layers,
              const StatisticsOptions& options, devices::Collectives* group, std::vector<Sums>& halves,
              const std::function<void(int64_t)>& seen) {
  for (size_t half = 0; half < halves.size(); ++half) {
    std::vector<const std::vector<int64_t>*> mine;
    for (size_t r = half; r < rows.size(); r += halves.size()) mine.push_back(&rows[r]);
    add_to_half(model, mine, layers, options, group, halves[half], seen);
  }
}

Sums total_of(const models::Model& model, const Sums& mine, const std::vector<int>& layers,
              devices::Collectives* group) {
  Sums total = mine;
  for (const int layer : layers) {
    at::Tensor& sum_FF = total.sums_FF[layer];
    const auto site = model.edit_site(layer);
    const at::Tensor weight = model.weight(site.weight_name);
    if (!sum_FF.defined())  // more processes than batches
      sum_FF =
          at::zeros({site.in_features, site.in_features}, weight.options().dtype(at::kDouble).requires_grad(false));
    if (group) {  // where they were made: between GPUs they need not pass through the host
      sum_FF = sum_FF.clone();
      group->all_reduce_sum(sum_FF);
    }
    const at::Tensor host_FF = devices::to_host(sum_FF, devices::Purpose::kStatistics);
    sum_FF = host_FF.tril() + host_FF.tril(-1).t();
  }
  if (!group) return total;
  at::Tensor counts = at::tensor({total.count}, at::kLong);
  group->all_reduce_sum(counts);
  total.count = counts.item<int64_t>();
  return total;
}

std::map<int, HalvesReport> compare(const std::vector<Sums>& totals) {
  std::map<int, HalvesReport> reports;
  if (totals[0].count == 0 || totals[1].count == 0) return reports;
  for (const auto& [layer, sum_FF] : totals[0].sums_FF)
    reports.emplace(layer, compare_halves(sum_FF / totals[0].count, totals[1].sums_FF.at(layer) / totals[1].count,
                                          totals[0].count + totals[1].count));
  return reports;
}

std::map<int, SecondMoment> moments_of(const std::vector<Sums>& totals, const StatisticsOptions& options,
                                       const std::function<void(int, nlohmann::json&)>& more) {
  int64_t count = 0, documents = 0;
  for (const auto& total : totals) count += total.count, documents += total.documents;
  if (count == 0) refuse({"statistics", "no tokens", "rows of tokens", "give another corpus"});
  std::map<int, SecondMoment> moments;
  for (const auto& [layer, first_FF] : totals[0].sums_FF) {
    at::Tensor sum_FF = first_FF;
    for (size_t half = 1; half < totals.size(); ++half) sum_FF = sum_FF + totals[half].sums_FF.at(layer);
    nlohmann::json origin = {{"tokens", count},
                             {"documents", documents},
                             {"first_token", name_of(options.first_token)},
                             {"max_length", options.max_length},
                             {"layer", layer}};
    if (more) more(layer, origin);
    moments.emplace(layer, SecondMoment((sum_FF / count).to(options.dtype), count, std::move(origin)));
  }
  return moments;
}
}  // namespace detail

nlohmann::json HalvesReport::to_json() const {
  const auto number = [](double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); };
  return {{"tokens", tokens},
          {"distance", number(distance)},
          {"disagreement", number(disagreement)},
          {"condition", condition > 0 ? number(condition) : nlohmann::json()}};
}

HalvesReport compare_halves(const at::Tensor& a_FF, const at::Tensor& b_FF, int64_t tokens) {
  const at::NoGradGuard no_grad;
  HalvesReport report;
  report.tokens = tokens;
  report.distance = (2 * (a_FF - b_FF).norm() / (a_FF + b_FF).norm()).item<double>();
  double traces = 0;
  for (const auto& [one_FF, other_FF] : {std::pair(a_FF, b_FF), std::pair(b_FF, a_FF)}) {
    const auto [lower_FF, info] = at::linalg_cholesky_ex(one_FF);
    if (info.item<int64_t>() != 0) {
      report.disagreement = std::numeric_limits<double>::infinity();
      return report;
    }
    traces += at::cholesky_solve(other_FF, lower_FF).diagonal().sum().item<double>();
    if (report.condition == 0) report.condition = SpdFactor::from_parts(lower_FF, 0).condition();
  }
  report.disagreement = traces / static_cast<double>(2 * a_FF.size(0)) - 1;
  return report;
}

}  // namespace emend::editors
