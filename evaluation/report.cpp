// Reading a run, and the files for other programs.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/report.h>

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
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + '"';
}

std::string csv_number(const json& value) {
  return value.is_number() ? value.dump() : "";
}

}  // namespace

RunReport load_run(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder))
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no such folder", "the folder of a run", "give the folder of a run of memit_edit"});
  RunReport run;
  run.results = parse_object(read_file(folder / "results.json"), (folder / "results.json").string());
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
  return run;
}

/// Both ends, "," where there is none.
static std::string interval(const json& table, const std::string& key) {
  const json* range = &detail::member(table, {"ci95", key});
  if (range->is_null()) range = &detail::member(table, {key + "_ci95"});
  return range->is_array() && range->size() == 2 ? csv_number((*range)[0]) + ',' + csv_number((*range)[1]) : ",";
}

std::string metrics_csv(const json& results) {
  std::string out =
      "family,metric,paper_name,unit,before,after,change,ci95_before_low,ci95_before_high,ci95_after_low,ci95_after_"
      "high,n\n";
  for (const auto& info : metric_families()) {
    const json& before = detail::member(results, {"metrics", info.name, "pre"});
    const json& after = detail::member(results, {"metrics", info.name, "post"});
    if (before.is_null() && after.is_null()) continue;
    const auto row = [&](const std::string& key, const std::string& paper, const std::string& unit, const json& pre,
                         const json& post, const json& pre_table, const json& post_table) {
      const auto a = detail::as_number(pre), b = detail::as_number(post);
      const json& count = detail::member(post_table.is_null() ? pre_table : post_table, {"counts", key});
      const json& n = count.is_null() ? detail::member(post_table.is_null() ? pre_table : post_table, {"n"}) : count;
      out += csv_cell(info.name) + ',' + csv_cell(key) + ',' + csv_cell(paper) + ',' + csv_cell(unit) + ',' +
             csv_number(pre) + ',' + csv_number(post) + ',' + (a && b ? json(*b - *a).dump() : "") + ',' +
             interval(pre_table, key) + ',' + interval(post_table, key) + ',' + csv_number(n) + '\n';
    };
    for (const auto& field : info.fields) {
      const json &pre = detail::member(before, {field.key}), &post = detail::member(after, {field.key});
      if (!pre.is_null() || !post.is_null()) row(field.key, field.paper_name, field.unit, pre, post, before, after);
    }
    for (const auto& group : info.keyed) {
      const json &pre = detail::member(before, {group}), &post = detail::member(after, {group});
      for (const auto& item : (post.is_object() && !post.empty() ? post : pre).items())
        if (item.value().is_number())
          row(item.key(), group + ": " + item.key(), "%", detail::member(pre, {item.key()}),
              detail::member(post, {item.key()}), pre, post);
    }
  }
  return out;
}

void write_metrics_csv(const std::filesystem::path& path, const RunReport& run) {
  write_file(path, metrics_csv(run.results));
}

int64_t write_case_files(const std::filesystem::path& folder, const RunReport& run) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw Error(ErrorClass::kIo, {folder.string(), "the folder cannot be made: " + failed.message(), "a writable place",
                                  "check the path"});
  json ids = json::array();
  for (const auto& line : run.cases) ids.push_back(detail::member(line, {"case_id"}));
  const std::string edits = std::to_string(run.cases.size());
  int64_t written = 0;
  for (const auto& line : run.cases) {
    json out = {
        {"case_id", detail::member(line, {"case_id"})}, {"grouped_case_ids", ids}, {"num_edits", run.cases.size()}};
    const auto target = [&](const char* key) -> json {
      const json& value = detail::member(line, {key});
      return value.is_string() ? json{{"str", value}} : value;
    };
    out["requested_rewrite"] = {
        {"prompt", detail::member(line, {"prompt"})},
        {"subject", detail::member(line, {"subject"})},
        {"relation_id", detail::member(line, {"relation_id"})},
        {"target_new", detail::member(line, {"target_new"}).is_null() ? target("target") : target("target_new")},
        {"target_true", target("target_true")}};
    out["time"] = detail::member(line, {"seconds"});
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
      if (!values.empty()) out[when] = std::move(values);
    }
    std::string id = detail::text(line, "case_id", std::to_string(written));
    for (char& c : id)
      if (c == '/' || c == '\\' || c == '\0') c = '_';  // a case id never leads out of the folder
    write_file(folder / (edits + "_edits-case_" + id + ".json"),
               out.dump(1, ' ', false, json::error_handler_t::replace) + "\n");
    ++written;
  }
  return written;
}

}  // namespace emend::evaluation
