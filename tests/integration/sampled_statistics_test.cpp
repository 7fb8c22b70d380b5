// Second moments of text that the model samples itself serve as well as those of a corpus: the same facts, written once
// with each, give the same score. This is why nothing has to be downloaded for an edit. Half as much text as presets
// ask for is enough to see it.
#include <gtest/gtest.h>

#include <cmath>

#include "support/default_model.h"
#include "support/program_fixture.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"

namespace emend::testing {
namespace sampled_statistics_test {

using nlohmann::json;

constexpr int kFacts = 10;

json run(const std::filesystem::path& folder, const std::string& name, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"--model",         default_model_path().string(),
                                        "--editor",        "memit",
                                        "--facts",         (shared_dir() / "data" / "counterfact_full.json").string(),
                                        "--offset",        "720",
                                        "--limit",         std::to_string(kFacts),
                                        "--cache",         (folder / "cache").string(),
                                        "--eval",          "counterfact",
                                        "--compute-dtype", "auto",
                                        "--show",          "0",
                                        "--save",          "none",
                                        "--out",           (folder / name).string(),
                                        "--json",          "--quiet"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const auto result = must_run("memit_edit", arguments);
  return result.status == 0 ? json::parse(result.out) : json();
}

TEST(SampledStatistics, GiveTheScoreThatACorpusGives) {
  EMEND_NEEDS_DEFAULT_MODEL();
  EMEND_NEEDS_SHARED();
  const TemporaryFolder folder("sampled_statistics");
  const json sampled = run(folder.path(), "sampled", {"--stats-tokens", "8000"});
  const json corpus =
      run(folder.path(), "corpus",
          {"--corpus", (shared_dir() / "data" / "wiki_sample.jsonl").string(), "--stats-tokens", "18000"});
  ASSERT_FALSE(sampled.is_null() || corpus.is_null());
  EXPECT_LT(sampled["statistics"]["tokens"].get<int64_t>(), corpus["statistics"]["tokens"].get<int64_t>() / 2);
  const auto& one = sampled["metrics"]["counterfact"]["post"];
  const auto& other = corpus["metrics"]["counterfact"]["post"];
  std::cout << "[ figure   ] score with " << sampled["statistics"]["tokens"] << " sampled tokens " << one["score"]
            << ", with " << corpus["statistics"]["tokens"] << " of a corpus " << other["score"] << '\n';
  EXPECT_GE(one["efficacy_success"].get<double>(), 95);
  EXPECT_GE(other["efficacy_success"].get<double>(), 95);
  EXPECT_NEAR(one["score"].get<double>(), other["score"].get<double>(), 3.0);
}

}  // namespace sampled_statistics_test
}  // namespace emend::testing
