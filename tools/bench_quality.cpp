#include "benchmarks.h"

#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/evaluation/quality.h>
#include <emend/workflow/checkpoint.h>
#include <emend/workflow/variants.h>

#include <algorithm>
#include <set>

namespace emend::tools {
namespace {

using workflow::RunOptions;

// Options of an edit that tell the variants apart, and those that name places or decide nothing.
const std::set<std::string> kOfVariants = {"--editor", "--hparams", "--set", "--seed", "--out", "--resume"};
const std::set<std::string> kIdle = {"--out",        "--resume",  "--cache", "--stats-cache", "--device-map",
                                     "--max-memory", "--threads", "--json",  "--quiet",       "--log-file"};

// As words of a command line; nothing for a flag that is not set.
void add_words(const Option& option, const std::string& name, std::vector<std::string>& words) {
  const auto add = [&](const std::string& value) { words.insert(words.end(), {name, value}); };
  if (option.is_flag()) {
    if (*std::get<bool*>(option.value)) words.push_back(name);
  } else if (const auto* many = std::get_if<std::vector<std::string>*>(&option.value); many && !option.list) {
    for (const auto& value : **many) add(value);
  } else {
    add(option.text());
  }
}

struct Told {
  nlohmann::json settings = nlohmann::json::object();  // everything that decides a result, by name
  std::vector<std::string> command = {"memit_edit"};   // what is not a default
};

Told told(const Options& o) {
  Told all;
  const Command edit(verbs().front());
  for (const auto& option : o.all()) {
    const std::string name = option.spellings()[0];
    const Option* plain = edit.options.find(name);
    if (!plain) continue;
    const bool flagged = option.is_flag() && *std::get<bool*>(option.value);
    if (!kIdle.contains(name))
      all.settings[field_name(name)] = option.is_flag() ? (flagged ? "yes" : "no") : option.text();
    if (kOfVariants.contains(name) || name == "--json" || name == "--quiet" || name == "--log-file") continue;
    if (flagged || (!option.is_flag() && option.text() != plain->text())) add_words(option, name, all.command);
  }
  return all;
}

}  // namespace

void add_quality_options(Options& o, QualityArguments& quality, RunOptions& edit) {
  o.group("Comparison")
      .add("--quality", &quality.wanted,
           "compare editors on the same facts instead of timing the engines: one run for each in a folder of --out, "
           "then quality.json, quality.html and a table in Markdown",
           {.needs = "--out"})
      .add("--editors", &quality.editors,
           "EDITOR or \"EDITOR: KEY=VALUE …\", with commas between several; hparams=FILE|NAME names a preset",
           {.type = "LIST", .needs = "--quality"})
      .add("--seeds", &quality.seeds, "each editor with each of these seeds",
           {.limits = kNonNegative, .list = true, .needs = "--quality"})
      .add("--out", &edit.out, "folder of the comparison; alone: its table and page are made again",
           {.type = "DIR", .needs = "--quality"})
      .add("--resume", &edit.resume,
           "go on with the comparison in --out; --editors are added to it, all other options are those that it began "
           "with, but for --cache, --stats-cache and --log-file",
           {.needs = "--quality"});
  o.at("--editor").shown = "memit";
  o.at("--editor").excludes = "--quality";
  o.at("--seed").excludes = "--seeds";
  for (const auto& option : std::vector<Option>(o.all())) {
    const std::string name = option.spellings()[0];
    const bool judging = (option.group == "Evaluation" && name != "--cache") || option.group == "Guards";
    if (judging || name == "--batch-size" || name == "--protocol" || name == "--engine") o.at(name).needs = "--quality";
  }
  o.earlier = [&] {
    return quality.wanted && edit.resume ? workflow::RunCheckpoint::command_of(edit.out) : std::vector<std::string>();
  };
}

int run_quality(const Options& o, const QualityArguments& quality, RunOptions edit, Common& common) {
  const auto lacks = [](const std::string& name, const std::string& got, const std::string& advice) {
    refuse({setting(name), got, "what is to be compared", advice});
  };
  if (!quality.editors.empty()) {
    if (edit.facts.file.empty()) lacks("facts", "no facts", "name a file of facts");
    if (edit.model.model.empty()) edit.model.model = default_model_path().string();
    workflow::Comparison comparison;
    comparison.variants = workflow::parse_variants(quality.editors, quality.seeds, edit.seed);
    auto words = told(o);
    comparison.settings = std::move(words.settings);
    comparison.command = std::move(words.command);
    comparison.common = std::move(edit);
    const std::string out = comparison.common.out;
    workflow::compare_variants(std::move(comparison), common);
    edit.out = out;
  } else if (edit.resume) {
    lacks("resume", edit.out + " holds no comparison that was begun", "begin one with " + setting("editors"));
  } else if (!edit.facts.file.empty()) {
    lacks("editors", "no editors", "leave " + setting("facts") + " out to draw what is in " + edit.out);
  }
  const auto document = workflow::draw_comparison(edit.out);
  common.print(document, evaluation::quality_table(document) + "\npage: " + edit.out + "/quality.html\n");
  return 0;
}

}  // namespace emend::tools
