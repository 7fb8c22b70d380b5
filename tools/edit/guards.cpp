#include "guards.h"

#include <emend/core/error.h>
#include <emend/datasets/lint.h>

#include <algorithm>

namespace emend::tools {
namespace {

constexpr size_t kShown = 10;    // findings printed one by one
constexpr size_t kAsked = 1000;  // facts that the model is asked about: each costs a forward pass

// A target that the model gives already needs no edit, and an edit towards it measures nothing. Of long lists the first
// kAsked facts are looked at.
std::vector<datasets::Finding> already_known(const datasets::FactSet& facts, const models::Model& model,
                                             const Common& common) {
  std::vector<datasets::Finding> findings;
  if (facts.facts.empty()) return findings;
  const size_t asked = std::min(facts.facts.size(), kAsked);
  evaluation::ScoreOptions options;
  options.sharing = common.sharing;
  const auto efficacy = evaluation::evaluate_efficacy(
      model, {facts.facts.begin(), facts.facts.begin() + static_cast<std::ptrdiff_t>(asked)}, options);
  for (size_t i = 0; i < efficacy.size(); ++i) {
    if (!efficacy[i].accurate) continue;
    datasets::Finding finding;
    finding.severity = datasets::Severity::kNote;
    finding.check = "already-known";
    finding.fact = i;
    finding.where = facts.facts[i].where();
    finding.text = "the model already answers \"" + facts.facts[i].target_new + "\"; leave the fact out";
    finding.remove = true;
    findings.push_back(std::move(finding));
  }
  return findings;
}

void log_findings(const std::vector<datasets::Finding>& findings, const Common& common) {
  size_t shown = 0, more = 0;
  for (const auto& finding : findings) {
    if (finding.severity == datasets::Severity::kNote) continue;
    if (shown++ < kShown) {
      common.log.warning("facts.lint", finding.where + ": " + finding.text + " [" + finding.check + "]");
    } else {
      ++more;
    }
  }
  if (more > 0)
    common.log.warning("facts.lint", std::to_string(more) + " more remarks about the facts; emend lint lists them all");
}

}  // namespace

datasets::FactSet check_request(datasets::FactSet facts, const models::Model& model, const EditOptions& options,
                                const Common& common, nlohmann::json& findings) {
  const auto found =
      datasets::lint_facts(facts, {[&](const datasets::FactSet& set) { return already_known(set, model, common); }});
  findings = nlohmann::json::array();
  size_t errors = 0;
  for (const auto& finding : found) {
    findings.push_back({{"severity", datasets::to_string(finding.severity)},
                        {"check", finding.check},
                        {"where", finding.where},
                        {"text", finding.text}});
    errors += finding.severity == datasets::Severity::kError && !(options.fix && finding.fixable());
  }
  log_findings(found, common);
  if (options.strict && errors > 0)
    throw Error(ErrorClass::kCorruption,
                {options.facts.file, std::to_string(errors) + " facts that cannot be edited as they are",
                 "facts without errors (--strict)", "see the warnings above; --fix repairs what has a clear remedy"});
  if (!options.fix) return facts;
  size_t applied = 0;
  auto fixed = datasets::fix_facts(std::move(facts), found, &applied);
  if (applied > 0)
    common.log.info("facts.fix", "applied " + std::to_string(applied) + " fixes; " +
                                     std::to_string(fixed.facts.size()) + " facts are left");
  if (fixed.facts.empty())
    throw Error(ErrorClass::kCorruption, {options.facts.file, "no fact is left after --fix", "at least one", ""});
  return fixed;
}

OnCollapse parse_on_collapse(const std::string& text) {
  if (text == "warn") return OnCollapse::kWarn;
  if (text == "skip") return OnCollapse::kSkip;
  if (text == "stop") return OnCollapse::kStop;
  if (text == "revert") return OnCollapse::kRevert;
  throw Error(ErrorClass::kInvalidArgument, {"--on-collapse", "\"" + text + "\"", "warn, skip, stop or revert", ""});
}

std::vector<editors::FactOutcome> failed_outcomes(std::span<const datasets::Fact> facts, const std::string& reason) {
  std::vector<editors::FactOutcome> outcomes;
  for (const auto& fact : facts) {
    editors::FactOutcome outcome;
    outcome.case_id = fact.case_id;
    outcome.status = editors::FactStatus::kFailed;
    outcome.reason = reason;
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

evaluation::GuardReading read_guard(const evaluation::CollapseGuard& guard, const models::Model& model,
                                    const editors::EditResult& batch) {
  double update = 0, condition = 0;
  for (const auto& layer : batch.layers) {
    update = std::max(update, layer.relative_update_norm);
    condition = std::max(condition, layer.condition);
  }
  return guard.read(model, update, condition);
}

}  // namespace emend::tools
