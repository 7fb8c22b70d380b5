// `emend direct` and `emend generate --control-vector` as a user runs them, on a tiny model.
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <emend/models/control_vector.h>
#include <emend/models/gguf/gguf_file.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "support/program_fixture.h"

namespace emend::testing {
namespace directions_program_test {

namespace fs = std::filesystem;
using nlohmann::json;

class DirectionsProgram : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    std::string good, bad;
    for (int i = 0; i < 8; ++i) {
      good += "Item " + std::to_string(i * 37) + " is good\n";
      bad += "{\"prompt\": \"Item " + std::to_string(i * 37) + " is bad\"}\n";
    }
    write_file(folder_ / "good.txt", good);
    write_file(folder_ / "bad.jsonl", bad);
    write_file(folder_ / "ask.txt", "Hello\nWhat is a tower?\n");
  }

  json run(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--model", path("model"), "--json", "--quiet"});
    const auto result = run_program("emend", arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.status == 0 ? json::parse(result.out) : json();
  }
  json fit(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {
        "direct",          "fit",       "--positive",    path("good.txt"),   "--negative",
        path("bad.jsonl"), "--prompts", path("ask.txt"), "--max-new-tokens", "8",
        "--out",           path("d")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }
  json text_of(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate",         "--prompt", "The Eiffel Tower",
                                          "--max-new-tokens", "12",       "--ignore-eos"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments)[0]["ids"];
  }
};

TEST_F(DirectionsProgram, FitsSteersAndShows) {
  const json fitted = fit({"--strength", "2", "--layers", "1-2", "--steer", "clamp", "--decay", "4"});
  EXPECT_EQ(fitted["fit"]["layers"].size(), 4U);
  EXPECT_EQ(fitted["effect"]["texts"].size(), 2U);
  EXPECT_GT(fitted["effect"]["neutral_kl"].get<double>(), 0);
  EXPECT_EQ(fitted["effect"]["of"],
            "steering with strength 2 (clamp, falling to nothing over 4 tokens) behind the layers named");
  EXPECT_EQ(models::GgufFile(path("d/direction.gguf")).tensors().size(), 2U) << "the layers asked for";
  EXPECT_EQ(SafetensorsFile(path("d/direction.safetensors")).tensors().size(), 4U);
  const std::string page = read_file(folder_ / "d" / "report.html");
  EXPECT_NE(page.find("\"page\":\"direction\""), std::string::npos);
  EXPECT_NE(page.find("What is a tower?"), std::string::npos);
  const json plain = text_of({}), vector = path("d/direction.gguf");
  EXPECT_EQ(text_of({"--control-vector", vector, "--strength", "0"}), plain);
  EXPECT_NE(text_of({"--control-vector", vector, "--strength", "0.5"}), plain);
  EXPECT_NE(text_of({"--control-vector", vector, "--strength", "0.5", "--layers", "2"}),
            text_of({"--control-vector", vector, "--strength", "0.5"}));
  no_temporaries();
}

// A pack that steers does what --control-vector does; two of them act together, and beside an edit of the weights.
TEST_F(DirectionsProgram, SteersByAPack) {
  fit({"--no-effect"});
  const std::string before = model_bytes(), vector = path("d/direction.gguf");
  const auto steer = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), {"direct", "steer", path("d"), "--out", path(out)});
    return run(more);
  };
  const json done = steer("s", {"--strength", "1.5", "--layers", "1-2", "--prompts", path("ask.txt"),
                                "--max-new-tokens", "8", "--save", "pack,model"});
  EXPECT_GT(done["effect"]["neutral_kl"].get<double>(), 0);
  EXPECT_TRUE(done["change"].empty()) << "no weight changes";
  const std::string pack = path("s/edit.safetensors");
  const json by_vector = text_of({"--control-vector", vector, "--strength", "1.5", "--layers", "1-2"});
  EXPECT_NE(by_vector, text_of({}));
  EXPECT_EQ(text_of({"--pack", pack}), by_vector);
  steer("half", {"--strength", "0.75", "--layers", "1-2", "--no-effect"});
  EXPECT_EQ(text_of({"--pack", path("half/edit.safetensors"), "--control-vector", vector, "--strength", "0.75",
                     "--layers", "1-2"}),
            by_vector);
  steer("clamped", {"--strength", "3", "--steer", "at-least", "--layers", "2", "--no-effect"});
  EXPECT_EQ(text_of({"--pack", path("clamped/edit.safetensors")}),
            text_of({"--control-vector", vector, "--strength", "3", "--steer", "at-least", "--layers", "2"}));
  steer("short", {"--strength", "6", "--layers", "1-3", "--decay", "3", "--no-effect"});
  EXPECT_EQ(text_of({"--pack", path("short/edit.safetensors")}),
            text_of({"--control-vector", vector, "--strength", "6", "--layers", "1-3", "--decay", "3"}));
  // Through the ledger, and out again.
  ASSERT_EQ(run_program("emend", {"apply", pack, "--model", path("model"), "--quiet"}).status, 0);
  EXPECT_EQ(text_of({}), by_vector);
  ASSERT_EQ(run_program("emend", {"revert", "--all", "--model", path("model"), "--quiet"}).status, 0);
  EXPECT_EQ(model_bytes(), before);
}

TEST_F(DirectionsProgram, AblationIsSavedInEveryFormAndTakenOutAgain) {
  fit({"--no-effect"});
  const std::string before = model_bytes();
  const json done = run({"direct", "ablate", path("d"), "--layers", "1-2", "--strength", "1", "--no-effect", "--save",
                         "pack,peft,lora,gguf,model", "--out", path("plain")});
  EXPECT_EQ(done["change"].size(), 4U);  // o_proj and down_proj of two layers
  for (const auto& one : done["change"]) EXPECT_LE(one["left"].get<double>(), 1e-6) << one;
  EXPECT_EQ(model_bytes(), before);
  for (const char* file :
       {"adapter/adapter_model.safetensors", "lora.gguf", "model.gguf", "model/model.safetensors", "report.html"})
    EXPECT_TRUE(fs::exists(folder_ / "plain" / file)) << file;
  const SafetensorsFile d(path("d/direction.safetensors")), saved(path("plain/model/model.safetensors"));
  for (const int layer : {1, 2})
    for (const char* name : {".self_attn.o_proj.weight", ".mlp.down_proj.weight"}) {
      const at::Tensor unit = d.tensor("direction." + std::to_string(layer)).to(at::kDouble);
      const at::Tensor w = saved.tensor("model.layers." + std::to_string(layer) + name).to(at::kDouble);
      EXPECT_LE((w.t().mv(unit / unit.norm()).norm() / w.norm()).item<double>(), 1e-6) << layer << name;
    }
  // A GGUF file goes in as it came out: nothing is left to be taken out of it.
  ASSERT_EQ(
      run_program("emend", {"direct", "ablate", path("d/direction.gguf"), "--model", path("plain/model.gguf"),
                            "--layers", "1-2", "--no-effect", "--save", "gguf", "--out", path("again"), "--quiet"})
          .status,
      0);
  const auto weight = [&](const std::string& file) {
    return models::open_checkpoint(path(file))->read("model.layers.2.mlp.down_proj.weight").to(at::kDouble);
  };
  EXPECT_LE((weight("plain/model.gguf") - weight("again/model.gguf")).abs().max().item<double>(), 1e-6);
  const std::string pack = path("plain/edit.safetensors");
  ASSERT_EQ(run_program("emend", {"apply", pack, "--model", path("model"), "--quiet"}).status, 0);
  EXPECT_EQ(model_bytes(), model_bytes("plain/model")) << "the pack and the saved model are one";
  ASSERT_EQ(run_program("emend", {"revert", "--all", "--model", path("model"), "--quiet"}).status, 0);
  EXPECT_EQ(model_bytes(), before);
}

TEST_F(DirectionsProgram, BakesWithAScorerOfTheUsers) {
  fit({"--no-effect"});
  write_file(folder_ / "e.json", R"({"name": "vowels", "kind": "any", "words": ["a", "e"]})");
  const json done = run({"direct", "bake", path("d/direction.gguf"), "--layers", "2", "--strength", "3", "--prompts",
                         path("ask.txt"), "--max-new-tokens", "6", "--scorer", path("e.json"), "--out", path("baked")});
  ASSERT_EQ(done["change"].size(), 1U);
  EXPECT_EQ(done["change"][0]["weight"], "model.layers.2.mlp.down_proj.weight");
  EXPECT_TRUE(done["effect"]["scores"].contains("vowels"));
  EXPECT_GT(done["effect"]["neutral_kl"].get<double>(), 0);
  EXPECT_TRUE(fs::exists(folder_ / "baked" / "edit.safetensors"));
}

TEST_F(DirectionsProgram, BakesWhereAnAnswerBegins) {
  fit({"--no-effect"});
  int made = 0;
  const auto size = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"direct", "bake", path("d"), "--layers", "2"};
    args.insert(args.end(), {"--no-effect", "--out", path("start" + std::to_string(++made))});
    args.insert(args.end(), more.begin(), more.end());
    return run(args)["change"][0]["relative_norm"].get<double>();
  };
  const double start = size({"--where", "answer-start"});
  EXPECT_GT(start, 0);
  EXPECT_EQ(start, size({"--where", "answer-start", "--spare", "own"})) << "what the model writes is spared by itself";
  EXPECT_NE(start, size({"--spare", "own"}));
  EXPECT_NE(start, size({"--where", "answer-start", "--texts", path("ask.txt")}));
  const auto told = run_program("emend", {"direct", "bake", path("d"), "--model", path("model"), "--no-effect",
                                          "--where", "answer-start", "--out", path("told")});
  EXPECT_EQ(told.status, 0) << told.err;
  EXPECT_NE(told.err.find("without a chat template"), std::string::npos) << told.err;
}

TEST_F(DirectionsProgram, ASearchGoesOnAfterAKillToTheSameEnd) {
  fit({"--no-effect"});
  write_file(folder_ / "e.json", R"({"name": "words", "kind": "length"})");
  const auto search = [&](const std::string& out, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"direct", "optimise", path("d"), "--scorer", path("e.json"), "--out", path(out)});
    more.insert(more.end(), {"--search-prompts", path("ask.txt"), "--prompts", path("ask.txt")});
    more.insert(more.end(), {"--trials", "9", "--max-kl", "5", "--strength", "4", "--max-new-tokens", "12"});
    more.insert(more.end(), {"--raise", "--save", "pack,lora", "--spare", "own"});
    return more;
  };
  const json whole = run(search("whole"));
  ASSERT_EQ(whole["search"]["trials"].size(), 9U);
  const auto& trials = whole["search"]["trials"];
  double least = whole["search"]["before"];
  for (const int number : whole["search"]["front"]) {  // more lost, better score
    EXPECT_GT(trials[static_cast<size_t>(number)]["score"].get<double>(), least);
    least = trials[static_cast<size_t>(number)]["score"];
  }
  const std::string page = read_file(folder_ / "whole" / "report.html");
  EXPECT_NE(page.find("\"front\""), std::string::npos);
  // As a kill leaves it: some trials, and nothing else.
  std::istringstream lines(read_file(folder_ / "whole" / "trials.jsonl"));
  std::string begun, line;
  for (int i = 0; i < 5 && std::getline(lines, line); ++i) begun += line + "\n";
  fs::create_directory(folder_ / "cut");
  write_file(folder_ / "cut" / "trials.jsonl", begun);
  const json resumed = run(search("cut", {"--resume"}));
  EXPECT_EQ(resumed["search"], whole["search"]);
  EXPECT_EQ(resumed["effect"], whole["effect"]);
  EXPECT_EQ(read_file(folder_ / "cut" / "trials.jsonl"), read_file(folder_ / "whole" / "trials.jsonl"));
  EXPECT_EQ(read_file(folder_ / "cut" / "edit.safetensors"), read_file(folder_ / "whole" / "edit.safetensors"));
  auto other = search("cut", {"--resume", "--seed", "5", "--model", path("model"), "--quiet"});
  EXPECT_EQ(run_program("emend", other).status, 2) << "another search";
}

// The same names are not enough: what the files hold decides.
TEST_F(DirectionsProgram, ASearchGoesOnWithTheSameContentsAlone) {
  fit({"--no-effect"});
  write_file(folder_ / "e.json", R"({"name": "words", "kind": "length"})");
  const std::map<std::string, std::string> files = {
      {"spare.txt", "A town\nThe old tower\n"}, {"texts.txt", "Hello\nItem\n"}, {"neutral.txt", "Some\nOf all\n"}};
  const auto write = [&] {
    for (const auto& [name, text] : files) write_file(folder_ / name, text);
  };
  write();
  std::vector<std::string> arguments = {"direct", "optimise", path("d")};
  for (const auto& [option, value] : std::map<std::string, std::string>{{"--trials", "2"},
                                                                        {"--max-kl", "9"},
                                                                        {"--strength", "4"},
                                                                        {"--scorer", path("e.json")},
                                                                        {"--search-prompts", path("ask.txt")},
                                                                        {"--max-new-tokens", "6"},
                                                                        {"--spare", path("spare.txt")},
                                                                        {"--texts", path("texts.txt")},
                                                                        {"--neutral", path("neutral.txt")},
                                                                        {"--out", path("s")},
                                                                        {"--by", "bake"},
                                                                        {"--model", path("model")}})
    arguments.insert(arguments.end(), {option, value});
  arguments.insert(arguments.end(), {"--raise", "--no-effect", "--quiet"});
  const auto begun = run_program("emend", arguments);
  ASSERT_TRUE(fs::exists(folder_ / "s" / "trials.jsonl")) << begun.err;
  arguments.push_back("--resume");
  const auto go_on = [&](const std::vector<std::string>& more = {}) {
    auto all = arguments;
    all.insert(all.end(), more.begin(), more.end());
    return run_program("emend", all);
  };
  EXPECT_EQ(go_on().status, begun.status);
  const auto refused = [&](const std::string& what, const std::vector<std::string>& more = {}) {
    const auto result = go_on(more);
    EXPECT_EQ(result.status, 2) << what << ": " << result.err;
    EXPECT_NE(result.err.find("a search with other settings"), std::string::npos) << what << ": " << result.err;
  };
  for (const auto& [name, text] : files) {
    write_file(folder_ / name, text + "One more\n");
    refused(name);
    write();
  }
  refused("dtype", {"--dtype", "float64"});
  const std::string before = read_file(folder_ / "d" / "direction.safetensors");
  std::string other = before;  // one value of the last layer
  other[other.size() - 2] = static_cast<char>(other[other.size() - 2] ^ 1);
  write_file(folder_ / "d" / "direction.safetensors", other);
  refused("direction");
  write_file(folder_ / "d" / "direction.safetensors", before);
  EXPECT_EQ(go_on().status, begun.status);
}

TEST_F(DirectionsProgram, ASearchNeedsAScorerAndSomethingToGain) {
  fit({"--no-effect"});
  const auto refused = [&](std::vector<std::string> more, int status, const std::vector<std::string>& words) {
    more.insert(more.begin(), {"direct", "optimise", path("d"), "--search-prompts", path("ask.txt"), "--trials", "2",
                               "--model", path("model"), "--out", path("x"), "--quiet", "--max-new-tokens", "6"});
    const auto result = run_program("emend", more);
    EXPECT_EQ(result.status, status) << result.err;
    for (const auto& word : words) EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find("--max-kl"), std::string::npos) << result.err;
    EXPECT_FALSE(fs::exists(folder_ / "x"));
  };
  refused({}, 2, {"no scorer", "--scorer FILE"});
  write_file(folder_ / "none.json", R"({"name": "none", "kind": "rate", "words": ["antidisestablishmentarianism"]})");
  refused({"--scorer", path("none.json")}, 4, {"score 0 (none)", "the best there is", "nothing to change"});
  write_file(folder_ / "mark.json", R"({"name": "marks", "kind": "any", "words": ["!"]})");
  refused({"--scorer", path("mark.json")}, 3, {"without a letter"});
}

TEST_F(DirectionsProgram, WarnsOfEditsBesideTheWeights) {
  fit({"--no-effect"});
  run({"direct", "steer", path("d"), "--no-effect", "--out", path("s")});
  const auto ablate = [&](const std::string& out) {
    const auto result = run_program("emend", {"direct", "ablate", path("d"), "--model", path("model"), "--no-effect",
                                              "--out", path(out), "--quiet"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.err.find("edits beside its weights in force") != std::string::npos;
  };
  EXPECT_FALSE(ablate("before"));
  ASSERT_EQ(run_program("emend", {"apply", path("s/edit.safetensors"), "--model", path("model"), "--quiet"}).status, 0);
  EXPECT_TRUE(ablate("after"));
}

// Presets with questions of their own, and a scorer that reads the changed model.
TEST_F(DirectionsProgram, PresetsHaveQuestionsOfTheirOwn) {
  const json fitted = run({"direct", "fit", "--preset", "sycophancy", "--out", path("syc"), "--no-effect"});
  EXPECT_EQ(fitted["fit"]["about"]["preset"], "sycophancy");
  const json changed = run({"direct", "ablate", path("syc"), "--max-new-tokens", "2", "--out", path("plain")});
  EXPECT_NE(changed["effect"]["texts"][0]["prompt"].get<std::string>().find("+"), std::string::npos);
  const auto& score = changed["effect"]["scores"]["agrees"];
  EXPECT_EQ(score["kind"], "next");
  EXPECT_GT(score["before"].get<double>(), 0);
  EXPECT_NE(score["before"], score["after"]);
}

TEST_F(DirectionsProgram, SaysWhatIsWrong) {
  fit({"--no-effect"});
  const auto refused = [&](std::vector<std::string> arguments, int status, const std::string& word) {
    arguments.insert(arguments.end(), {"--model", path("model"), "--quiet"});
    const auto result = run_program("emend", arguments);
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
  };
  refused({"direct", "fit", "--positive", path("good.txt"), "--out", path("x")}, 2, "--negative");
  refused({"direct", "fit", "--preset", "wordines", "--out", path("x")}, 2, "wordiness");
  refused({"direct", "ablate", path("d"), "--layers", "3-9", "--out", path("x")}, 2, "0 to 3");
  refused({"direct", "ablate", path("d"), "--layers", "3-", "--out", path("x")}, 2, "A-B");
  refused({"direct", "ablate", "--out", path("x")}, 2, "directions");
  refused({"direct", "bake", path("d"), "--strength", "0", "--out", path("x")}, 2, "nothing changes");
  refused({"direct", "ablate", path("d"), "--out", path("model")}, 2, "what is read");
  refused({"direct", "bake", path("d"), "--resume", "--out", path("x")}, 2, "optimise");
  refused({"direct", "ablate", path("d"), "--positive", path("good.txt"), "--out", path("x")}, 2, "goes with fit");
  refused({"direct", "ablate", path("d"), "--texts", path("good.txt"), "--out", path("x")}, 2, "--spare");
  refused({"direct", "steer", path("d"), "--save", "lora", "--out", path("x")}, 3, "--save lora");
  refused({"direct", "steer", path("d"), "--layers", "40-50", "--no-effect", "--out", path("x")}, 2,
          "the model has 4 layers");
  refused({"direct", "ablate", path("d"), path("d/"), "--out", path("x")}, 2, "named twice");
  for (const char* file : {"d/direction.safetensors", "d/direction.gguf"})
    refused({"direct", "ablate", path("d"), path(file), "--out", path("x")}, 2, "each direction once");
  refused({"direct", "fit", "--positive", path("good.txt"), "--negative", path("bad.jsonl"), "--layers", "0", "--out",
           path("x")},
          2, "from 1 on");
  refused({"direct", "bake", path("d"), "--strength", "1e30", "--out", path("x")}, 2, "--strength");
  refused({"direct", "bake", path("d"), "--spare-weight", "2", "--out", path("x")}, 2, "--spare-weight");
  refused({"direct", "optimise", path("d"), "--spare", "own", "--resume", "--out", path("x")}, 2, "no search");
  refused({"generate", "--prompt", "a", "--strength", "2"}, 2, "--control-vector");
  write_file(folder_ / "bad.json", R"({"name": "s", "kind": "command", "command": ["/no/such/program"]})");
  refused({"direct", "ablate", path("d"), "--scorer", path("bad.json"), "--prompts", path("ask.txt"),
           "--max-new-tokens", "2", "--out", path("x")},
          3, "/no/such/program");
  refused({"generate", "--prompt", "a", "--control-vector", path("model/model.safetensors")}, 3, "GGUF");
  refused({"generate", "--prompt", "a", "--control-vector", path("d/direction.gguf"), "--layers", "0"}, 2,
          "no direction for the layers 0-0; expected some of 1, 2, 3");
  refused({"generate", "--prompt", "a", "--control-vector", path("d/direction.gguf"), "--strength", "1e38"}, 4,
          "logits with NaN");
  auto vector = models::read_control_vector(path("d/direction.gguf"));
  vector.model_hint = "mistral";  // GGUF has one architecture for both
  models::write_control_vector(path("of-mistral.gguf"), vector);
  const auto shared = run_program("emend", {"generate", "--prompt", "a", "--control-vector", path("of-mistral.gguf"),
                                            "--max-new-tokens", "1", "--model", path("model"), "--quiet"});
  EXPECT_EQ(shared.err, "");
  vector.model_hint = "gpt2";
  models::write_control_vector(path("of-gpt2.gguf"), vector);
  refused({"generate", "--prompt", "a", "--control-vector", path("of-gpt2.gguf"), "--max-new-tokens", "1"}, 0,
          "a model of type \"gpt2\", this one is \"llama\"");
  refused({"generate", "--prompt", "a", "--max-new-tokens", "300"}, 0, "may grow to 301 tokens");
  EXPECT_FALSE(fs::exists(folder_ / "x"));
  auto config = json::parse(read_file(folder_ / "model" / "tokenizer_config.json"));
  config["chat_template"] = "{% include messages %}";
  write_file(folder_ / "model" / "tokenizer_config.json", config.dump());
  refused({"direct", "ablate", path("d"), "--prompts", path("ask.txt"), "--out", path("x")}, 3,
          "give the prompts as they are (--no-chat)");
}

// Where model and vector are both wrong, it is the vector that is told of: it is read first.
TEST_F(DirectionsProgram, ReadsAControlVectorAndItsLayersBeforeAModel) {
  fit({"--no-effect"});
  const auto refused = [&](std::vector<std::string> arguments, const std::string& vector, const std::string& layers,
                           int status, const std::string& words) {
    arguments.insert(arguments.end(),
                     {"--model", path("no-model"), "--control-vector", path(vector), "--layers", layers, "--quiet"});
    const auto result = run_program("emend", arguments);
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find("no-model"), std::string::npos) << result.err;
  };
  for (const auto& verb : std::vector<std::vector<std::string>>{{"generate", "--prompt", "a"}, {"chat"}}) {
    refused(verb, "d/direction.gguf", "5-2", 2, "--layers: \"5-2\"");
    refused(verb, "no.gguf", "1-2", 3, "no.gguf");
  }
}

}  // namespace directions_program_test
}  // namespace emend::testing
