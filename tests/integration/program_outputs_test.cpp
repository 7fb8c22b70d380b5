// What --save, --fix and the collapse guard do, and that no option of the contract is missing from the help.
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>

#include <sstream>

#include "support/program_fixture.h"

namespace emend::testing {
namespace program_outputs_test {

using nlohmann::json;

class ProgramOutputsTest : public ProgramTest {
 protected:
  /// What `emend bench` says of the two engines on the facts.
  [[nodiscard]] json bench(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"bench", "--model", path("model/"), "--json", "--quiet"};
    for (const auto& [name, file] : {std::pair("--facts", "facts.jsonl"), std::pair("--hparams", "hparams.yaml"),
                                     std::pair("--corpus", "corpus.txt"), std::pair("--cache", "cache")})
      words.insert(words.end(), {name, path(file)});
    words.insert(words.end(), more.begin(), more.end());
    return json::parse(must_run("emend", words).out);
  }
};

TEST_F(ProgramOutputsTest, AGgufFileHoldsTheEditedWeights) {
  must_run("memit_edit", edit({"--save", "gguf,model", "--eval", "none", "--quiet"}));
  const auto file = models::open_checkpoint(path("run/model.gguf")),
             folder = models::open_checkpoint(path("run/model")), base = models::open_checkpoint(path("model"));
  int changed = 0;
  for (const auto& tensor : folder->tensors()) {
    EXPECT_TRUE(at::equal(file->read(tensor.name), folder->read(tensor.name))) << tensor.name;
    changed += !at::equal(folder->read(tensor.name), base->read(tensor.name));
  }
  EXPECT_EQ(changed, 2);
  must_run("emend", {"generate", "--model", path("run/model.gguf"), "--prompt", "The Eiffel Tower is in the city of",
                     "--max-new-tokens", "3", "--json"});
}

// Places for an edit that takes neurons: the saved model is wider, and nothing of it is given away.
TEST_F(ProgramOutputsTest, AnEditThatTakesNeuronsGetsRoom) {
  write_file(folder_ / "latch.yaml", "layers: [1, 2]\nv_num_grad_steps: 2\ntext_tokens: 512\n");
  const auto latch = [&](const std::string& save, std::vector<std::string> more = {}) {
    std::filesystem::remove_all(folder_ / "run");
    more.insert(more.end(), {"--editor", "latch", "--hparams", path("latch.yaml"), "--eval", "none", "--save", save});
    return edit(more);
  };
  const auto run = [&](const std::vector<std::string>& arguments) {
    const auto result = must_run("memit_edit", arguments);
    return result.out;
  };
  EXPECT_NE(run(latch("model")).find("32 neurons more"), std::string::npos);
  EXPECT_EQ(results()["spare_neurons"], 32) << "one a layer, in whole blocks";
  const auto base = models::load_model(path("model")), saved = models::load_model(path("run/model"));
  const int64_t width = base.config().mlp_width;
  EXPECT_EQ(saved.config().mlp_width, width + 32);
  for (const auto& name : base.weight_names()) {
    at::Tensor was = base.weight(name), is = saved.weight(name);
    for (int64_t dim = 0; dim < was.dim(); ++dim) is = is.narrow(dim, 0, was.size(dim));
    EXPECT_TRUE(at::equal(is, was)) << name << ": the edit lies in the new neurons alone";
  }
  // The pack belongs to the wider model, and says how to make one.
  std::filesystem::copy_file(path("run/edit.safetensors"), path("wide.pack"));
  auto result = run_program("emend", {"apply", path("wide.pack"), "--model", path("model")});
  expect_ended(result, 2, {"emend convert, with 32 spare neurons"});
  must_run("emend", {"convert", path("model"), path("wide"), "--spare-neurons", "32"});
  result = must_run("emend", {"apply", path("wide.pack"), "--model", path("wide")});
  EXPECT_EQ(model_bytes("wide"), read_file(folder_ / "run" / "model" / "model.safetensors"));

  run(latch("pack,model"));
  EXPECT_EQ(results()["spare_neurons"], 0) << "a pack keeps the model's shapes";
  expect_error(latch("pack", {"--spare-neurons", "8"}), 2, {"--spare-neurons", "with --save pack", "emend convert"});
}

TEST_F(ProgramOutputsTest, LintRemarksAreReportedAndFixed) {
  write_file(folder_ / "facts.jsonl",
             "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n"
             "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n");
  auto result = must_run("memit_edit", edit({"--eval", "none"}));
  expect_ended(result, 0, {"facts.jsonl:2", "[duplicate]"});
  EXPECT_EQ(results()["lint"][0]["check"], "duplicate");
  EXPECT_EQ(results()["facts"], 2);
  std::filesystem::remove_all(folder_ / "run");
  result = must_run("memit_edit", edit({"--eval", "none", "--fix"}));
  EXPECT_EQ(results()["facts"], 1);
}

TEST_F(ProgramOutputsTest, TheGuardTakesABatchBack) {
  // No update is this small: every batch raises the alarm.
  const auto guarded = [&](const std::string& action, std::vector<std::string> more = {}) {
    std::filesystem::remove_all(folder_ / "run");
    more.insert(more.end(), {"--on-collapse", action, "--max-update", "1e-12", "--eval", "none", "--batch-size", "1",
                             "--save", "pack,model"});
    return run_program("memit_edit", edit(more));
  };
  auto result = guarded("warn");
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("may be broken"), std::string::npos) << result.err;
  EXPECT_EQ(results()["edits"]["applied"], 2);
  EXPECT_EQ(results()["guard"].size(), 2U);
  EXPECT_GT(results()["guard"][0]["divergence"].get<double>(), 0);
  EXPECT_EQ(results()["guard"][0]["alarms"].size(), 1U);

  result = guarded("skip");
  ASSERT_EQ(result.status, 4) << "no fact is left: " << result.err;
  EXPECT_EQ(results()["edits"], json({{"applied", 0}, {"said", 0}, {"not_said", 0}, {"failed", 2}}));
  EXPECT_TRUE(results()["weights_changed"].empty());
  EXPECT_EQ(model_bytes("run/model"), model_bytes());

  result = guarded("stop");
  EXPECT_EQ(result.status, 4) << result.err;
  EXPECT_EQ(results()["edits"]["failed"], 2);
  EXPECT_EQ(results()["guard"].size(), 1U) << "the second batch was not edited";

  result = guarded("revert");
  EXPECT_EQ(result.status, 4) << result.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "results.json"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "edit.safetensors"));
}

TEST_F(ProgramOutputsTest, GatesAskForFactsThatTheModelSays) {
  const auto status = [&](std::vector<std::string> more) {
    std::filesystem::remove_all(folder_ / "run");
    more.insert(more.end(), {"--eval", "none"});
    return run_program("memit_edit", edit(more)).status;
  };
  ASSERT_EQ(status({}), 0);
  const auto edits = results()["edits"];
  const double share = 100 * edits["said"].get<double>() / 2;
  EXPECT_EQ(edits["said"].get<int>() + edits["not_said"].get<int>(), edits["applied"].get<int>());
  EXPECT_EQ(status({"--strict"}), share == 100 ? 0 : 6);
  EXPECT_EQ(status({"--min-said", std::to_string(share) + "%"}), 0);
  if (share < 100) {
    EXPECT_EQ(status({"--min-said", std::to_string(share + 1)}), 6);
  }
  std::filesystem::remove_all(folder_ / "run");
  expect_error(edit({"--min-said", "half"}), 2, {"--min-said", "half", "95%"});
}

TEST_F(ProgramOutputsTest, BenchComparesTheEnginesInOneRun) {
  const json document = bench({"--bench-tokens", "300"});
  EXPECT_EQ(document["model"], "model");
  for (const char* phase : {"targets", "keys_insert", "statistics", "evaluate"}) {
    ASSERT_TRUE(document["phases"].contains(phase)) << phase;
    const auto& one = document["phases"][phase];
    EXPECT_NEAR(one["ratio"].get<double>(), one["reference_s"].get<double>() / one["fast_s"].get<double>(), 1e-9);
  }
  EXPECT_LT(document["phases"]["targets"]["gflop"].get<double>(),
            document["phases"]["targets"]["reference_gflop"].get<double>());
  EXPECT_LT(document["quality"]["z_relative_difference"].get<double>(), 1e-3);
  EXPECT_GT(document["machine"]["gemm_peak_gflops"]["float32"].get<double>(), 0);
  EXPECT_GT(document["peak_bytes"]["host"].get<int64_t>(), 0);
}

// Facts meet nobody on their core: a neighbour takes its share and no more. With threads that spin while they wait it
// was 10 to 18 times as long. The limits leave room for what else a machine does.
TEST_F(ProgramOutputsTest, BusyNeighboursTakeTheirShareOnly) {
  const json document =
      bench({"--phases", "targets", "--threads", "2", "--neighbours", "1,2", "--over-threads", "1,3"});
  EXPECT_EQ(document["machine"]["threads"], 2);
  ASSERT_EQ(document["neighbours"].size(), 2U);
  EXPECT_LT(document["neighbours"][0]["ratio"].get<double>(), 4) << document["neighbours"];
  EXPECT_LT(document["neighbours"][1]["ratio"].get<double>(), 6) << document["neighbours"];
  ASSERT_EQ(document["over_threads"].size(), 2U);
  EXPECT_EQ(document["over_threads"][1]["threads"], 3);
}

TEST_F(ProgramOutputsTest, BenchShowsHowCostGrows) {
  const auto result = must_run(
      "emend", {"bench", "--shape", "gpt2", "--shape-layers", "7", "--limit", "2", "--steps", "2", "--bench-tokens",
                "64", "--growth", "1,3", "--widths", "64,128", "--compute-dtype", "float32", "--json", "--quiet"});
  const json document = json::parse(result.out);
  ASSERT_EQ(document["growth"].size(), 2U);
  EXPECT_EQ(document["growth"][1]["facts"], 3);
  ASSERT_EQ(document["width_growth"].size(), 2U);
  const json &narrow = document["width_growth"][0], &wide = document["width_growth"][1];
  EXPECT_EQ(narrow["width"], 64);
  // Layers grow with the square, the head in proportion.
  const double ratio = wide["gflop_per_fact"].get<double>() / narrow["gflop_per_fact"].get<double>();
  EXPECT_GT(ratio, 2);
  EXPECT_LT(ratio, 4);
}

// Nothing that was asked for is left out without a word.
TEST_F(ProgramOutputsTest, BenchTimesWhatItIsAskedForOrRefuses) {
  const std::vector<std::string> shape = {"bench", "--shape", "gpt2", "--shape-layers", "1", "--phases"};
  for (const auto& [more, word] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"evaluate"}, "evaluate with --shape"},
           {{"statistics,evaluate"}, "evaluate with --shape"},
           {{"statistics", "--growth", "2"}, "--growth"},
           {{"statistics", "--over-threads", "1"}, "--over-threads"}}) {
    auto arguments = shape;
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_ended(run_program("emend", arguments), 2, {word});
  }
  expect_ended(run_program("emend", {"bench", "--editor", "ft", "--growth", "2"}), 2,
               {"--growth: an editor without targets, ft"});
}

// The options that scripts rely on.
TEST(ProgramOptions, TheHelpHasEveryOptionOfTheContract) {
  const auto help = run_program("memit_edit", {"--help"});
  ASSERT_EQ(help.status, 0);
  for (const char* option :
       {"--model",      "--facts",       "--editor",       "--hparams",     "--set",        "--out",
        "--format",     "--limit",       "--offset",       "--batch-size",  "--eval",       "--eval-at",
        "--generation", "--corpus",      "--stats-tokens", "--stats-cache", "--device-map", "--max-memory",
        "--dtype",      "--stats-dtype", "--solve-dtype",  "--engine",      "--save",       "--seed",
        "--resume",     "--dry-run",     "--strict",       "--json",        "--quiet",      "--log-file"}) {
    const std::string text = option;
    size_t at = help.out.find(text);
    while (at != std::string::npos && std::isalnum(static_cast<unsigned char>(help.out[at + text.size()])))
      at = help.out.find(text, at + 1);
    EXPECT_NE(at, std::string::npos) << option;
  }
  EXPECT_EQ(run_program("emend", {"edit", "--help"}).out.size() > 1000, true);
}

TEST(ProgramOptions, EveryVerbThatIsListedHasHelpOfItsOwn) {
  const auto help = run_program("emend", {"--help"});
  ASSERT_EQ(help.status, 0);
  std::istringstream lines(help.out.substr(help.out.find("Edit and judge:")));
  int verbs = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string verb;
    if (!line.starts_with("  ") || line.starts_with("   ") || !(words >> verb)) continue;
    const auto one = run_program("emend", {verb, "--help"});
    EXPECT_EQ(one.status, 0) << verb;
    EXPECT_NE(one.out.find("emend " + verb), std::string::npos) << one.out;
    EXPECT_NE(one.out.find("--"), std::string::npos) << verb;
    EXPECT_TRUE(one.err.empty()) << one.err;
    ++verbs;
  }
  EXPECT_GE(verbs, 14);
}

}  // namespace program_outputs_test
}  // namespace emend::testing
