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

bool writable(const std::string& format) {
  const auto& all = datasets::fact_formats();
  return std::ranges::any_of(all, [&](const auto& f) { return f.name == format && f.writable; });
}

/// Writes the repaired facts in the format they came in. A file is only replaced if the format keeps everything.
void write_fixed(const datasets::FactSet& facts, const LintOptions& options) {
  if (!writable(facts.format))
    throw Error(ErrorClass::kUnsupported,
                {options.facts.file, "facts of format " + facts.format + " cannot be written",
                 "one of " + fact_format_names(true), "convert the file first: emend convert facts IN OUT --to jsonl"});
  const bool in_place = options.out.empty();
  if (!in_place) require_new(options.out, false);
  if (in_place) {
    auto lost = datasets::conversion_losses(facts.facts, facts.format);
    if (const auto kind = std::filesystem::path(options.facts.file).extension(); kind == ".csv" || kind == ".tsv")
      lost.insert(lost.begin(), "its form: facts are written as JSON");
    if (!lost.empty() || !facts.bad_rows.empty())
      throw Error(ErrorClass::kUnsupported,
                  {options.facts.file, "writing it again would lose " + (lost.empty() ? "its unusable rows" : lost[0]),
                   "a file that keeps everything", "write another file with --out"});
  }
  write_file(in_place ? std::filesystem::canonical(options.facts.file) : std::filesystem::path(options.out),
             datasets::format_facts(facts.facts, facts.format));
}

nlohmann::ordered_json to_json(const std::vector<Finding>& findings, const datasets::FactSet& facts) {
  auto list = nlohmann::ordered_json::array();
  for (const auto& finding : findings) {
    nlohmann::ordered_json one = {{"severity", datasets::to_string(finding.severity)},
                                  {"check", finding.check},
                                  {"where", finding.where},
                                  {"text", finding.text},
                                  {"fixable", finding.fixable()}};
    if (const size_t colon = finding.where.rfind(':'); colon != std::string::npos)
      one["line"] = std::strtoll(finding.where.c_str() + colon + 1, nullptr, 10);
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
  auto facts = datasets::load_facts(options.facts.file, read);
  const auto findings = datasets::lint_facts(facts);
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
    size_t applied = 0;
    const auto fixed = datasets::fix_facts(std::move(facts), findings, &applied);
    if (applied > 0 || !options.out.empty()) write_fixed(fixed, options);
    document["fixed"] = applied;
    document["written"] = options.out.empty() ? options.facts.file : options.out;
    text += "fixes applied: " + std::to_string(applied) + ", " + counted(fixed.facts.size(), "fact") + " in " +
            document["written"].get<std::string>() + "\n";
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
                {"lost", report.lost}},
               counted(report.facts, "fact") + " from " + report.from + " to " + report.to + ": " + options.out + "\n");
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
