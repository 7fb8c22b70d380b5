// Two runs side by side: paired differences over the cases that both hold.
#include <emend/core/text.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/report.h>
#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

namespace emend::evaluation {
namespace {

using nlohmann::json;

struct Pairs {
  std::vector<double> first, second;
};

std::string run_name(const RunReport& run) {
  const std::string folder = detail::text(run.extras, "directory");
  return folder.empty() ? detail::text(run.results, "editor", "run") : folder;
}

/// Cases by id; ids that occur twice in a run cannot be paired.
std::map<std::string, const json*> by_id(const RunReport& run, int64_t& ambiguous) {
  std::map<std::string, const json*> cases;
  std::set<std::string> twice;
  for (const auto& line : run.cases) {
    const std::string id = detail::text(line, "case_id");
    if (!cases.emplace(id, &line).second) twice.insert(id);
  }
  for (const auto& id : twice) cases.erase(id);
  ambiguous += std::ssize(twice);
  return cases;
}

json row_of(const std::string& family, const MetricField& field, double first, double second, double difference,
            const std::optional<Interval>& range, size_t n) {
  return {{"family", family},
          {"metric", field.key},
          {"paper_name", field.paper_name},
          {"unit", field.unit},
          {"first", first},
          {"second", second},
          {"difference", difference},
          {"ci95", range ? json{range->first, range->second} : json()},
          {"n", n},
          {"significant", range && (range->first > 0 || range->second < 0)}};
}

/// Of yes and no: how many of the cases that changed did so one way, by the binomial distribution; 0 is in it as long
/// as chance does that in more than 5 % (McNemar's exact test). Absent for other figures, or where no case changed.
std::optional<Interval> mcnemar_interval(const MetricField& field, const std::vector<double>& differences) {
  int64_t up = 0, down = 0;
  for (const double difference : differences) {
    if (!field.share() || (difference != 0 && std::abs(difference) != 1)) return std::nullopt;
    up += difference > 0 ? 1 : 0;
    down += difference < 0 ? 1 : 0;
  }
  if (up + down == 0) return std::nullopt;
  const double changed = static_cast<double>(up + down) / static_cast<double>(differences.size());
  const auto [least, most] = exact_share_interval(up, up + down);
  return Interval{(2 * least - 1) * changed, (2 * most - 1) * changed};
}

json difference_row(const std::string& family, const MetricField& field, const Pairs& pairs, double scale) {
  std::vector<double> differences;
  double first = 0, second = 0;
  for (size_t i = 0; i < pairs.first.size(); ++i) {
    differences.push_back(pairs.second[i] - pairs.first[i]);
    first += pairs.first[i];
    second += pairs.second[i];
  }
  const auto n = static_cast<double>(differences.size());
  const auto mean = mean_of(differences);
  auto range = mean_interval(*mean);
  if (const auto exact = mcnemar_interval(field, differences))
    range = range ? Interval{std::min(range->first, exact->first), std::max(range->second, exact->second)} : *exact;
  // Shares that all differ alike still leave open how many of further cases would (at least q: Clopper and Pearson),
  // and the others may differ by as much as shares can, either way.
  if (!range && field.share() && mean->value != 0) {
    const double q = exact_share_interval(mean->n, mean->n).first;
    range = Interval{q * mean->value - (1 - q), q * mean->value + (1 - q)};
  }
  const auto [least, most] = field.limits();
  if (range) range = {scale * std::max(range->first, least - most), scale * std::min(range->second, most - least)};
  return row_of(family, field, scale * first / n, scale * second / n, scale * mean->value, range, differences.size());
}

/// The harmonic score has no value for one case: cases are left out in turn (the jackknife), in both runs alike, and
/// what remains of the difference shows how it spreads.
json score_row(const std::string& family, const MetricField& field, const std::vector<Pairs>& parts) {
  const auto n = static_cast<double>(parts[0].first.size());
  const auto sum = [](const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); };
  std::vector<std::pair<double, double>> sums;
  for (const auto& part : parts) sums.emplace_back(sum(part.first), sum(part.second));
  // Of all cases, or of all but one.
  const auto scores = [&](std::optional<size_t> without = {}) {
    std::vector<double> first, second;
    for (size_t p = 0; p < parts.size(); ++p) {
      const double count = without ? n - 1 : n;
      first.push_back(100 * (sums[p].first - (without ? parts[p].first[*without] : 0)) / count);
      second.push_back(100 * (sums[p].second - (without ? parts[p].second[*without] : 0)) / count);
    }
    return std::pair(*harmonic_mean(first), *harmonic_mean(second));
  };
  const auto [first, second] = scores();
  std::vector<double> pseudo_values;
  for (size_t i = 0; n > 1 && i < parts[0].first.size(); ++i) {
    const auto [first_without, second_without] = scores(i);
    pseudo_values.push_back(n * (second - first) - (n - 1) * (second_without - first_without));
  }
  std::optional<Interval> range;
  if (const auto mean = mean_of(pseudo_values)) range = mean_interval(*mean);  // none: equal cases do not show a spread
  if (range) {
    const double half = (range->second - range->first) / 2;
    range = {std::max(second - first - half, -100.0), std::min(second - first + half, 100.0)};
  }
  return row_of(family, field, first, second, second - first, range, parts[0].first.size());
}

using Cases = std::vector<std::pair<const json*, const json*>>;

/// The cases of which both runs know all of the columns' values; one element a column.
std::vector<Pairs> paired(const MetricInfo& info, const std::vector<std::string>& columns, const Cases& cases) {
  std::vector<CaseFigure> figures;
  for (const auto& key : columns) figures.push_back(info.field(key)->of_case);
  std::vector<Pairs> parts(columns.size());
  for (const auto& [a, b] : cases) {
    const json &first = case_metrics(*a, "post", info.name), &second = case_metrics(*b, "post", info.name);
    std::vector<std::pair<std::optional<double>, std::optional<double>>> both;
    for (const auto& figure : figures) both.emplace_back(figure(first), figure(second));
    if (!std::ranges::all_of(both, [](const auto& pair) { return pair.first && pair.second; })) continue;
    for (size_t part = 0; part < parts.size(); ++part) {
      parts[part].first.push_back(*both[part].first);
      parts[part].second.push_back(*both[part].second);
    }
  }
  return parts;
}

void compare_family(const MetricInfo& info, const Cases& cases, json& rows) {
  for (const auto& field : info.fields) {
    if (field.of_groups || (!field.of_case && field.harmonic_of.empty())) continue;
    const bool own = field.harmonic_of.empty();
    const auto parts = paired(info, own ? std::vector{field.key} : field.harmonic_of, cases);
    if (parts[0].first.empty()) continue;
    rows.push_back(own ? difference_row(info.name, field, parts[0], field.scale) : score_row(info.name, field, parts));
  }
}

/// The figures of a family that compare_family has no rows for, by the reason.
std::map<std::string, std::vector<std::string>> left_out(const MetricInfo& info, const RunReport& first,
                                                         const RunReport& second) {
  std::map<std::string, std::vector<std::string>> figures;
  const auto add = [&](const std::string& why, const std::string& key) {
    const auto there = [&](const RunReport& run) {
      const json& value = detail::member(run.results, {"metrics", info.name, "post", key});
      return value.is_number() || (value.is_object() && !value.empty());
    };
    if (there(first) || there(second)) figures[why].push_back(key);
  };
  for (const auto& field : info.fields)
    if (field.of_groups || (!field.of_case && field.harmonic_of.empty()))
      add(field.of_groups ? "of groups of cases" : "of no single case", field.key);
  for (const auto& name : info.keyed) add("under the facts' own keys", name);
  return figures;
}

}  // namespace

json compare_runs(const RunReport& first, const RunReport& second) {
  int64_t ambiguous = 0;
  const auto left = by_id(first, ambiguous), right = by_id(second, ambiguous);
  Cases cases;
  int64_t different = 0;
  for (const auto& [id, line] : left) {
    const auto found = right.find(id);
    if (found == right.end()) continue;
    for (const char* key : {"prompt", "subject", "target"})
      if (detail::member(*line, {key}) != detail::member(*found->second, {key})) {
        ++different;
        break;
      }
    cases.emplace_back(line, found->second);
  }
  json out = {{"first", run_name(first)},
              {"second", run_name(second)},
              {"paired_cases", cases.size()},
              {"same_facts", different == 0 && cases.size() == left.size() && cases.size() == right.size()},
              {"differences", json::array()},
              {"notes", json::array()}};
  for (const auto& info : metric_families()) compare_family(info, cases, out["differences"]);
  const auto note = [&](const std::string& text) { out["notes"].push_back(text); };
  if (cases.empty()) note("the runs have no case in common");
  if (left.size() > cases.size() || right.size() > cases.size())
    note("left out as they are in one run only: " + std::to_string(left.size() - cases.size()) + " and " +
         std::to_string(right.size() - cases.size()) + " cases");
  std::vector<std::string> in_one;
  for (const auto& info : metric_families()) {
    const auto measured = [&](const RunReport& run) {
      return !detail::member(run.results, {"metrics", info.name}).is_null();
    };
    if (measured(first) != measured(second)) in_one.push_back(info.name);
    if (!measured(first) || !measured(second)) continue;
    for (const auto& [why, figures] : left_out(info, first, second))
      note("not compared, as they are " + why + ": " + join(figures) + " (" + info.name + ", in results.json)");
  }
  if (!in_one.empty()) note("not compared, as they were measured in one run only: " + join(in_one));
  if (different > 0)
    note(std::to_string(different) + (different == 1 ? " case has" : " cases have") +
         " the same id but another prompt, subject or target");
  if (ambiguous > 0) note(std::to_string(ambiguous) + " case ids occur twice in a run and are left out");
  for (const char* key : {"path", "fingerprint"})
    if (detail::member(first.results, {"model", key}) != detail::member(second.results, {"model", key})) {
      note(std::string("the models differ in ") + key);
      break;
    }
  if (detail::member(first.results, {"dtype"}) != detail::member(second.results, {"dtype"}))
    note("the runs have different dtypes");
  return out;
}

std::string format_comparison(const json& comparison) {
  TextTable table({"family", "metric", "first", "second", "difference", "95 % interval", "n", ""}, 2);
  const json& rows = detail::member(comparison, {"differences"});
  if (rows.is_array())
    for (const auto& row : rows) {
      const MetricField* field = nullptr;  // a saved comparison may have figures of another build
      for (const auto& info : metric_families())
        if (info.name == detail::text(row, "family")) field = info.field(detail::text(row, "metric"));
      const int digits = field ? field->digits() : 1;
      const json& range = detail::member(row, {"ci95"});
      const auto difference = detail::number(row, "difference");
      table.add({detail::text(row, "family"), detail::text(row, "metric"),
                 detail::fixed(detail::number(row, "first"), digits),
                 detail::fixed(detail::number(row, "second"), digits),
                 (difference.value_or(0) > 0 ? "+" : "") + detail::fixed(difference, digits),
                 range.is_array() ? detail::fixed(detail::as_number(range[0]), digits) + " … " +
                                        detail::fixed(detail::as_number(range[1]), digits)
                                  : "–",
                 detail::text(row, "n"), detail::member(row, {"significant"}) == json(true) ? "*" : ""});
    }
  std::string out = "first:  " + detail::text(comparison, "first") + "\nsecond: " + detail::text(comparison, "second") +
                    "\npaired cases: " + detail::text(comparison, "paired_cases") + "\n";
  if (const json& notes = detail::member(comparison, {"notes"}); notes.is_array())
    for (const auto& note : notes) out += "note: " + detail::as_text(note) + '\n';
  return out + "\n" + table.text("") + "\n* the interval does not contain 0\n";
}

}  // namespace emend::evaluation
