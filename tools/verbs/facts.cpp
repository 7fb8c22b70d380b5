// lint and convert-facts: facts files without a model.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/datasets/convert.h>
#include <emend/datasets/lint.h>

#include <algorithm>
#include <map>

#include "../options.h"

namespace emend::tools {
namespace {

using datasets::Finding;
using datasets::Severity;

constexpr const char* kLintExamples = R"(Examples:
  emend lint facts.json                       what cannot work, or is probably not meant, line by line
  emend lint facts.json --fix                 repair in place what has a clear remedy
  emend lint facts.json --fix --out clean.json
  emend lint facts.json --json --strict       for scripts; warnings count too

Exit status: 0 nothing that stops an edit, 3 errors are left (with --strict: or warnings).
Checks:)";

constexpr const char* kConvertFactsExamples = R"(Examples:
  emend convert facts counterfact.json facts.jsonl --to jsonl
  emend convert facts mine.jsonl mine.json --to counterfact
  emend convert facts zsre_mend_eval.json easyedit.json --to easyedit --zsre-target alt

What the target format has no place for is listed. The target appears complete or not at all.)";

struct LintOptions {
  FactOptions facts;
  std::string out;
  bool fix = false, strict = false;
};

struct ConvertFactsArguments {
  std::string in, out, to;
  datasets::ReadOptions read;
  bool force = false;
};

void add_read_options(Options& o, datasets::ReadOptions& read, bool with_range) {
  auto own = o.group("");
  own.add("--format", &read.format, "format of the file: auto, " + fact_format_names(), {.type = "NAME"});
  if (with_range)
    own.add("--limit", &read.limit, "facts to read; -1: all", {.limits = kCountOrAll})
        .add("--offset", &read.offset, "facts to leave out at the start", {.limits = kNonNegative});
  add_zsre_option(own, read);
  own.add("--sentiment", &read.sentiment, "side of ConvSent rows that becomes the target", {.choices = {"pos", "neg"}});
}

/// Writes the file again with what is fixed. A table becomes JSON, of which its own file is not the place. Returns the
/// number of rows that have no place there. Findings that cannot be mended in the text are fixable no longer.
size_t write_fixed(const datasets::FactSet& facts, std::vector<Finding>& findings, const datasets::FactSet& fixed,
                   const LintOptions& options, const datasets::ReadOptions& read) {
  const bool in_place = options.out.empty();
  if (!in_place) require_new(options.out, false);
  std::vector<std::string> unmended;
  auto text = datasets::fix_text(read_file(options.facts.file), facts, findings, read, &unmended);
  for (Finding& finding : findings)
    if (std::ranges::find(unmended, finding.where) != unmended.end()) finding.edit = {}, finding.remove = false;
  if (!text && in_place)
    throw Error(ErrorClass::kUnsupported,
                {options.facts.file, "a table, which would lose its form: fixed facts are written as JSON",
                 "a file of JSON", "write another file with --out"});
  if (!text && std::filesystem::path(options.out).extension() == ".csv")
    refuse({"--out", options.out + ", a table", "the name of a JSON file: fixed facts are written as JSON", ""});
  const size_t left_out = text ? 0 : facts.bad_rows.size() + facts.skipped.size();
  if (!text) text = datasets::format_facts(fixed.facts, fixed.format);
  write_file(in_place ? std::filesystem::canonical(options.facts.file) : std::filesystem::path(options.out), *text);
  return left_out;
}

nlohmann::ordered_json to_json(const std::vector<Finding>& findings, const datasets::FactSet& facts) {
  auto list = nlohmann::ordered_json::array();
  for (const auto& finding : findings) {
    nlohmann::ordered_json one = {{"severity", datasets::to_string(finding.severity)},
                                  {"check", finding.check},
                                  {"where", finding.where},
                                  {"text", finding.text},
                                  {"fixable", finding.fixable()}};
    if (const int64_t line = datasets::line_of(finding); line > 0) one["line"] = line;
    if (finding.fact != Finding::kNoFact) one["case_id"] = facts.facts[finding.fact].case_id;
    list.push_back(std::move(one));
  }
  return list;
}

std::string lint_text(const std::vector<Finding>& findings, const nlohmann::ordered_json& document) {
  std::string text;
  for (const auto& finding : findings)
    text += finding.where + ": " + std::string(datasets::to_string(finding.severity)) + ": " + finding.text + " [" +
            finding.check + (finding.fixable() ? ", fixable" : "") + "]\n";
  return text + counted(document["facts"], "fact") + " (" + document["format"].get<std::string>() +
         "): " + counted(document["errors"], "error") + ", " + counted(document["warnings"], "warning") + ", " +
         counted(document["notes"], "note") + "\n";
}

int run_lint(const LintOptions& options, const Common& common) {
  auto read = options.facts.read;
  read.bad_rows = datasets::BadRowPolicy::kSkip;
  read.allow_empty = true;
  const auto facts = datasets::load_facts(options.facts.file, read);
  auto findings = datasets::lint_facts(facts);
  size_t fixes = 0, applied = 0, left_out = 0, kept = 0;
  if (options.fix) {
    const auto fixed = datasets::fix_facts(facts, findings, &fixes);
    if (fixes > 0 || !options.out.empty()) left_out = write_fixed(facts, findings, fixed, options, read);
    kept = datasets::fix_facts(facts, findings, &applied).facts.size();  // without what has no place
  }
  std::map<Severity, size_t> counts, left;
  for (const auto& finding : findings) {
    ++counts[finding.severity];
    left[finding.severity] += !(options.fix && finding.fixable());
  }
  nlohmann::ordered_json document = {{"file", options.facts.file},
                                     {"format", facts.format},
                                     {"rows", facts.rows},
                                     {"facts", facts.facts.size()},
                                     {"errors", counts[Severity::kError]},
                                     {"warnings", counts[Severity::kWarning]},
                                     {"notes", counts[Severity::kNote]},
                                     {"findings", to_json(findings, facts)}};
  std::string text = lint_text(findings, document);
  if (options.fix) {
    document["fixed"] = applied;
    document["written"] = options.out.empty() ? options.facts.file : options.out;
    document["left_out"] = left_out;
    text += "fixes applied: " + std::to_string(applied) + ", " + counted(kept, "fact") + " in " +
            document["written"].get<std::string>() +
            (left_out > 0 ? "; " + counted(left_out, "row") + " that cannot be used left out" : "") +
            (fixes > applied
                 ? "; fixes left to you, since their rows have no place for them: " + std::to_string(fixes - applied)
                 : "") +
            "\n";
  }
  common.print(document, text);
  const bool bad = left[Severity::kError] > 0 || (options.strict && left[Severity::kWarning] > 0);
  return bad ? exit_code(ErrorClass::kCorruption) : 0;
}

int run_convert_facts(const ConvertFactsArguments& options, const Common& common) {
  if (std::filesystem::exists(options.out) && !options.force)
    refuse({options.out, "the file exists", "a new name", "give --force to replace it"});
  const auto report = datasets::convert_facts(options.in, options.out, options.to, options.read, common.log);
  common.print({{"in", options.in},
                {"out", options.out},
                {"from", report.from},
                {"to", report.to},
                {"facts", report.facts},
                {"lost", report.lost},
                {"zsre_target", report.alt ? nlohmann::ordered_json("alt") : nlohmann::ordered_json()}},
               counted(report.facts, "fact") + " from " + report.from + " to " + report.to + ": " + options.out +
                   (report.alt ? ", to be read with --zsre-target alt" : "") + "\n");
  return 0;
}

}  // namespace

VerbRun setup_lint(Options& o) {
  auto& options = o.arguments<LintOptions>();
  o.add("FACTS,--facts", &options.facts.file, "file of facts", {.type = "FILE", .required = true});
  add_read_options(o, options.facts.read, false);
  o.add("--fix", &options.fix, "apply the fixes that are clear, in place or to --out")
      .add("--out", &options.out, "where --fix writes", {.type = "FILE", .needs = "--fix"})
      .add("--strict", &options.strict, "warnings count as errors for the exit status");
  o.footer = kLintExamples;
  for (const auto& check : datasets::lint_checks())
    o.footer +=
        "\n  " + check.name + std::string(check.name.size() < 22 ? 22 - check.name.size() : 1, ' ') + check.meaning;
  return [&options](Common& common) { return run_lint(options, common); };
}

VerbRun setup_convert_facts(Options& o) {
  auto& options = o.arguments<ConvertFactsArguments>();
  o.add("IN", &options.in, "file of facts", {.type = "FILE", .required = true})
      .add("OUT", &options.out, "file to write", {.type = "FILE", .required = true})
      .add("--to", &options.to, "format to write: " + fact_format_names(true), {.type = "NAME", .required = true});
  add_read_options(o, options.read, true);
  o.add("--force", &options.force, "replace a file that is already there");
  o.footer = kConvertFactsExamples;
  return [&options](Common& common) { return run_convert_facts(options, common); };
}

}  // namespace emend::tools
