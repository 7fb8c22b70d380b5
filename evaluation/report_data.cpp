// What the report page shows, as one JSON document: long lists and texts are cut here, templates/page.html draws.
#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/report.h>
#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace emend::evaluation {
namespace {

using detail::member, detail::number, detail::shorten, detail::text;
using nlohmann::json;

constexpr size_t kCardsMost = 60, kRowsMost = 1500, kCurvesMost = 1000, kHeatRows = 40, kHeatColumns = 160;

const json& list_of(const json& value) {
  static const json none = json::array();
  return value.is_array() ? value : none;
}

json or_null(const std::optional<double>& value) {
  return value ? json(*value) : json();
}

/// Four digits are more than a curve shows.
json rounded(const std::vector<double>& values) {
  json out = json::array();
  for (const double value : values)
    out.push_back(std::isfinite(value) ? json(std::strtod(formatted("%.4g", value).c_str(), nullptr)) : json());
  return out;
}

/// A case with the verdict on it; an empty reason: it worked out.
struct CaseState {
  const json* line;
  CaseVerdict before, after;
  std::string status, reason;
};

std::string full_prompt(const json& line) {
  std::string prompt = text(line, "prompt");
  if (const size_t slot = prompt.find("{}"); slot != std::string::npos) prompt.replace(slot, 2, text(line, "subject"));
  return prompt;
}

std::string target_of(const json& line) {
  for (const char* key : {"target", "target_new"}) {
    const json& value = member(line, {key});
    if (value.is_string()) return value.get<std::string>();
    if (value.is_object()) return text(value, "str");
  }
  return "";
}

/// Why a case did not work out. An edit that stopped at the norm limit or at the last step is written all the same; the
/// metrics judge it.
std::string reason_of(const json& line, const std::string& status, const CaseVerdict& after) {
  static const std::array good = {"",       "ok",        "applied", "done",     "success",
                                  "edited", "converged", "clamped", "max_steps"};
  if (std::find(good.begin(), good.end(), status) == good.end()) {
    for (const char* key : {"reason", "error", "message"})
      if (const std::string said = text(line, key); !said.empty()) return status + ": " + said;
    return status;
  }
  return after.success.value_or(true) ? "" : "applied, but " + after.reason;
}

/// Those that did not work out first, otherwise in order.
std::vector<CaseState> case_states(const RunReport& run) {
  std::vector<CaseState> states;
  for (const auto& line : run.cases) {
    const std::string status = text(line, "status");
    auto after = judge_case(line, "post");
    const std::string reason = reason_of(line, status, after);
    states.push_back({&line, judge_case(line, "pre"), std::move(after), status.empty() ? "applied" : status, reason});
  }
  std::stable_partition(states.begin(), states.end(), [](const CaseState& state) { return !state.reason.empty(); });
  return states;
}

json more_texts(const json& line) {
  json list = json::array();
  for (const auto& one : further_texts(case_metrics(line, "pre", "free"), case_metrics(line, "post", "free")))
    list.push_back({{"label", one.label},
                    {"prompt", shorten(one.prompt, 160)},
                    {"before", shorten(one.before, 120)},
                    {"after", shorten(one.after, 120)}});
  return list;
}

json card(const CaseState& state, const json& words) {
  const json& line = *state.line;
  const auto or_else = [&](const char* key, const std::optional<double>& p) {
    const auto given = number(words, key);
    return or_null(given ? given : p);
  };
  const std::string target = target_of(line);
  json out = {{"prompt", shorten(text(words, "prompt", full_prompt(line)), 240)},
              {"target", shorten(target.empty() ? text(words, "target") : target, 120)},
              {"reason", shorten(state.reason, 300)},
              {"p_before", or_else("probability_before", state.before.p_new)},
              {"p_after", or_else("probability_after", state.after.p_new)}};
  out["more"] = more_texts(line);
  if (words.is_object())
    for (const char* when : {"before", "after"}) out[when] = shorten(text(words, when), 240);
  return out;
}

/// What the model wrote, with how many more there are.
json cards(const RunReport& run, const std::vector<CaseState>& cases) {
  static const json nothing;
  const json& list = list_of(member(run.extras, {"continuations"}));
  std::map<std::string, const json*> words;
  for (const auto& one : list) words.emplace(text(one, "case_id"), &one);
  json shown = json::array();
  for (const auto& state : cases) {
    const std::string id = text(*state.line, "case_id");
    const auto found = words.find(id);
    const bool has_words = found != words.end() && !id.empty();
    if (has_words || !state.reason.empty() || state.after.p_new)
      shown.push_back(card(state, has_words ? *found->second : nothing));
    if (shown.size() == kCardsMost) break;
  }
  if (cases.empty())  // a report without cases
    for (size_t i = 0; i < std::min(list.size(), kCardsMost); ++i)
      shown.push_back(card({&nothing, {}, {}, "", ""}, list[i].is_object() ? list[i] : json::object()));
  const size_t all = std::max(cases.size(), list.size());
  return {{"more", all - std::min(all, shown.size())}, {"shown", std::move(shown)}};
}

/// The table of every edit. Its last columns are the labelled figures of the first family that judged the cases, and of
/// what the model writes.
json case_table(const std::vector<CaseState>& cases) {
  std::vector<std::pair<const MetricInfo*, const MetricField*>> fields;
  for (const auto& info : metric_families()) {
    if (!info.judge || std::none_of(cases.begin(), cases.end(), [&](const CaseState& state) {
          return case_metrics(*state.line, "post", info.name).is_object();
        }))
      continue;
    if (!fields.empty() && info.name != "free") continue;  // the first protocol, and what the model writes
    for (const auto& field : info.fields)
      if (field.of_case && !field.of_groups && !field.label.empty()) fields.emplace_back(&info, &field);
  }
  json columns = json::array(), rows = json::array();
  for (const auto& [family, field] : fields) columns.push_back(field->label);
  for (size_t i = 0; i < std::min(cases.size(), kRowsMost); ++i) {
    const CaseState& state = cases[i];
    json values = json::array();
    for (const auto& [family, field] : fields) {
      const auto value = field->of_case(case_metrics(*state.line, "post", family->name));
      values.push_back(value ? json(std::round(10 * field->scale * *value) / 10) : json());
    }
    rows.push_back({{"id", text(*state.line, "case_id", std::to_string(i))},
                    {"prompt", shorten(full_prompt(*state.line), 90)},
                    {"target", shorten(target_of(*state.line), 40)},
                    {"state", shorten(state.reason.empty() ? state.status : state.reason, 160)},
                    {"failed", !state.reason.empty()},
                    {"steps", or_null(number(*state.line, "steps"))},
                    {"loss", or_null(number(*state.line, "loss"))},
                    {"before", or_null(state.before.p_new)},
                    {"after", or_null(state.after.p_new)},
                    {"values", values}});
  }
  const auto failed =
      std::count_if(cases.begin(), cases.end(), [](const auto& state) { return !state.reason.empty(); });
  json out = {{"all", cases.size()}, {"failed", failed}, {"columns", columns}, {"rows", rows}};
  if (const auto all = static_cast<int64_t>(cases.size()); all > 0) {
    const auto worked = share_interval(static_cast<double>(all - failed) / static_cast<double>(all), all);
    out["ci95"] = {100 * worked.first, 100 * worked.second};
  }
  return out;
}

/// What the families declare about their figures.
json declarations(const json& metrics) {
  json out = json::array();
  for (const auto& info : metric_families()) {
    if (!member(metrics, {info.name}).is_object()) continue;
    json fields = json::array();
    for (const auto& field : info.fields)
      fields.push_back({{"key", field.key},
                        {"name", field.paper_name},
                        {"definition", field.definition},
                        {"unit", field.unit},
                        {"higher", field.higher_is_better},
                        {"main", !field.harmonic_of.empty()}});
    out.push_back({{"name", info.name}, {"protocol", info.protocol}, {"fields", fields}, {"keyed", info.keyed}});
  }
  return out;
}

/// Names of the figures that are drawn against the number of edits.
json chart_labels() {
  json labels = json::array();
  for (const auto& info : metric_families())
    for (const auto& field : info.fields)
      if (const json label = {field.key, field.label};
          !field.label.empty() && std::find(labels.begin(), labels.end(), label) == labels.end())
        labels.push_back(label);
  return labels;
}

/// The curves of all facts, or of every nth.
json curves(const json& list) {
  json out = json::object();
  for (const char* key : {"loss", "probability"}) {
    json all = json::array();
    for (const auto& curve : list_of(list))
      if (auto values = detail::numbers(member(curve, {key})); !values.empty()) all.push_back(rounded(values));
    const size_t step = (all.size() + kCurvesMost - 1) / kCurvesMost;
    json shown = json::array();
    for (size_t i = 0; i < all.size(); i += step) shown.push_back(std::move(all[i]));
    out[key] = {{"all", all.size()}, {"shown", shown}};
  }
  return out;
}

/// Probabilities by step and fact, averaged over blocks so that there are few enough to draw.
json retention(const json& matrix) {
  std::vector<std::vector<double>> values;
  for (const auto& row : list_of(member(matrix, {"probability"}))) values.push_back(detail::numbers(row));
  const auto edits = detail::numbers(member(matrix, {"edits_applied"}));
  size_t columns = 0;
  for (const auto& row : values) columns = std::max(columns, row.size());
  const size_t by_row = (values.size() + kHeatRows - 1) / kHeatRows,
               by_column = std::max<size_t>(1, (columns + kHeatColumns - 1) / kHeatColumns);
  json out = {{"rows", json::array()}, {"columns", json::array()}, {"values", json::array()}};
  for (size_t r = 0; r < values.size(); r += by_row) {
    std::vector<double> means;
    for (size_t c = 0; c < columns; c += by_column) {
      double sum = 0, n = 0;
      for (size_t i = r; i < std::min(r + by_row, values.size()); ++i)
        for (size_t j = c; j < std::min(c + by_column, values[i].size()); ++j)
          if (std::isfinite(values[i][j])) sum += values[i][j], n += 1;
      means.push_back(n > 0 ? std::round(100 * sum / n) / 100 : NAN);
    }
    out["values"].push_back(rounded(means));
    out["rows"].push_back(r < edits.size() ? detail::fixed(edits[r], 0) + " edits" : "");
  }
  for (size_t c = 0; c < columns; c += by_column) out["columns"].push_back(c + 1);
  return out;
}

json page_data(const RunReport& run) {
  const auto cases = case_states(run);
  json extras = json::object(), results = run.results.is_object() ? run.results : json::object();
  for (const char* key : {"command", "directory", "started", "versions", "machine", "notes", "layers",
                          "efficacy_by_edits", "memory", "placement", "training_loss", "trace"})
    if (const json& value = member(run.extras, {key}); !value.is_null()) extras[key] = value;
  if (extras.contains("trace") && extras["trace"].is_object()) extras["trace"].erase("traces");
  json data = {{"page", results.contains("tune") ? "training" : "edit"},
               {"families", declarations(member(results, {"metrics"}))},
               {"labels", chart_labels()},
               {"cards", cards(run, cases)},
               {"cases", case_table(cases)},
               {"curves", curves(member(run.extras, {"curves"}))},
               {"retention", retention(member(run.extras, {"retention"}))},
               {"extras", std::move(extras)}};
  if (const json steps = results.contains("steps") ? results["steps"] : json(); steps.is_array() && !steps.empty()) {
    data["training"] = {{"steps", steps.size()},
                        {"first", or_null(number(steps.front(), "loss"))},
                        {"last", or_null(number(steps.back(), "loss"))}};
    results.erase("steps");
  }
  data["results"] = std::move(results);
  return data;
}

}  // namespace

std::string render_report(const RunReport& run) {
  return detail::fill_page(page_data(run));
}

std::string direction_page(nlohmann::json data) {
  data["page"] = "direction";
  return detail::fill_page(data);
}

void write_report(const std::filesystem::path& path, const RunReport& run) {
  write_file(path, render_report(run));
}

}  // namespace emend::evaluation
