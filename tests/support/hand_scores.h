// A metric family on scores that are made by hand.
#pragma once

#include <emend/core/mapped.h>
#include <emend/evaluation/metric.h>

#include <functional>
#include <string>

namespace emend::testing {

/// What the family says where each request has the score that `give` makes of it.
inline evaluation::MetricOutcome judged(const std::string& family, const datasets::FactSet& facts,
                                        const std::function<evaluation::Score(const evaluation::ScoreRequest&)>& give,
                                        const evaluation::EvaluateOptions& options = {}) {
  const evaluation::MetricContext context{facts, options};
  const auto metric = evaluation::make_metric(family);
  evaluation::ScoreSheet sheet;
  metric->plan(context, sheet);
  sheet.fill(mapped(sheet.requests(), give));
  return metric->finish(context);
}

}  // namespace emend::testing
