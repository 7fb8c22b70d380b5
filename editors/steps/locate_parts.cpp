#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/locate_parts.h>

#include <cmath>

namespace emend::editors::detail {

static double mean_column_norm(const at::Tensor& x_DN) {
  return x_DN.norm(2, 0).mean().item<double>();
}

// A target shared by n facts lies about √n times as far away as one of them asks, in n directions that have little to
// do with each other: it gets √n times the steps.
Grouped group_facts(const std::vector<const RenderedFact*>& facts, bool merge_equal_keys, int64_t steps) {
  Grouped grouped;
  std::map<std::vector<int64_t>, std::vector<size_t>> members;  // plain prompt up to the looked-up token -> facts
  std::map<std::vector<int64_t>, size_t> problem_of_key;
  const auto key_of = [](const RenderedFact& fact) {
    return std::vector<int64_t>(fact.rows[0].ids.begin(), fact.rows[0].ids.begin() + fact.rows[0].lookup + 1);
  };
  for (size_t i = 0; i < facts.size(); ++i) members[key_of(*facts[i])].push_back(i);
  for (size_t i = 0; i < facts.size(); ++i) {
    const auto& same = members[key_of(*facts[i])];
    if (!merge_equal_keys || same.size() == 1) {
      grouped.problem_of_fact.push_back(grouped.problems.size());
      grouped.problems.push_back(make_target_problem(*facts[i]));
      continue;
    }
    const auto [found, is_new] = problem_of_key.emplace(key_of(*facts[i]), grouped.problems.size());
    grouped.problem_of_fact.push_back(found->second);
    if (!is_new) continue;
    TargetProblem joint;
    joint.case_id = facts[i]->case_id;
    for (const size_t member : same) {
      TargetProblem one = make_target_problem(*facts[member]);
      for (auto& row : one.rows) {
        row.weight /= static_cast<double>(same.size());
        joint.rows.push_back(std::move(row));
      }
      if (member == same[0]) joint.kl_rows = std::move(one.kl_rows);  // the same subject
    }
    joint.more_steps = std::llround(static_cast<double>(steps) * (std::sqrt(static_cast<double>(same.size())) - 1));
    grouped.problems.push_back(std::move(joint));
  }
  return grouped;
}

double divisor(ResidualSpread spread, size_t index, size_t count) {
  const auto left = static_cast<double>(count - index);
  return spread == ResidualSpread::kEqual ? left : spread == ResidualSpread::kSqrt ? std::sqrt(left) : 1;
}

void trace_problem(const EditContext& context, const LayerProblem& problem, const std::vector<PromptRow>& rows,
                   const at::Tensor& keys_PF, const at::Tensor& current_ND, const at::Tensor& remaining_DN) {
  const std::string prefix = "layer." + std::to_string(problem.layer) + ".";
  const auto lookup = mapped(rows, &PromptRow::lookup);
  record(context, prefix + "keys_per_context", keys_PF);
  record(context, prefix + "key_lookup", at::tensor(lookup, at::kLong));
  record(context, prefix + "keys", problem.keys_FN);
  record(context, prefix + "cur_z", current_ND.t());
  record(context, prefix + "targets", remaining_DN);
  record(context, prefix + "resid", problem.residual_DN);
}

WeightDelta smaller_form(WeightDelta delta) {
  if (!delta.low_rank() ||
      delta.left_DR.numel() + delta.right_FR.numel() <= delta.left_DR.size(0) * delta.right_FR.size(0))
    return delta;
  delta.dense_DF = delta.matrix();
  delta.left_DR = delta.right_FR = at::Tensor();
  return delta;
}

std::vector<PromptRow> plain_rows(const std::vector<TargetProblem>& problems) {
  return mapped(problems, [](const TargetProblem& problem) {
    return PromptRow{{}, problem.rows[0].ids, problem.rows[0].lookup, {}};
  });
}

void anchor_targets(const std::vector<at::Tensor>& mlp, double& norm, std::vector<Target>& targets) {
  const auto good = [&](size_t i) { return targets[i].status != FactStatus::kFailed; };
  if (norm == 0) {
    std::vector<double> norms;
    for (size_t i = 0; i < targets.size(); ++i)
      if (good(i)) norms.push_back((mlp[i] + targets[i].delta_D[0]).norm().item<double>());
    norm = anchor_norm(norms);
  }
  for (size_t i = 0; i < targets.size(); ++i)
    if (good(i)) targets[i].target_D[0] = anchored_target(targets[i].initial_D[0], targets[i].delta_D[0], mlp[i], norm);
}

at::Tensor share_reached(const LayerProblem& problem, const WeightDelta& delta) {
  const at::Tensor asked_N = problem.residual_DN.norm(2, 0);
  if (!delta.low_rank()) return devices::to_host(at::ones_like(asked_N));
  const at::Tensor moved_RN = delta.right_FR.to(problem.dtype).t().matmul(problem.keys_FN);
  const at::Tensor share_N = delta.left_DR.to(problem.dtype).matmul(moved_RN).norm(2, 0) / asked_N;
  return devices::to_host(at::where(asked_N > 0, share_N, at::ones_like(share_N)), devices::Purpose::kHost)
      .to(at::kDouble);
}

LayerFigures figures_of(const LayerProblem& problem, const LayerUpdate& update, const ApplyReport& report,
                        const at::Tensor& remaining_DN, const Log& log) {
  LayerFigures figures = figures_of_write(problem.layer, problem.site.weight_name, report);
  figures.residual_norm = mean_column_norm(remaining_DN);
  figures.key_norm = mean_column_norm(problem.keys_FN);
  figures.solver = update.solve.method;
  figures.condition = update.solve.condition;
  figures.jitter = update.solve.jitter;
  log.event(LogLevel::kInfo, "insert.layer",
            formatted("layer %d: |residual| %.4g, |update| %.4g (%.3g of the weight), %s", figures.layer,
                      figures.residual_norm, figures.update_norm, figures.relative_update_norm,
                      figures.solver.empty() ? "no solve" : figures.solver.c_str()),
            to_json(figures));
  if (figures.jitter > 0)
    log.warning("insert.jitter", figures.weight + ": the second moment is nearly singular; " +
                                     std::to_string(figures.jitter) +
                                     " was added to its diagonal (more statistics tokens help)");
  return figures;
}

void warn_if_little(const std::map<size_t, double>& most_reached, const RenderedBatch& batch, EditResult& result,
                    const Log& log) {
  constexpr double kLittle = 0.2;
  const auto weight = result.hparams.find("mom2_update_weight");
  if (weight == result.hparams.end()) return;
  const std::string advice =
      "; lower mom2_update_weight (now " + weight->dump() + "), as the presets of small models do";
  size_t few = 0;
  double most = 0;
  for (const auto& [fact, reached] : most_reached) {
    most = std::max(most, reached);
    if (reached >= kLittle) continue;
    ++few;
    auto& outcome = result.outcomes[batch.places[fact]];
    if (outcome.status != FactStatus::kFailed)
      outcome.reason = formatted("no layer gets more than %.2g %% of the change it asks for", 100 * reached) + advice;
  }
  if (few == 0) return;
  const bool all = few == most_reached.size();
  log.event(LogLevel::kWarning, "insert.little",
            "the edit barely moves " +
                (all ? "anything" : std::to_string(few) + " of " + counted(most_reached.size(), "fact")) +
                ": no layer gets a fifth of the change that the targets ask for" + advice,
            {{"reached", most}, {"facts", few}});
}

}  // namespace emend::editors::detail
