// Made-up runs in the folder of a comparison: two editors with two seeds, one that failed, one that is still to be run.
#pragma once

#include <emend/evaluation/quality.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/sample_run.h"

namespace emend::testing {

inline nlohmann::json sample_free(double level) {
  return {{"edit_begins", level},
          {"paraphrase_begins", level - 10},
          {"neighborhood_ten_tokens_kept", 120 - level},
          {"neighborhood_kl", level / 1000},
          {"n", 40},
          {"ci95",
           {{"edit_begins", {level - 8, level + 1}},
            {"paraphrase_begins", {level - 20, level - 2}},
            {"neighborhood_ten_tokens_kept", {111 - level, 128 - level}}}}};
}

/// What a lifelong run has measured: the first facts hold `held` percent in the end, LAMBADA falls from 30 to
/// `lambada`.
inline nlohmann::json sample_sequence(double held, double lambada) {
  auto entries = nlohmann::json::array();
  for (int step = 1; step <= 4; ++step) {
    const double way = (step - 1) / 3.0;
    entries.push_back({{"edits", 50 * step},
                       {"first", 100 - way * (100 - held)},
                       {"last", 99.0},
                       {"all", 99 - way * (99 - held)},
                       {"paraphrase", 80.0},
                       {"neighborhood", nullptr},
                       {"free", sample_free(90 - 10 * way)},
                       {"health", {{"lambada", 30 - way * (30 - lambada)}, {"wikitext2_perplexity", 20 + way}}},
                       {"seconds", 55.0 * step},
                       {"peak_bytes", {{"host", 1500000000 + step}}}});
  }
  return entries;
}

/// Writes the runs and returns the rows of their table. `lifelong`: sequences.
inline std::vector<evaluation::QualityEntry> sample_comparison(const std::filesystem::path& folder, bool lifelong) {
  std::vector<evaluation::QualityEntry> entries;
  for (const char* editor : {"memit", "latch"})
    for (uint32_t seed = 0; seed < 2; ++seed) {
      const std::string name = std::string(editor) + ", seed " + std::to_string(seed);
      const bool better = std::string(editor) == "latch";
      auto run = sample_run(40, seed + (better ? 2 : 0));
      run.results["editor"] = editor;
      run.results["seed"] = seed;
      run.results["command"] = {"memit_edit", "--editor", editor};
      run.results["metrics"]["free"] = {
          {"pre", sample_free(10)}, {"retrieval", sample_free(70)}, {"post", sample_free((better ? 95 : 80) + seed)}};
      if (lifelong) run.results["lifelong"] = sample_sequence(better ? 96 : 61, better ? 28 : 17);
      if (lifelong && better) run.results["lifelong"].back()["counts"] = {{"first", 100}, {"last", 50}, {"all", 150}};
      write_sample(folder / (editor + std::to_string(seed)), run);
      entries.push_back({name, editor, folder / (editor + std::to_string(seed))});
    }
  std::filesystem::create_directories(folder / "ft");
  write_file(folder / "ft" / "failure.json",
             nlohmann::json{{"error", "layer 3: not | finite"}, {"lifelong", nlohmann::json::array()}}.dump());
  entries.push_back({"ft: lr=1", "ft: lr=1", folder / "ft"});
  entries.push_back({"rome", "rome", folder / "rome"});
  return entries;
}

}  // namespace emend::testing
