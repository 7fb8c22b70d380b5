#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/evaluation/report.h>

#include "../cli.h"

namespace emend::tools {
namespace {

/// The averages of a trace; the single facts stay in their own file.
nlohmann::json read_trace(const std::string& path) {
  auto trace = read_json(path, {.max_bytes = size_t{512} << 20});
  if (!trace.is_object() || !trace.contains("effect"))
    throw Error(ErrorClass::kCorruption,
                {path, "no causal trace", "the trace.json that emend trace --out DIR writes", ""});
  trace.erase("traces");
  return trace;
}

struct ReportArguments {
  std::string run, trace;
  bool case_files = false;
};

int run_report(const ReportArguments& options, const Common& common) {
  const std::filesystem::path folder = options.run;
  auto run = evaluation::load_run(folder);
  if (!options.trace.empty()) {
    run.extras["trace"] = read_trace(options.trace);
    write_file(folder / "report.json", dump_json(run.extras) + "\n");
  }
  write_file(folder / "report.html", evaluation::render_report(run));
  write_file(folder / "metrics.csv", evaluation::metrics_csv(run.results));
  nlohmann::ordered_json written = {{"report", (folder / "report.html").string()},
                                    {"metrics", (folder / "metrics.csv").string()}};
  if (options.case_files) written["case_files"] = evaluation::write_case_files(folder / "cases", run);
  std::string text;
  for (const auto& [name, value] : written.items())
    text += name + ": " + (value.is_string() ? value.get<std::string>() : value.dump()) + "\n";
  common.print(written, text);
  return 0;
}

int run_compare(const std::vector<std::string>& runs, const Common& common) {
  auto document = nlohmann::ordered_json::array();
  std::string text;
  const auto load = [](const std::string& folder) {
    auto run = evaluation::load_run(folder);
    if (run.cases.empty()) refuse({folder, "a run without cases", "a run that edited facts", ""});
    return run;
  };
  const auto first = load(runs.front());
  for (size_t i = 1; i < runs.size(); ++i) {
    const auto comparison = evaluation::compare_runs(first, load(runs[i]));
    document.push_back(nlohmann::ordered_json(comparison));
    text += runs[0] + "  →  " + runs[i] + "\n" + evaluation::format_comparison(comparison) + "\n";
  }
  common.print(document, text);
  return 0;
}

}  // namespace

VerbRun setup_report(Options& o) {
  auto& options = o.arguments<ReportArguments>();
  o.add("RUN", &options.run, "run folder", {.type = "DIR", .required = true})
      .add("--case-files", &options.case_files, "also write per-case files in the MEMIT repository's form")
      .add("--trace", &options.trace, "trace.json of emend trace: its heat maps become part of the report",
           {.type = "FILE"});
  return [&options](Common& common) { return run_report(options, common); };
}

VerbRun setup_compare(Options& o) {
  auto& runs = o.arguments<std::vector<std::string>>();
  o.add("RUN", &runs, "two or more run folders; each is compared with the first",
        {.type = "DIR", .required = true, .least = 2, .most = 100});
  return [&runs](Common& common) { return run_compare(runs, common); };
}

}  // namespace emend::tools
