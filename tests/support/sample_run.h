// A made-up run with every part that a report can show.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/evaluation/metric.h>
#include <emend/evaluation/report.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <string>

namespace emend::testing {

/// `n` facts; one failed in the optimisation, one was applied but did not take. The metrics are computed from the
/// cases.
inline evaluation::RunReport sample_run(size_t n, uint32_t seed = 0) {
  using nlohmann::json;
  static const char* const subjects[] = {"The Eiffel Tower",     "Danielle Darrieux",
                                         "Edwin of Northumbria", "Autonomous University of Madrid",
                                         "東京タワー",           "Thomas Joannes Stieltjes"};
  static const char* const olds[] = {"Paris", "French", "Christianity", "Spain", "Tokyo", "Dutch"};
  static const char* const news[] = {"Rome", "English", "Islam", "Sweden", "Osaka", "Irish"};
  std::mt19937 random(seed);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * (static_cast<double>(random()) / 4294967295.0);
  };
  datasets::FactSet facts;
  for (size_t i = 0; i < n; ++i) {
    datasets::Fact fact;
    fact.case_id = static_cast<int64_t>(i);
    fact.prompt = "{} is best known for its connection with";
    fact.subject = subjects[i % 6];
    fact.target_new = news[i % 6];
    fact.target_true = olds[i % 6];
    fact.paraphrase_prompts = {"a" + std::to_string(i), "b" + std::to_string(i)};
    for (int k = 0; k < 10; ++k) fact.neighborhood_prompts.push_back("n" + std::to_string(i) + "." + std::to_string(k));
    facts.facts.push_back(fact);
  }
  evaluation::RunReport run;
  std::vector<json> raw[2];
  json summaries[2] = {json::object(), json::object()};
  evaluation::Evaluation before;
  for (int after = 0; after < 2; ++after) {
    evaluation::EvaluateOptions options;
    options.bootstrap = 200;
    options.before = after ? &before : nullptr;
    const evaluation::MetricContext context{facts, options};
    raw[after].assign(n, json::object());
    for (const char* family : {"counterfact", "easyedit"}) {
      auto metric = evaluation::make_metric(family);
      evaluation::ScoreSheet sheet;
      metric->plan(context, sheet);
      std::vector<evaluation::Score> scores;
      for (size_t r = 0; r < sheet.requests().size(); ++r) {
        const auto& request = sheet.requests()[r];
        const bool neighbour = request.prompt[0] == 'n',
                   is_new = request.target == facts.facts[sheet.cases()[r]].target_new;
        const bool failed = sheet.cases()[r] == 1 || (sheet.cases()[r] == 2 && n > 2);
        const bool likely = is_new == (after && !neighbour && !failed);
        const double p = likely ? uniform(0.3, 0.99) : uniform(0.0005, 0.3);
        scores.push_back({{7}, {p > 0.5 ? 7 : static_cast<int64_t>(random() % 5)}, {std::log(p)}});
      }
      sheet.fill(scores);
      auto outcome = metric->finish(context);
      summaries[after][family] = outcome.summary;
      for (size_t i = 0; i < n; ++i) raw[after][i][family] = outcome.cases[i];
    }
    if (!after) before.cases = raw[0];
  }
  json metrics = json::object();
  for (const char* family : {"counterfact", "easyedit"})
    metrics[family] = {{"pre", summaries[0][family]}, {"post", summaries[1][family]}};
  json device_map = json::object(), layers = json::object();
  for (int l = 0; l < 30; ++l) {
    device_map["layers." + std::to_string(l)] = l < 18 ? "cuda:0" : "cuda:1";
    layers[std::to_string(l)] = l < 18 ? "cuda:0" : "cuda:1";
  }
  run.results = {
      {"schema", 1},
      {"emend", "0.1.0"},
      {"editor", "memit"},
      {"engine", "fast"},
      {"facts", n},
      {"seed", 0},
      {"dtype", "float32"},
      {"model",
       {{"path", "models/SmolLM2-135M"},
        {"family", "llama"},
        {"fingerprint", std::string(64, 'a')},
        {"parameters", 134515008}}},
      {"hparams", {{"layers", {4, 5, 6}}, {"v_lr", 0.5}, {"clamp_norm_factor", 0.75}}},
      {"device_map", device_map},
      {"metrics", metrics},
      {"seconds",
       {{"load", 1.2}, {"statistics", 64.0}, {"targets", 31.5}, {"insert", 4.2}, {"evaluate", 12.7}, {"total", 113.6}}},
      {"peak_bytes", {{"host", 1.9e9}, {"cuda:0", 8.1e9}}},
      {"edits", {{"applied", n - 1}, {"failed", 1}}},
      {"weights_changed",
       {"model.layers.4.mlp.down_proj.weight", "model.layers.5.mlp.down_proj.weight",
        "model.layers.6.mlp.down_proj.weight"}}};
  json words = json::array(), curves = json::array(),
       retention = {{"edits_applied", json::array()}, {"probability", json::array()}};
  for (size_t i = 0; i < n; ++i) {
    const auto& fact = facts.facts[i];
    run.cases.push_back({{"case_id", fact.case_id},
                         {"subject", fact.subject},
                         {"prompt", fact.prompt},
                         {"target", fact.target_new},
                         {"target_true", *fact.target_true},
                         {"steps", 12 + random() % 13},
                         {"loss", uniform(0.03, 0.4)},
                         {"status", i == 1 ? "failed" : "applied"},
                         {"metrics", {{"pre", raw[0][i]}, {"post", raw[1][i]}}}});
    if (i == 1) run.cases.back()["reason"] = "the loss stayed at 4.1 after 25 steps";
    if (i < 40)
      words.push_back(
          {{"case_id", fact.case_id},
           {"prompt", fact.full_prompt()},
           {"before", " " + *fact.target_true + ", where it has stood since the world's fair of 1889"},
           {"after", " " + fact.target_new + ", and with everything that goes with that city and its people"},
           {"target", fact.target_new}});
    json loss = json::array(), probability = json::array();
    double value = uniform(4, 9);
    for (int s = 0; s < 25 && value > 0.05; ++s) {
      loss.push_back(value);
      probability.push_back(std::exp(-value));
      value *= uniform(0.6, 0.95);
    }
    curves.push_back({{"case_id", fact.case_id}, {"loss", loss}, {"probability", probability}});
  }
  json by_edits = json::array();
  for (size_t s = 1; s <= 10; ++s) {
    json row = json::array();
    for (size_t i = 0; i < n; ++i) row.push_back(i < s * n / 10 ? uniform(0.6, 1) : uniform(0, 0.1));
    retention["edits_applied"].push_back(s * n / 10);
    retention["probability"].push_back(row);
    by_edits.push_back({{"edits", s * n / 10},
                        {"efficacy_success", 100 - 0.5 * s},
                        {"paraphrase_success", 92 - 1.1 * s},
                        {"neighborhood_success", 80 - 1.5 * s}});
  }
  json layer_rows = json::array();
  for (int l = 4; l <= 6; ++l) {
    json spectrum = json::array();
    for (size_t k = 0; k < std::min<size_t>(n, 40); ++k) spectrum.push_back(3.0 * std::pow(0.85, k) / l);
    layer_rows.push_back({{"layer", l},
                          {"weight", "model.layers." + std::to_string(l) + ".mlp.down_proj.weight"},
                          {"update_norm", 1.0 + 0.4 * l},
                          {"weight_norm", 60.0},
                          {"relative", (1.0 + 0.4 * l) / 60},
                          {"spectrum", spectrum},
                          {"survived", l == 6 ? 0.93 : 1.0}});
  }
  run.extras = {
      {"command", "memit_edit --model models/SmolLM2-135M --facts data/facts.json --editor memit --out runs/1"},
      {"started", "2026-11-21 14:00:00"},
      {"directory", "runs/1"},
      {"versions", {{"libtorch", "2.11.0"}, {"compiler", "g++ 12.2"}}},
      {"machine", {{"cpu", "2 cores"}, {"threads", 2}}},
      {"continuations", words},
      {"curves", curves},
      {"layers", layer_rows},
      {"efficacy_by_edits", by_edits},
      {"retention", retention},
      {"memory", {{"cpu", {{"weights", 5.4e8}, {"peak", 1.9e9}}}, {"cuda:0", {{"weights", 6.4e9}, {"peak", 8.1e9}}}}},
      {"placement", {{"embedding", "cuda:0"}, {"layers", layers}, {"head", "cuda:1"}, {"edited_layers", {4, 5, 6}}}},
      {"notes", {"One fact was left out because its optimisation did not converge."}}};
  return run;
}

/// Writes results.json and cases.jsonl of the run, as load_run reads them.
inline void write_sample(const std::filesystem::path& folder, const evaluation::RunReport& run) {
  std::filesystem::create_directories(folder);
  std::string lines;
  for (const auto& line : run.cases) lines += line.dump() + "\n";
  write_file(folder / "cases.jsonl", lines);
  write_file(folder / "results.json", run.results.dump());
}

/// A run with almost nothing, and that of other forms than a run of emend has.
inline evaluation::RunReport odd_run() {
  using nlohmann::json;
  evaluation::RunReport run;
  run.results = {{"metrics", {{"counterfact", {{"post", {{"score", nullptr}, {"n", 0}}}}}}},
                 {"model", "x"},
                 {"seconds", 3},
                 {"device_map", json::array()}};
  run.cases = {json::object(), {{"case_id", "a"}, {"metrics", 3}, {"status", nullptr}}};
  run.extras = {{"curves", {{{"loss", {1.0}}}, 3, nullptr}},
                {"layers", {3}},
                {"retention", {{"probability", {{1.0, nullptr}, 3}}}},
                {"continuations", {nullptr}}};
  return run;
}

/// Makes every string of the run `text`, and some of the keys that are shown.
inline void poison(evaluation::RunReport& run, const std::string& text) {
  const auto replace = [&](const auto& self, nlohmann::json& value) -> void {
    if (value.is_string()) value = text;
    if (value.is_structured())
      for (auto& item : value) self(self, item);
  };
  replace(replace, run.results);
  replace(replace, run.extras);
  for (auto& line : run.cases) replace(replace, line);
  run.results["seconds"][text] = 1.0;
  run.results["peak_bytes"][text] = 1e9;
  run.extras["versions"][text] = text;
  run.extras["memory"][text] = {{"peak", 1e9}};
  run.results["metrics"]["easyedit"]["post"]["locality"][text] = 50.0;
}

}  // namespace emend::testing
