// Several runs in one document; quality_text.cpp and the page's script show it.
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/quality.h>
#include <emend/evaluation/report.h>
#include <emend/evaluation/statistics.h>

#include <algorithm>
#include <map>
#include <optional>

namespace emend::evaluation {
namespace {

using detail::member;
using nlohmann::json;

json column(const std::string& key, const std::string& head, const std::string& unit, bool higher,
            const std::string& definition) {
  return {{"key", key}, {"head", head}, {"unit", unit}, {"higher", higher}, {"definition", definition}};
}

// What the model writes, then each protocol that has a score, with its parts, then the shares of those without a score,
// then the model's health.
json metric_columns() {
  static const std::vector<std::pair<const char*, const char*>> written = {
      {"edit_begins", "edited prompt"},
      {"paraphrase_begins", "paraphrases"},
      {"question_begins", "question"},
      {"prefixed_begins", "behind text"},
      {"negation_begins", "negated"},
      {"negation_repeats", "repeats negated"},
      {"portability_names", "portability"},
      {"loops", "loops"},
      {"entropy", "entropy"},
      {"neighborhood_first_token_kept", "neighbours: first token"},
      {"neighborhood_ten_tokens_kept", "ten tokens"},
      {"neighborhood_kl", "KL neighbours"},
      {"neutral_kl", "KL neutral"},
      {"edit_names_chat", "chat: edited prompt"},
      {"paraphrase_names_chat", "chat: paraphrases"},
      {"negation_names_chat", "chat: negated"},
      {"portability_names_chat", "chat: portability"},
      {"neighborhood_text_kept_chat", "chat: neighbours"}};
  json columns = json::array();
  const auto add = [&](const std::string& family, const std::string& key, const std::string& head = "") {
    const MetricField& field = *metric_info(family).field(key);
    columns.push_back(column(family + "." + key, head.empty() ? field.paper_name : head, field.unit,
                             field.higher_is_better, field.definition));
  };
  for (const auto& [key, head] : written) add("free", key, head);
  for (const auto& info : metric_families())
    for (const auto& score : info.fields) {
      if (score.harmonic_of.empty()) continue;
      add(info.name, score.key);
      for (const auto& part : score.harmonic_of) add(info.name, part);
    }
  for (const auto& info : metric_families()) {
    const auto scored = [](const MetricField& field) { return !field.harmonic_of.empty(); };
    if (!info.judge || info.name == "free" || std::ranges::any_of(info.fields, scored)) continue;
    for (const auto& field : info.fields)
      if (field.of_case && field.unit == "%") add(info.name, field.key);
  }
  add("health", "lambada_accuracy", "LAMBADA");
  add("health", "perplexity", "perplexity");
  return columns;
}

// What is no metric.
std::vector<json> cost_columns() {
  return {column("seconds", "s a fact", "s", false, "Seconds for targets and insertion, by the number of facts."),
          column("pack_bytes", "pack", "B", false, "Bytes of the edit pack.")};
}

// The figures of one measurement of a sequence, as results.json names them within "lifelong".
json sequence_columns() {
  return {
      column("edits", "edits", "", true, "Facts edited when this was measured."),
      column("first", "first", "%", true,
             "The first 100 facts (or all, while there are fewer) whose new answer is the more probable one."),
      column("last", "last", "%", true, "The same of the last 100."),
      column("all", "all", "%", true, "The same of all so far."),
      column("paraphrase", "paraphrase", "%", true, "Paraphrases of a sample of all so far."),
      column("neighborhood", "neighbourhood", "%", true, "Neighbours of that sample."),
      column("free.edit_begins", "says", "%", true,
             "Edited prompts of the sample whose greedy continuation begins with the new answer."),
      column("free.paraphrase_begins", "says paraphrased", "%", true, "The same of paraphrases."),
      column("health.lambada", "LAMBADA", "%", true, "Texts whose last word is the greedy continuation."),
      column("health.wikitext2_perplexity", "perplexity", "perplexity", false,
             "Of the health data's text, in windows of up to 512 tokens."),
      column("seconds", "s a fact", "s", false, "Seconds for targets and insertion, by the number of facts."),
      column("peak_bytes.host", "peak", "B", false, "Peak memory of the host."),
  };
}

// The figures of one state, by column.
json figures_of(const json& metrics, const char* state, const json& columns) {
  json figures = json::object();
  for (const auto& column : columns) {
    const std::string name = column.at("key"), family = name.substr(0, name.find('.'));
    const std::string key = name.substr(family.size() + 1);
    const json& summary = member(metrics, {family, state});
    if (const json& value = member(summary, {key}); value.is_number())
      figures[name] = {{"value", value}, {"ci95", detail::interval_of(summary, key)}};
  }
  return figures;
}

// The figures of the last measurement. Of shares of whole facts the number is known, so that they have an interval.
json last_measurement(const json& entries, const json& columns) {
  json figures = json::object();
  if (!entries.is_array() || entries.empty()) return figures;
  const json& entry = entries.back();
  const auto edits = detail::number(entry, "edits").value_or(0);
  for (const auto& column : columns) {
    const auto key = column.at("key").get<std::string>();
    const auto value = detail::as_number(detail::at_path(entry, key));
    if (!value) continue;
    json& figure = figures[key] = {{"value", *value}, {"ci95", nullptr}};
    if (key == "first" || key == "last" || key == "all") {
      const auto counted = detail::number(member(entry, {"counts"}), key);
      const auto n = static_cast<int64_t>(counted.value_or(key == "all" ? edits : std::min(edits, 100.0)));
      const auto range = share_interval(*value / 100, n);
      figure["ci95"] = {100 * range.first, 100 * range.second};
    } else if (key.starts_with("free.")) {
      figure["ci95"] = detail::interval_of(member(entry, {"free"}), key.substr(5));
    } else if (key == "seconds" && edits > 0) {
      figure["value"] = *value / edits;
    }
  }
  return figures;
}

// What a reader has to know of a run that went to its end: facts that were not written, alarms of the guard.
std::string remarks(const json& results) {
  std::string text;
  if (const auto failed = detail::number(member(results, {"edits"}), "failed").value_or(0); failed > 0)
    text = counted(static_cast<size_t>(failed), "fact") + " of " + detail::text(results, "facts") + " not written";
  const json& guard = member(results, {"guard"});
  for (size_t batch = 0; guard.is_array() && batch < guard.size(); ++batch)
    if (const json& alarms = member(guard[batch], {"alarms"}); alarms.is_array() && !alarms.empty()) {
      append_item(
          text, "the guard's alarm after batch " + std::to_string(batch + 1) + ": " + detail::as_text(alarms[0]), "; ");
      break;
    }
  return text;
}

// What runs must share to stand in one table.
constexpr const char* kCommon[] = {"model.fingerprint", "facts_file.fingerprint", "facts", "protocol", "dtype"};

class QualityTable {
 public:
  QualityTable() : columns_(metric_columns()), sequence_(sequence_columns()) {}

  void add(const QualityEntry& entry) {
    json row = {{"name", entry.name},        {"kind", "editor"},
                {"group", entry.group},      {"folder", entry.folder.filename().string()},
                {"state", "pending"},        {"note", "not run yet"},
                {"figures", json::object()}, {"lifelong", json::array()}};
    if (std::filesystem::exists(entry.folder / "results.json")) {
      add_run(load_run(entry.folder), entry, row);
    } else if (const auto path = entry.folder / "failure.json"; std::filesystem::exists(path)) {
      const json failure = read_json(path);
      row["state"] = "failed";
      row["note"] = detail::text(failure, "error");
      if (member(failure, {"lifelong"}).is_array()) row["lifelong"] = failure["lifelong"];
    }
    rows_.push_back(std::move(row));
  }

  json finish() {
    json document = {{"schema", 1}};
    for (auto& row : rows_) row["last"] = last_measurement(row["lifelong"], sequence_);
    judge_sequences();
    add_means();
    if (!base_.empty()) rows_.insert(rows_.begin(), base_.begin(), base_.end());
    json columns = columns_;
    for (auto& column : cost_columns()) columns.push_back(std::move(column));
    document["columns"] = told_apart(used(columns, "figures"));
    document["lifelong_columns"] = used(sequence_, "last");
    if (first_)
      for (const char* key : {"emend", "model", "facts", "facts_file", "protocol", "dtype"})
        document[key] = member(first_->results, {key});
    document["compared_with"] = first_name_;
    document["rows"] = std::move(rows_);
    return document;
  }

 private:
  void add_run(RunReport run, const QualityEntry& entry, json& row) {
    const json& results = run.results;
    require_alike(results, entry);
    const json& metrics = member(results, {"metrics"});
    json& figures = row["figures"] = figures_of(metrics, "post", columns_);
    const double facts = std::max(1.0, detail::number(results, "facts").value_or(1));
    double seconds = 0;
    for (const char* phase : {"targets", "insert"})
      seconds += detail::as_number(member(results, {"seconds", phase})).value_or(0);
    figures["seconds"] = {{"value", seconds / facts}};
    std::error_code none;
    if (const auto bytes = std::filesystem::file_size(entry.folder / "edit.safetensors", none); !none)
      figures["pack_bytes"] = {{"value", bytes}};
    row["state"] = "finished";
    row["note"] = remarks(results);
    for (const char* key : {"editor", "seed", "hparams", "command"}) row[key] = member(results, {key});
    if (member(results, {"lifelong"}).is_array()) row["lifelong"] = results["lifelong"];
    if (base_.empty()) add_base(metrics);
    if (!first_) {
      first_ = std::move(run);
      first_name_ = entry.name;
    } else {
      compare(run, figures);
    }
  }

  void require_alike(const json& results, const QualityEntry& entry) const {
    if (!first_) return;
    for (const std::string path : kCommon)
      if (const json& own = detail::at_path(results, path), &other = detail::at_path(first_->results, path);
          own != other)
        refuse({(entry.folder / "results.json").string(),
                path + " is " + shorten(own.dump(), 60) + ", and " + shorten(other.dump(), 60) + " in " + first_name_,
                "runs of the same facts, model and protocol", "compare them in folders of their own"});
  }

  // The unedited model, and the same with each fact in its context.
  void add_base(const json& metrics) {
    const auto base = [&](const char* name, const char* kind, const char* state) {
      if (auto figures = figures_of(metrics, state, columns_); !figures.empty())
        base_.push_back({{"name", name},
                         {"kind", kind},
                         {"state", "finished"},
                         {"note", ""},
                         {"figures", std::move(figures)},
                         {"lifelong", json::array()},
                         {"last", json::object()}});
    };
    base("unedited", "unedited", "pre");
    base("told (retrieval)", "told", "retrieval");
  }

  void compare(const RunReport& run, json& figures) const {
    const json comparison = compare_runs(*first_, run);
    for (const auto& one : comparison.at("differences")) {
      const std::string key = detail::text(one, "family") + "." + detail::text(one, "metric");
      if (!figures.contains(key)) continue;
      figures[key]["difference"] = one["difference"];
      figures[key]["difference_ci95"] = one["ci95"];
      figures[key]["differs"] = one["significant"];
    }
  }

  void judge_sequences() {
    json lambada;
    for (const auto& row : base_)
      if (row["kind"] == "unedited") lambada = member(row, {"figures", "health.lambada_accuracy", "value"});
    for (auto& row : rows_)
      if (!row["lifelong"].empty()) row["collapse"] = collapse_point(row["lifelong"], lambada);
  }

  // Behind the runs of one group that differ in nothing but the seed.
  void add_means() {
    std::vector<json> all;
    for (size_t i = 0; i < rows_.size();) {
      size_t end = i;
      std::vector<const json*> runs;
      for (; end < rows_.size() && rows_[end]["group"] == rows_[i]["group"]; ++end)
        if (rows_[end]["state"] == "finished") runs.push_back(&rows_[end]);
      std::optional<json> mean;
      if (runs.size() > 1) mean = mean_row(runs);
      for (; i < end; ++i) all.push_back(std::move(rows_[i]));
      if (mean) all.push_back(std::move(*mean));
    }
    rows_ = std::move(all);
  }

  [[nodiscard]] static json mean_row(const std::vector<const json*>& runs) {
    json row = {{"name", runs[0]->at("group").get<std::string>() + ", mean of " + counted(runs.size(), "seed")},
                {"kind", "mean"},
                {"state", "finished"},
                {"note", ""},
                {"lifelong", json::array()}};
    for (const char* part : {"figures", "last"}) {
      row[part] = json::object();
      for (const auto& [key, figure] : runs[0]->at(part).items()) {
        std::vector<double> values;
        for (const json* run : runs)
          if (const auto value = detail::as_number(member(*run, {part, key, "value"}))) values.push_back(*value);
        if (values.size() < runs.size()) continue;
        const auto [low, high] = std::ranges::minmax_element(values);
        row[part][key] = {{"value", mean_of(values)->value}, {"range", {*low, *high}}};
      }
    }
    return row;
  }

  // The columns that some row has.
  [[nodiscard]] json used(const json& columns, const char* part) const {
    json out = json::array();
    for (const auto& column : columns)
      if (std::ranges::any_of(
              rows_, [&](const json& row) { return row.at(part).contains(column.at("key").get<std::string>()); }))
        out.push_back(column);
    return out;
  }

  // Two protocols may have one name for a figure: the family stands in front.
  [[nodiscard]] static json told_apart(json columns) {
    std::map<std::string, int> heads;
    for (const auto& column : columns) ++heads[column.at("head").get<std::string>()];
    for (auto& column : columns) {
      const std::string key = column.at("key"), head = column.at("head");
      if (heads[head] > 1) column["head"] = key.substr(0, key.find('.')) + ": " + head;
    }
    return columns;
  }

  json columns_, sequence_;
  std::vector<json> base_, rows_;
  std::optional<RunReport> first_;  ///< with figures: the others are compared with it
  std::string first_name_;
};

}  // namespace

json collapse_point(const json& entries, const json& lambada) {
  json point = {{"edits", nullptr}, {"why", ""}};
  auto whole = detail::as_number(lambada);
  for (const auto& entry : entries) {
    const auto held = detail::number(entry, "first"), now = detail::as_number(member(entry, {"health", "lambada"}));
    if (!whole) whole = now;
    std::string why;
    if (held && *held < kHeld) why = "of the first facts " + detail::fixed(held) + " % hold";
    if (whole && now && *now < kWhole * *whole)
      append_item(why, "LAMBADA " + detail::fixed(now) + ", was " + detail::fixed(whole), "; ");
    if (why.empty()) continue;
    return {{"edits", member(entry, {"edits"})}, {"why", why}};
  }
  return point;
}

json quality_document(const std::vector<QualityEntry>& entries) {
  QualityTable table;
  for (const auto& entry : entries) table.add(entry);
  return table.finish();
}

std::string quality_page(const json& document) {
  json data = document;
  data["page"] = "quality";
  return detail::fill_page(data);
}

}  // namespace emend::evaluation
