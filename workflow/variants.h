// Several editors on the same facts: one run (run.h) for each, in a folder of its own, and the table of all.
//
//   Comparison comparison{.common = {.facts = {.file = "facts.json"}, .out = "runs/compared"}};
//   comparison.variants = parse_variants({"memit", "latch", "memit: clamp_norm_factor=0.4"}, {0, 1}, 0);
//   compare_variants(std::move(comparison), handles);      // runs what is not finished
//   std::cout << evaluation::quality_table(draw_comparison("runs/compared"));
//
// Goals: it can be stopped at any point and taken up again; a variant that fails is a row that says so. Non-goals:
// figures of its own: the table holds those of the runs (evaluation/quality.h).
#pragma once

#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::workflow {

/// An editor as it is compared with others.
struct Variant {
  std::string name;              ///< "memit: clamp_norm_factor=0.4, seed 1"
  std::string group;             ///< the name without the seed
  std::string folder;            ///< of its run, within that of the comparison
  std::string editor, hparams;   ///< hparams: file or preset; empty: those of RunOptions
  std::vector<std::string> set;  ///< KEY=VALUE, over those of RunOptions
  uint64_t seed = 0;
};

/// Reads "EDITOR" or "EDITOR: KEY=VALUE KEY=VALUE …", several of them with commas between; "hparams=FILE|NAME" names a
/// file or preset. Each is taken with every seed of `seeds`, or with `seed` where there are none. Throws
/// Error(kInvalidArgument) for an editor that is not known, a setting that is none, and what is named twice.
[[nodiscard]] std::vector<Variant> parse_variants(const std::vector<std::string>& texts,
                                                  const std::vector<int64_t>& seeds, uint64_t seed);

struct Comparison {
  RunOptions common;              ///< `out` is the folder of the comparison; `resume` goes on with what is there
  std::vector<Variant> variants;  ///< with `resume`, besides those that the folder knows of
  nlohmann::json settings;        ///< what has to be the same when it is resumed, by name
  /// The words of memit_edit that `common` stands for, without what tells the variants apart: for their reports.
  std::vector<std::string> command;
};

/// Runs every variant that is not finished, in order. What is wrong with the request is thrown before anything runs: as
/// load_named_facts and find_hparams throw it; Error(kInvalidArgument) if the folder holds something else, or an
/// earlier comparison without `resume`, or one with other settings; the folder is then as before. A run that throws
/// leaves failure.json in its folder and the next one begins; but Error(kCancelled) and Error(kIo) go on to the caller.
/// The caller's `lent.command_line` is kept for resuming.
void compare_variants(Comparison comparison, Handles& lent);

/// Makes quality.json and quality.html of what the folder holds: the variants of a comparison, or any runs in it.
/// Returns the document. Throws Error(kNotFound) if there is none of either, and what quality_document throws.
nlohmann::json draw_comparison(const std::filesystem::path& folder);

}  // namespace emend::workflow
