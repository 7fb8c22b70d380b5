// Reading a run, and the files for other programs.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/report.h>
#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

json parse_object(const std::string& text, const std::string& where) {
  json value = parse_json(text, where, {.expected = "one JSON object", .advice = "write the run again"});
  if (!value.is_object())
    throw Error(ErrorClass::kCorruption, {where, "JSON that is no object", "one JSON object", "write the run again"});
  return value;
}

std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  return '"' + replace_all(text, "\"", "\"\"") + '"';
}

std::string csv_number(const json& value) {
  return value.is_number() ? value.dump() : "";
}

// What the report page shows, as one JSON document: long lists and texts are cut here, templates/page.html draws.

using detail::member, detail::number, detail::or_null, detail::text;

constexpr size_t kCardsMost = 60, kRowsMost = 1500, kCurvesMost = 1000, kHeatRows = 40, kHeatColumns = 160;

const json& list_of(const json& value) {
  static const json none = json::array();
  return value.is_array() ? value : none;
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
  return datasets::with_subject(text(line, "prompt"), text(line, "subject"));
}

/// Why a case did not work out. An edit that stopped at the norm limit or at the last step is written all the same; the
/// metrics judge it.
std::string reason_of(const json& line, const std::string& status, const CaseVerdict& after) {
  if (status == "failed") {
    const std::string said = text(line, "reason");
    return said.empty() ? status : status + ": " + said;
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
  std::ranges::stable_partition(states, [](const CaseState& state) { return !state.reason.empty(); });
  return states;
}

json more_texts(const json& line) {
  json list = json::array();
  for (const auto& one : further_texts(case_metrics(line, "pre", "free"), case_metrics(line, "post", "free")))
    list.push_back({{"label", one.label},
                    {"prompt", shortened(one.prompt, 161)},
                    {"before", shortened(one.before, 121)},
                    {"after", shortened(one.after, 121)}});
  return list;
}

json card(const CaseState& state, const json& words) {
  const json& line = *state.line;
  const auto or_else = [&](const char* key, const std::optional<double>& p) {
    const auto given = number(words, key);
    return or_null(given ? given : p);
  };
  const std::string target = text(line, "target");
  json out = {{"prompt", shortened(text(words, "prompt", full_prompt(line)), 241)},
              {"target", shortened(target.empty() ? text(words, "target") : target, 121)},
              {"reason", shortened(state.reason, 301)},
              {"p_before", or_else("probability_before", state.before.p_new)},
              {"p_after", or_else("probability_after", state.after.p_new)}};
  out["more"] = more_texts(line);
  for (const auto& [when, side] : {std::pair("before", "pre"), std::pair("after", "post")}) {
    const json& written = list_of(member(line, {"metrics", side, "free", "edit"}));  // of facts that are not shown
    if (words.is_object() || !written.empty())
      out[when] = shortened(words.is_object() ? text(words, when) : text(written[0], "text"), 241);
  }
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
    if (!info.judge || std::ranges::none_of(cases, [&](const CaseState& state) {
          return case_metrics(*state.line, "post", info.name).is_object();
        }))
      continue;
    if (!fields.empty() && info.name != "free") continue;  // the first protocol, and what the model writes
    for (const auto& field : info.fields)
      if (field.of_case && !field.of_groups && !field.label.empty()) fields.emplace_back(&info, &field);
  }
  std::erase_if(fields, [&](const auto& one) {
    return one.second->optional && std::ranges::none_of(cases, [&](const CaseState& state) {
             return one.second->of_case(case_metrics(*state.line, "post", one.first->name)).has_value();
           });
  });
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
                    {"prompt", shortened(full_prompt(*state.line), 91)},
                    {"target", shortened(text(*state.line, "target"), 41)},
                    {"state", shortened(state.reason.empty() ? state.status : state.reason, 161)},
                    {"failed", !state.reason.empty()},
                    {"steps", or_null(number(*state.line, "steps"))},
                    {"loss", or_null(number(*state.line, "loss"))},
                    {"before", or_null(state.before.p_new)},
                    {"after", or_null(state.after.p_new)},
                    {"values", values}});
  }
  const auto failed = std::ranges::count_if(cases, [](const auto& state) { return !state.reason.empty(); });
  json out = {{"all", cases.size()}, {"failed", failed}, {"columns", columns}, {"rows", rows}};
  if (const auto all = std::ssize(cases); all > 0) {
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
                        {"digits", field.digits()},
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
          !field.label.empty() && std::ranges::find(labels, label) == labels.end())
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
  // What no part of the page reads, and may be as long as the facts times the measurements.
  for (const char* key : {"retention", "lint", "guard", "contexts", "statistics", "cache", "transfers"})
    results.erase(key);
  if (results.contains("seed"))  // more digits than JavaScript's numbers have
    data["extras"]["seed"] = results["seed"].dump();
  data["results"] = std::move(results);
  return data;
}

}  // namespace

// What tables and charts read of the metrics.
static void require_figures(const json& results, const std::string& where) {
  const auto damaged = [&](const std::string& key, const json& got, const char* expected) {
    throw Error(ErrorClass::kCorruption,
                {where + ": metrics" + key, shorten(got.dump(), 60), expected, "run again, or fetch the folder again"});
  };
  const json metrics = results.value("metrics", json::object());
  if (!metrics.is_object()) damaged("", metrics, "an object");
  for (const auto& info : metric_families())
    for (const char* side : {"pre", "post"}) {
      const json& figures = detail::member(metrics, {info.name, side});
      const std::string place = "." + info.name + "." + side;
      if (!figures.is_null() && !figures.is_object()) damaged(place, figures, "an object");
      for (const auto& field : info.fields)
        if (const json& value = detail::member(figures, {field.key}); !value.is_null() && !value.is_number())
          damaged(place + "." + field.key, value, "a number");
    }
}

RunReport load_run(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder))
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no such folder", "the folder of a run", "give the folder of a run of memit_edit"});
  RunReport run;
  const auto results = folder / "results.json";
  run.results = parse_object(read_file(results), results.string());
  if (!run.results.contains("schema"))
    throw Error(ErrorClass::kCorruption,
                {results.string(), "no results of a run", "what memit_edit and emend tune write",
                 "run again, or fetch the folder again"});
  if (run.results["schema"] != 1)
    throw Error(ErrorClass::kUnsupported, {results.string(), "schema " + shorten(run.results["schema"].dump(), 20),
                                           "schema 1", "read it with the emend that wrote it"});
  require_figures(run.results, results.string());
  if (const auto path = folder / "cases.jsonl"; std::filesystem::exists(path)) {
    std::istringstream lines(read_file(path));
    int64_t number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      if (!line.empty()) run.cases.push_back(parse_object(line, path.string() + ":" + std::to_string(number)));
    }
  }
  if (const auto path = folder / "report.json"; std::filesystem::exists(path))
    run.extras = parse_object(read_file(path), path.string());
  if (const auto facts = number(run.results, "facts"); facts && *facts > 0 && run.cases.empty())
    throw Error(ErrorClass::kCorruption, {(folder / "cases.jsonl").string(), "no cases",
                                          "a line for each fact of the run", "run again, or fetch the folder again"});
  return run;
}

/// Both ends, "," where there is none.
static std::string interval(const json& table, const std::string& key) {
  const json& range = detail::interval_of(table, key);
  return range.is_array() && range.size() == 2 ? csv_number(range[0]) + ',' + csv_number(range[1]) : ",";
}

std::string metrics_csv(const json& results) {
  std::string out =
      "family,metric,paper_name,unit,before,after,change,ci95_before_low,ci95_before_high,ci95_after_low,ci95_after_"
      "high,n\n";
  for (const auto& info : metric_families()) {
    const json& before = detail::member(results, {"metrics", info.name, "pre"});
    const json& after = detail::member(results, {"metrics", info.name, "post"});
    if (before.is_null() && after.is_null()) continue;
    const auto row = [&](const std::string& key, const std::string& paper, const std::string& unit,
                         const json& pre_table, const json& post_table) {
      const json &pre = detail::member(pre_table, {key}), &post = detail::member(post_table, {key});
      if (pre.is_null() && post.is_null()) return;
      const auto a = detail::as_number(pre), b = detail::as_number(post);
      const json& counted = post_table.is_null() ? pre_table : post_table;
      const json &count = detail::member(counted, {"counts", key}), &all = detail::member(counted, {"n"});
      out += csv_cell(info.name) + ',' + csv_cell(key) + ',' + csv_cell(paper) + ',' + csv_cell(unit) + ',' +
             csv_number(pre) + ',' + csv_number(post) + ',' + (a && b ? json(*b - *a).dump() : "") + ',' +
             interval(pre_table, key) + ',' + interval(post_table, key) + ',' +
             csv_number(count.is_null() ? all : count) + '\n';
    };
    for (const auto& field : info.fields) row(field.key, field.paper_name, field.unit, before, after);
    for (const auto& group : info.keyed) {
      const json &pre = detail::member(before, {group}), &post = detail::member(after, {group});
      for (const auto& item : (post.is_object() && !post.empty() ? post : pre).items())
        if (item.value().is_number()) row(item.key(), group + ": " + item.key(), "%", pre, post);
    }
  }
  return out;
}

const json& case_metrics(const json& line, const std::string& when, const std::string& family) {
  return detail::member(line, {"metrics", when, family});
}

CaseVerdict judge_case(const json& line, const std::string& when) {
  CaseVerdict all;
  for (const auto& info : metric_families()) {
    if (!info.judge) continue;
    const CaseVerdict own = info.judge(case_metrics(line, when, info.name));
    if (!all.p_new) all.p_new = own.p_new;
    if (!all.success) all.success = own.success, all.reason = own.reason;
  }
  // The run's own verdict counts, where the line has one.
  if (const std::string verdict = detail::text(line, "verdict"); when == "post" && !verdict.empty()) {
    all.success = verdict == "said";
    all.reason = detail::text(line, "reason");
  }
  return all;
}

/// Without members that are null or empty lists: the published script takes what is there for a value.
static json known(json object) {
  for (auto it = object.begin(); it != object.end();)
    it = it->is_null() || (it->is_array() && it->empty()) ? object.erase(it) : std::next(it);
  return object;
}

int64_t write_case_files(const std::filesystem::path& folder, const RunReport& run) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw Error(class_of_errno(failed.value()), {folder.string(), "the folder cannot be made: " + failed.message(),
                                                 "a writable place", "check the path"});
  json ids = json::array();
  for (const auto& line : run.cases) ids.push_back(detail::member(line, {"case_id"}));
  const bool alone = detail::text(run.results, "protocol") == "single" &&  // each edited into the unedited model
                     detail::number(run.results, "batches").value_or(0) >= static_cast<double>(ids.size());
  const size_t together = alone ? 1 : ids.size();
  const std::string edits = std::to_string(together);
  int64_t written = 0;
  for (const auto& line : run.cases) {
    const json id = detail::member(line, {"case_id"});
    json out = {{"case_id", id}, {"grouped_case_ids", alone ? json::array({id}) : ids}, {"num_edits", together}};
    const auto target = [&](const char* key) -> json {
      const json& value = detail::member(line, {key});
      return value.is_string() ? json{{"str", value}} : value;
    };
    out["requested_rewrite"] = known({{"prompt", detail::member(line, {"prompt"})},
                                      {"subject", detail::member(line, {"subject"})},
                                      {"relation_id", detail::member(line, {"relation_id"})},
                                      {"target_new", target("target")},
                                      {"target_true", target("target_true")}});
    for (const char* when : {"pre", "post"}) {
      json values = json::object();
      for (const auto& info : metric_families()) {
        const json& raw = case_metrics(line, when, info.name);
        if (!info.memit_names || !raw.is_object()) continue;
        for (const auto& [key, value] : raw.items()) {
          // The published script compares the two targets; lists without the old one would break it.
          if (key.ends_with("_probs") && value.is_array() && !value.empty() &&
              detail::member(value[0], {"target_true"}).is_null())
            continue;
          values.emplace(key, value);
        }
      }
      if (values = known(std::move(values)); !values.empty()) out[when] = std::move(values);
    }
    std::string name = detail::text(line, "case_id", std::to_string(written));
    for (char& c : name)
      if (c == '/' || c == '\\' || c == '\0') c = '_';  // a case id never leads out of the folder
    write_file(folder / (edits + "_edits-case_" + name + ".json"),
               out.dump(1, ' ', false, json::error_handler_t::replace) + "\n");
    ++written;
  }
  return written;
}

std::string render_report(const RunReport& run) {
  return detail::fill_page(page_data(run));
}

std::string direction_page(nlohmann::json data) {
  data["page"] = "direction";
  return detail::fill_page(data);
}

}  // namespace emend::evaluation
