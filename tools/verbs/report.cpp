#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/evaluation/report.h>

#include <iostream>

#include "../cli.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

/// The averages of a trace; the single facts stay in their own file.
nlohmann::json read_trace(const std::string& path) {
  auto trace = nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (!trace.is_object() || !trace.contains("effect"))
    throw Error(ErrorClass::kCorruption,
                {path, "no causal trace", "the trace.json that emend trace --out DIR writes", ""});
  trace.erase("traces");
  return trace;
}

}  // namespace

VerbRun setup_report(CLI::App& command) {
  struct Options {
    std::string run, trace;
    bool case_files = false;
  };
  auto options = std::make_shared<Options>();
  command.add_option("RUN", options->run, "run folder")->required()->type_name("DIR");
  command.add_flag("--case-files", options->case_files, "also write per-case files in the MEMIT repository's form");
  command.add_option("--trace", options->trace, "trace.json of emend trace: its heat maps become part of the report")
      ->type_name("FILE");
  return [options](Common& common) {
    const std::filesystem::path folder = options->run;
    auto run = evaluation::load_run(folder);
    if (!options->trace.empty()) {
      run.extras["trace"] = read_trace(options->trace);
      write_file(folder / "report.json", dump_json(run.extras) + "\n");
    }
    evaluation::write_report(folder / "report.html", run);
    evaluation::write_metrics_csv(folder / "metrics.csv", run);
    nlohmann::ordered_json written = {{"report", (folder / "report.html").string()},
                                      {"metrics", (folder / "metrics.csv").string()}};
    if (options->case_files) written["case_files"] = evaluation::write_case_files(folder / "cases", run);
    if (common.json) {
      std::cout << dump_json(written) << '\n';
    } else {
      for (const auto& [name, value] : written.items())
        std::cout << name << ": " << (value.is_string() ? value.get<std::string>() : value.dump()) << '\n';
    }
    return 0;
  };
}

VerbRun setup_compare(CLI::App& command) {
  auto runs = std::make_shared<std::vector<std::string>>();
  command.add_option("RUN", *runs, "two or more run folders; each is compared with the first")
      ->required()
      ->expected(2, 100)
      ->type_name("DIR");
  return [runs](Common& common) {
    auto document = nlohmann::ordered_json::array();
    const auto first = evaluation::load_run(runs->front());
    for (size_t i = 1; i < runs->size(); ++i) {
      const auto comparison = evaluation::compare_runs(first, evaluation::load_run((*runs)[i]));
      document.push_back(nlohmann::ordered_json(comparison));
      if (!common.json)
        std::cout << (*runs)[0] << "  →  " << (*runs)[i] << '\n' << evaluation::format_comparison(comparison) << '\n';
    }
    if (common.json) std::cout << dump_json(document) << '\n';
    return 0;
  };
}

}  // namespace emend::tools
