// The programs as a user meets them: what they print, where they write, how they fail.
#include <emend/core/safetensors.h>
#include <gtest/gtest.h>

#include "support/program_fixture.h"

namespace emend::testing {
namespace program_test {

using nlohmann::json;

TEST_F(ProgramTest, EditsAndWritesTheRunFolder) {
  const auto result = must_run("memit_edit", edit({"--save", "pack,model,peft", "--json", "--quiet"}));
  const json printed = json::parse(result.out), results = this->results();
  EXPECT_EQ(printed["weights_changed"], results["weights_changed"]);
  EXPECT_EQ(results["schema"], 1);
  EXPECT_EQ(results["editor"], "memit");
  EXPECT_EQ(results["facts"], 2);
  EXPECT_EQ(results["model"]["family"], "llama");
  EXPECT_EQ(results["edits"]["applied"].get<int>() + results["edits"]["failed"].get<int>(), 2);
  EXPECT_EQ(results["weights_changed"],
            json({"model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"}));
  for (const char* phase : {"load", "statistics", "targets", "insert", "evaluate", "total"})
    EXPECT_TRUE(results["seconds"].contains(phase)) << phase;
  for (const char* file : {"cases.jsonl", "run.jsonl", "report.html", "edit.safetensors", "model/config.json",
                           "model/model.safetensors", "model/tokenizer.json", "adapter/adapter_config.json"})
    EXPECT_TRUE(std::filesystem::exists(folder_ / "run" / file)) << file;
  EXPECT_EQ(cases().size(), 2U);
  for (const json& one : cases())
    for (const char* key : {"case_id", "subject", "prompt", "target", "steps", "loss", "status", "tokens", "metrics"})
      EXPECT_TRUE(one.contains(key)) << key;
  EXPECT_NE(model_bytes("run/model"), model_bytes());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "checkpoint"));
  no_temporaries();
}

TEST_F(ProgramTest, RevertGivesBackTheBytes) {
  must_run("memit_edit", edit({"--save", "pack,model"}));
  const std::string original = model_bytes(), pack = path("run/edit.safetensors");
  auto result = must_run("emend", {"revert", "--all", "--model", path("run/model")});
  EXPECT_EQ(model_bytes("run/model"), original);
  result = must_run("emend", {"apply", pack, "--model", path("model"), "--out", path("other")});
  EXPECT_EQ(model_bytes(), original);
  EXPECT_NE(model_bytes("other"), original);
  result = run_program("emend", {"list", "--model", path("other"), "--json"});
  EXPECT_TRUE(json::parse(result.out)["edits"][0]["active"].get<bool>());
  result = must_run("emend", {"revert", pack, "--model", path("other")});
  EXPECT_EQ(model_bytes("other"), original);
}

TEST_F(ProgramTest, EvalOfAPackShowsBothStates) {
  must_run("memit_edit", edit({"--eval", "none"}));
  const auto result =
      must_run("emend", {"eval", "--model", path("model"), "--facts", path("facts.jsonl"), "--pack",
                         path("run/edit.safetensors"), "--cache", path("cache"), "--eval", "counterfact", "--json"});
  const json document = json::parse(result.out);
  EXPECT_TRUE(document["metrics"]["pre"].contains("counterfact"));
  EXPECT_TRUE(document["metrics"]["post"]["counterfact"].contains("efficacy_success"));
}

TEST_F(ProgramTest, RefusesBadOptions) {
  expect_error(edit({"--editor", "memitt"}), 2, {"memitt", "did you mean \"memit\"?"});
  expect_error(edit({"--no-such-option"}), 2, {"--no-such-option"});
  expect_error(edit({"--set", "v_lrr=0.1"}), 2, {"v_lrr", "did you mean \"v_lr\"?"});
  expect_error(edit({"--set", "clamp_norm_factor=-1"}), 2, {"clamp_norm_factor"});
  expect_error(edit({"--set", "layers=[9]"}), 2, {"layers", "9"});
  expect_error(edit({"--dtype", "float16"}), 2, {"--dtype", "float32"});
  expect_error(edit({"--eval", "counterfacts"}), 2, {"counterfacts", "counterfact"});
  expect_error(edit({"--eval-at", "sometimes"}), 2, {"--eval-at"});
}

TEST_F(ProgramTest, TheFileOfHyperParametersChoosesTheEditor) {
  const std::string values = tiny_hparams("[1]");
  write_file(folder_ / "ee.yaml", "alg_name: ROME\n" + values);
  const auto chosen = must_run("memit_edit", edit({"--hparams", path("ee.yaml"), "--eval", "none", "--json"}));
  EXPECT_EQ(json::parse(chosen.out)["editor"], "rome");
  std::filesystem::remove_all(folder_ / "run");
  expect_error(edit({"--hparams", path("ee.yaml"), "--editor", "memit"}), 2,
               {"ee.yaml", "alg_name: ROME", "--editor memit"});
  write_file(folder_ / "ee.yaml", "alg_name: SERAC\n" + values);
  expect_error(edit({"--hparams", path("ee.yaml")}), 2, {"SERAC", "one of latch"});
}

TEST_F(ProgramTest, ContradictionsAreErrorsUnlessInsistedOn) {
  write_file(folder_ / "facts.jsonl",
             "{\"prompt\": \"{} is in\", \"subject\": \"Caf\u00e9 Central\", \"target_new\": \"Rome\"}\n"
             "{\"prompt\": \"{} is in\", \"subject\": \"Cafe\u0301 Central\", \"target_new\": \"Oslo\"}\n");
  EXPECT_EQ(run_program("emend", {"lint", path("facts.jsonl")}).status, 3);
  expect_error(edit({"--eval", "none"}), 3, {"facts.jsonl:2", "the same prompt", "--allow-conflicts"});
  expect_error({"--facts", path("facts.jsonl"), "--model", path("no-model")}, 3,
               {"facts.jsonl:2", "the same prompt"});  // before a model is looked for
  must_run("memit_edit", edit({"--eval", "none", "--allow-conflicts"}));
  // A long sequence corrects what it said before.
  const auto corrected =
      must_run("memit_edit",
               edit({"--eval", "none", "--protocol", "lifelong", "--batch-size", "1", "--out", path("corrected")}));
  EXPECT_NE(corrected.err.find("[contradiction]"), std::string::npos) << corrected.err;
}

TEST_F(ProgramTest, OneValueOfAListNeedsNoBrackets) {
  const auto result = must_run("memit_edit", edit({"--set", "layers=1", "--eval", "none", "--json"}));
  EXPECT_EQ(json::parse(result.out)["hparams"]["layers"], json({1}));
}

TEST_F(ProgramTest, AnEditThatBarelyMovesAnythingSaysSo) {
  expect_ended(must_run("memit_edit", edit({"--set", "mom2_update_weight=1000000000", "--eval", "none"})), 0,
               {"barely moves anything", "mom2_update_weight"});
  int not_said = 0;
  for (const json& one : cases()) {  // each fact says so as well
    if (one["verdict"] != "not_said") continue;
    ++not_said;
    EXPECT_NE(one["reason"].get<std::string>().find("of the change it asks for; lower mom2_"), std::string::npos);
  }
  EXPECT_GT(not_said, 0);
}

TEST_F(ProgramTest, TextOfOthersDoesNotSteerTheTerminal) {
  write_file(folder_ / "facts.jsonl",
             "{\"prompt\": \"{} is in\", \"subject\": \"The \\u001b[31mLouvre\\u202e\", \"target_new\": \"Rome\"}\n");
  const auto result = must_run("memit_edit", edit({"--eval", "none"}));
  for (const auto& text :
       {result.out, result.err, read_file(folder_ / "run" / "results.json"), read_file(folder_ / "run" / "run.jsonl"),
        read_file(folder_ / "run" / "cases.jsonl"), read_file(folder_ / "run" / "report.html")}) {
    EXPECT_EQ(text.find('\x1b'), std::string::npos) << text.substr(0, 2000);
    EXPECT_EQ(text.find("\u202e"), std::string::npos);
  }
}

TEST_F(ProgramTest, EqualRunsHaveEqualResultsAndPacksWhateverTheCacheHeld) {
  const auto results = [&](const std::string& out) {
    const auto result = must_run("memit_edit", edit({"--seed", "3", "--eval", "none", "--out", path(out), "--json"}));
    json document = json::parse(result.out);
    for (const char* key : {"seconds", "peak_bytes", "cache", "command"}) document.erase(key);
    return document;
  };
  EXPECT_EQ(results("first"), results("second"));
  EXPECT_EQ(read_file(folder_ / "first" / "edit.safetensors"), read_file(folder_ / "second" / "edit.safetensors"));
}

TEST(ProgramWords, WrongOnesGetASuggestion) {
  auto result = run_program("emend", {"edti"});
  expect_ended(result, 2, {"did you mean \"edit\"?"});
  expect_ended(run_program("memit_edit", {"--facts", "f", "--batch-sise", "3"}), 2, {"did you mean \"--batch-size\"?"});
  must_run("memit_edit", {"--version"});
  EXPECT_EQ(run_program("emend", {}).status, 2);
  EXPECT_EQ(run_program("emend", {"help", "lint"}).out, run_program("emend", {"lint", "--help"}).out);
  must_run("emend", {"help", "convert", "facts"});
  const std::string facts = std::string(EMEND_SOURCE_DIR) + "/datasets/emend_facts.json";
  result = run_program("memit_edit", {"--facts", facts, "--model", "org/absent"});
  EXPECT_NE(result.err.find("hf download org/absent"), std::string::npos) << result.err;
}

TEST_F(ProgramTest, RefusesBadFacts) {
  const auto facts = [&](const std::string& text) {
    write_file(folder_ / "bad.json", text);
    return edit({"--facts", path("bad.json")});
  };
  expect_error(edit({"--facts", path("absent.json")}), 3, {"absent.json"});
  expect_error(facts(""), 3, {"bad.json", "empty"});
  expect_error(facts("{\"prompt\": \"{} is\", \"subject\": "), 3, {"bad.json"});
  expect_error(facts("{\"prompt\": \"Nobody is in\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n"),
               3, {"bad.json:1", "Eiffel"});
  expect_error(facts("{\"prompt\": \"{} is in\", \"subject\": \"X\", \"target_new\": \"\xff\xfe\"}\n"), 3,
               {"bad.json", "UTF-8"});
  expect_error(facts("{\"prompt\": \"{} is in\", \"subject\": 7, \"target_new\": \"Rome\"}\n"), 3,
               {"bad.json:1", "subject"});
}

TEST_F(ProgramTest, RefusesBadModels) {
  expect_error(edit({"--model", path("nothing")}), 3, {"nothing"});
  std::filesystem::copy(folder_ / "model", folder_ / "broken");
  const std::string bytes = model_bytes("broken");
  write_file(folder_ / "broken" / "model.safetensors", bytes.substr(0, bytes.size() / 2));
  expect_error(edit({"--model", path("broken")}), 3, {"model.safetensors"});
  write_file(folder_ / "broken" / "model.safetensors", bytes);
  write_file(folder_ / "broken" / "config.json", "{\"model_type\": \"llama\"}");
  expect_error(edit({"--model", path("broken")}), 3, {"config.json", "hidden_size"});
  write_file(folder_ / "broken" / "config.json", "{\"model_type\": \"lama\"}");
  expect_error(edit({"--model", path("broken")}), 3, {"lama", "llama"});
  auto config = json::parse(read_file(folder_ / "model" / "config.json"));
  config["intermediate_size"] = 40;
  write_file(folder_ / "broken" / "config.json", config.dump());
  expect_error(edit({"--model", path("broken")}), 3, {"mlp", "40"});
}

TEST_F(ProgramTest, AFullDiskLeavesNothingBehind) {
  // The pack is larger than the limit; logs and small files are not.
  ProgramOptions options;
  options.file_size_limit = 6000;
  std::filesystem::remove_all(folder_ / "cache");
  expect_error(edit({"--eval", "none", "--stats-cache", path("cache")}), 3, {"cannot write"}, options);
}

// What a signal would stop is gone by then.
TEST_F(ProgramTest, ASignalAfterTheLastOutputIsNoCrash) {
  for (const int signal : {SIGINT, SIGTERM, SIGINT, SIGTERM}) {
    ProgramOptions options;
    options.signal = signal;
    options.signal_when = "no edits";
    const auto result = run_program(
        "emend", {"list", "--model", std::string(EMEND_SOURCE_DIR) + "/tests/fixtures/tiny_llama"}, options);
    EXPECT_TRUE(result.status == 0 || result.status == 128 + signal) << result.status << result.out << result.err;
    EXPECT_NE(result.out.find("no edits"), std::string::npos) << result.out;
  }
}

TEST_F(ProgramTest, CtrlCSavesAndResumesToTheSamePack) {
  const auto slow = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.end(), {"--editor", "rome", "--hparams", path("rome.yaml"), "--eval", "none", "--out", path(out),
                             "--set", "v_num_grad_steps=60", "--seed", "5"});
    return edit(more);
  };
  must_run("memit_edit", slow("whole", {}));
  ProgramOptions options;
  options.signal_when = "edited facts 1-1";
  const auto interrupted = run_program("memit_edit", slow("cut", {}), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  EXPECT_EQ(interrupted.status, 130) << interrupted.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "cut" / "results.json"));
  EXPECT_NE(interrupted.err.find("--out " + path("cut") + " with --resume goes on"), std::string::npos);
  const auto anew = run_program("memit_edit", slow("cut", {}));
  EXPECT_EQ(anew.status, 2) << "what an interrupted run has done is not thrown away";
  EXPECT_NE(anew.err.find("holds a run that was interrupted"), std::string::npos) << anew.err;
  const auto facts = read_file(folder_ / "facts.jsonl");
  write_file(folder_ / "facts.jsonl", facts + facts);
  expect_error({"--out", path("cut"), "--resume"}, 2, {"the facts are others now"});
  write_file(folder_ / "facts.jsonl", facts);
  const auto line = folder_ / "cut" / "checkpoint" / "command.json";
  const auto command = read_file(line);
  write_file(line, "[\"memit_edit\", 5");
  expect_error({"--out", path("cut"), "--resume"}, 3, {"command.json", "no command line"});
  write_file(line, command);
  // The folder says everything else.
  expect_ended(must_run("memit_edit", {"--out", path("cut"), "--resume", "--show", "1", "--seed=5"}), 0,
               {"going on after 1 finished", "--cache of the line that it began with is not taken over"});
  EXPECT_EQ(read_file(folder_ / "cut" / "edit.safetensors"), read_file(folder_ / "whole" / "edit.safetensors"));
  auto told = results("cut")["command"].get<std::vector<std::string>>();
  auto expected = slow("cut", {});
  for (const char* name : {"--cache", "--seed"}) {
    const auto place = std::ranges::find(expected, name);
    expected.erase(place, place + 2);
  }
  expected.insert(expected.end(), {"--show", "1", "--seed=5"});
  told.erase(told.begin());  // the program
  EXPECT_EQ(told, expected) << "the line that it began with, and what was given in its place";
}

// Also in its first batch a run that was stopped can go on with the options that it had.
TEST_F(ProgramTest, CtrlCInTheFirstBatchKeepsTheRun) {
  const auto facts = edit({"--editor", "rome", "--hparams", path("rome.yaml"), "--out", path("cut"), "--eval",
                           "counterfact", "--set", "v_num_grad_steps=60"});
  ProgramOptions options;
  options.signal_when = "evaluated the unedited model";
  const auto interrupted = run_program("memit_edit", facts, options);
  if (interrupted.status == 0 || interrupted.err.find("edited facts 1-1") != std::string::npos)
    GTEST_SKIP() << "the batch ended before the signal reached it";
  expect_ended(interrupted, 130, {"--out " + path("cut") + " with --resume goes on"});
  must_run("memit_edit", {"--out", path("cut"), "--resume"});
  EXPECT_TRUE(std::filesystem::exists(folder_ / "cut" / "edit.safetensors"));
}

TEST_F(ProgramTest, ResumingNothingAsksForFacts) {
  expect_error({"--out", path("nothing"), "--resume"}, 2, {"nothing holds no run", "--facts"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "nothing"));
}

TEST_F(ProgramTest, ResumingWithOtherSettingsIsRefused) {
  ProgramOptions options;
  options.signal_when = "edited facts 1-1";
  const std::vector<std::string> rome = {"--editor", "rome", "--hparams", path("rome.yaml"),
                                         "--eval",   "none", "--set",     "v_num_grad_steps=60"};
  const auto interrupted = run_program("memit_edit", edit(rome), options);
  if (interrupted.status == 0) GTEST_SKIP() << "the run ended before the signal reached it";
  auto other = rome;
  other.insert(other.end(), {"--resume", "--seed", "9"});
  expect_error(edit(other), 2, {"seed"});
  expect_error({"--out", path("run"), "--resume", "--seed", "9"}, 2, {"seed"});
}

TEST_F(ProgramTest, AFolderInUseOrWithResultsIsRefused) {
  must_run("memit_edit", edit({"--eval", "none"}));
  const auto again = run_program("memit_edit", edit({"--eval", "none"}));
  expect_ended(again, 2, {"earlier run"});
  EXPECT_EQ(again.err.find("--resume"), std::string::npos) << again.err;
  EXPECT_EQ(run_program("memit_edit", edit({"--eval", "none", "--dry-run"})).status, 2) << "it is known at once";
  const auto pack = read_file(folder_ / "run" / "edit.safetensors");
  expect_ended(run_program("memit_edit", edit({"--eval", "none", "--seed", "3", "--resume"})), 2,
               {"expected a run that was interrupted"});
  EXPECT_TRUE(read_file(folder_ / "run" / "edit.safetensors") == pack);
  expect_ended(must_run("memit_edit", edit({"--eval", "none", "--resume", "--out", path("new")})), 0,
               {"new holds no run that was interrupted: one begins there"});
}

TEST_F(ProgramTest, DryRunChangesNothing) {
  const auto result = must_run("memit_edit", edit({"--dry-run"}));
  const auto plan = json::parse(result.out);
  EXPECT_EQ(plan["facts"], 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(ProgramTest, GenerateAndTokenizeSpeakJson) {
  const auto generated =
      must_run("emend", {"generate", "--model", path("model"), "--prompt", "Hello", "--max-new-tokens", "4", "--json"});
  EXPECT_LE(json::parse(generated.out)[0]["ids"].size(), 4U);
  write_file(folder_ / "strings.json", R"(["Hi", "", "é<|end|>"])");
  const auto tokens =
      must_run("emend", {"tokenize", "--model", path("model"), "--file", path("strings.json"), "--json"});
  EXPECT_EQ(json::parse(tokens.out), json::parse("[[72,105],[],[195,169,256]]"));
}

}  // namespace program_test
}  // namespace emend::testing
