// Packs and models as users have them: several packs at once, the shared cache of Hugging Face, folders beside their
// source, edits on top of edits, and what other formats say about an edit.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/control_vector.h>
#include <emend/models/gguf/gguf_file.h>
#include <gtest/gtest.h>

#include <thread>

#include "support/pack_oracle.h"
#include "support/program_fixture.h"

namespace emend::testing {
namespace whole_test {

namespace fs = std::filesystem;
using nlohmann::json;

class WholeTest : public ProgramTest {
 protected:
  void SetUp() override {
    ::setenv("OMP_NUM_THREADS", "1", 1);
    ProgramTest::SetUp();
    norway_ = pack("norway", "Norway", "Oslo");
    rome_ = pack("rome", "Norway", "Rome");
    bern_ = pack("bern", "Peru", "Bern");
  }

  // The pack of a run that answers one question.
  std::string pack(const std::string& name, const std::string& subject, const std::string& target,
                   const std::string& model = "model", const std::string& save = "pack") {
    write_file(folder_ / (name + ".jsonl"),
               json{{"prompt", "The capital of {} is"}, {"subject", subject}, {"target_new", target}}.dump() + "\n");
    must_run("memit_edit", edit({"--model", path(model), "--facts", path(name + ".jsonl"), "--eval", "none", "--save",
                                 save, "--quiet", "--stats-tokens", "500", "--out", path(name)}));
    return path(name + "/edit.safetensors");
  }
  ProgramResult emend(const std::vector<std::string>& arguments, const ProgramOptions& options = {}) {
    return run_program("emend", arguments, options);
  }
  void must(const std::vector<std::string>& arguments, const ProgramOptions& options = {}) {
    must_run("emend", arguments, options);
  }
  void refused(const std::vector<std::string>& arguments, const std::vector<std::string>& words,
               const ProgramOptions& options = {}) {
    expect_ended(emend(arguments, options), 2, words);
  }
  json list(const std::string& model) {
    return json::parse(emend({"list", "--model", path(model), "--json"}).out).at("edits");
  }

  std::string norway_, rome_, bern_;
};

TEST_F(WholeTest, PacksThatContradictEachOtherAreOneJudgement) {
  const std::vector<std::string> words = {"target", "The capital of Norway is", "Oslo", "Rome", "--allow-conflicts"};
  refused({"merge", norway_, rome_, "--out", path("merged")}, words);
  refused({"apply", norway_, rome_, "--model", path("model"), "--out", path("out")}, words);
  refused({"export", norway_, rome_, "--to", "peft", "--model", path("model"), "--out", path("out")}, words);
  refused({"generate", "--model", path("model"), "--prompt", "a", "--pack", norway_, "--pack", rome_}, words);
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  must({"apply", norway_, "--model", path("model")});
  refused({"apply", bern_, rome_, "--model", path("model")}, words);
  // What lies in the folder is judged as well, and before anything is measured.
  refused({"generate", "--model", path("model"), "--prompt", "a", "--pack", rome_}, words);
  const auto evaluated = emend({"eval", "--model", path("model"), "--facts", path("facts.jsonl"), "--pack", rome_});
  EXPECT_EQ(evaluated.status, 2);
  EXPECT_EQ(evaluated.err.find("evaluate "), std::string::npos) << evaluated.err;
  EXPECT_EQ(list("model").size(), 1U) << "the first of a refused list came into force";
  must({"apply", bern_, rome_, "--model", path("model"), "--allow-conflicts"});
  must({"merge", norway_, rome_, "--out", path("merged"), "--allow-conflicts"});
}

TEST_F(WholeTest, WhatIsWrongIsSaidBeforeAModelIsLoaded) {
  const std::string model = path("model"), facts = path("facts.jsonl"), nowhere = path("nowhere");
  write_file(path("long"), std::string(200000, '['));
  write_file(path("rows.json"), R"([{"instruction": "Name a river.", "output": "The Elbe."}])");
  write_file(path("empty"), "");
  write_file(path("badutf"), "a\xff");
  write_tiny_model(folder_ / "other", 9);
  const std::string vector = path("vector.gguf"), other = pack("other-pack", "Peru", "Bern", "other");
  models::write_control_vector(vector, {"", {{1, at::ones({32})}}});
  const std::vector<std::string> import = {"--stats-import", path("l{layer}.npz")};
  const std::vector<std::vector<std::string>> wrong = {
      {"edit", "--facts", facts},  // no preset fits
      {"edit", "--facts", facts, "--hparams", path("hparams.yaml"), "--contexts", nowhere},
      {"edit", "--facts", facts, "--hparams", path("hparams.yaml"), "--set", "layers=99"},
      {"edit", "--facts", facts, "--hparams", path("hparams.yaml"), "--cache", facts},
      {"bench"},
      {"stats"},  // no preset fits: names --layers
      {"stats", "--layers", "1", "--corpus", nowhere},
      {"stats", "--layers", "1,99", "--corpus", path("corpus.txt")},
      {"tune", "--layers", "1,99", "--data", path("rows.json"), "--out", path("new")},
      {"suggest", "--try", facts, "--corpus", nowhere, "--out", path("new")},
      {"stats", "--layers", "1", "--corpus", folder_.string()},
      {"stats", "--layers", "1", import[0], import[1]},
      {"edit", "--facts", facts, "--hparams", path("hparams.yaml"), import[0], import[1], "--dry-run"},
      {"edit", "--facts", facts, "--hparams", path("hparams.yaml"), "--cache", facts + "/in", "--dry-run"},
      {"tune", "--rank", "100000", "--data", path("rows.json"), "--out", path("new")},
      {"suggest", "--layers", "50", "--out", path("new")},
      {"trace", "--prompt", "a", "--subject", "b"},
      {"generate", "--prompt", ""},
      {"generate", "--prompt-file", path("empty")},
      {"generate", "--prompt-file", path("badutf")},
      {"generate", "--prompt", "a", "--control-vector", vector, "--layers", "1-99"},
      {"generate", "--prompt", "a", "--pack", folder_.string()},
      {"generate", "--prompt", "a", "--pack", path("empty")},
      {"generate", "--prompt", "a", "--pack", facts},
      {"generate", "--prompt", "a", "--pack", other},
      {"eval", "--facts", facts, "--pack", other},
      {"export", other, "--to", "peft", "--out", path("new")},
      {"generate", "--prompt", "a", "--pack", nowhere},
      {"generate", "--prompt", "a", "--control-vector", nowhere},
      {"chat", "--pack", nowhere},
      {"eval", "--facts", facts, "--pack", nowhere},
      {"eval", "--facts", facts, "--eval", "free,foo"},
      {"eval", "--facts", facts, "--snippets", nowhere},
      {"eval", "--facts", facts, "--eval", "health"},
      {"eval", "--facts", facts, "--health-data", folder_.string()},
      {"eval", "--facts", facts, "--generation", "--eval", "none"},
      {"eval", "--facts", facts, "--eval", "counterfact", "--free-limit", "3"},
      {"eval", "--facts", facts, "--eval", "counterfact", "--free-style", "both"},
      {"tune", "--steps", "3", "--epochs", "2", "--data", path("rows.json"), "--out", path("new")},
      {"eval", "--facts", facts, "--pack", facts},
      {"serve", "--port", "0", "--packs", facts},
      {"serve", "--port", "0", "--packs", facts + "/in"},
      {"serve", "--port", "0", import[0], import[1]},
      {"export", norway_, "--to", "gguf", "--type", "bogus", "--out", path("new")},
      {"import", path("empty"), "--out", path("new")},
      {"export", nowhere, "--to", "peft", "--out", path("new")},
      {"export", norway_, "--to", "peft", "--out", facts + "/new"},
      {"import", nowhere, "--out", path("new")},
      {"diff", norway_, rome_, "--prompts", nowhere},
      {"diff", norway_, rome_, "--prompts", path("long")},
      {"direct", "fit", "--positive", path("long"), "--negative", facts, "--out", path("new")},
      {"direct", "fit", "--preset", "slop", "--prompts", nowhere, "--out", path("new")},
      {"direct", "fit", "--preset", "slop", "--layers", "0-99", "--out", path("new")},
      {"direct", "ablate", vector, "--from-layer", "99", "--out", path("new")},
      {"direct", "bake", vector, "--spare", nowhere, "--out", path("new")},
      {"direct", "bake", vector, "--texts", nowhere, "--out", path("new")}};
  for (auto words : wrong) {
    std::string line;
    for (const auto& word : words) line += word + " ";
    words.insert(words.end(), {"--model", model});
    const auto result = emend(words);
    EXPECT_TRUE(result.status == 2 || result.status == 3) << line << result.status << ": " << result.err;
    EXPECT_NE(result.err.find("error: "), std::string::npos) << line << ": " << result.err;
    EXPECT_EQ(result.err.find("loaded "), std::string::npos) << line << ": " << result.err;
    EXPECT_FALSE(fs::exists(path("new"))) << line;
  }
}

TEST_F(WholeTest, TheOptionThatHelpsIsTheVerbsOwn) {
  const auto stats = emend({"stats", "--model", path("model")});
  EXPECT_NE(stats.err.find("--layers: no preset"), std::string::npos) << stats.err;
  write_file(path("long"), std::string(300, 'a'));
  const auto generated = emend({"generate", "--model", path("model"), "--prompt-file", path("long")});
  EXPECT_EQ(generated.status, 2) << generated.err;
  EXPECT_NE(generated.err.find(path("long") + ": a prompt of 300 tokens; expected at most 256"), std::string::npos)
      << generated.err;
}

// Advice that needs an option which the verb lacks is left out; what is a pack's fault has one class.
TEST_F(WholeTest, NoAdviceNamesAnotherVerbsOption) {
  write_tiny_model(folder_ / "other", 9);
  const auto generated = emend({"generate", "--model", path("other"), "--prompt", "a", "--pack", norway_});
  EXPECT_EQ(generated.status, 2);
  const std::string advice = "accept that base by name (--accept-base ";
  const size_t found = generated.err.find(advice);
  ASSERT_NE(found, std::string::npos) << generated.err;
  const std::string base = generated.err.substr(found + advice.size(), 12);
  must({"generate", "--model", path("other"), "--prompt", "a", "--pack", norway_, "--accept-base", base});
  must({"eval", "--model", path("other"), "--facts", path("facts.jsonl"), "--pack", norway_, "--force"});
  const auto suggested = emend({"suggest", "--model", path("model"), "--out", path("corpus.txt")});
  EXPECT_NE(suggested.err.find("expected a new path; choose another\n"), std::string::npos) << suggested.err;
  for (const auto& pack : {folder_.string(), path("nowhere")})
    EXPECT_EQ(emend({"generate", "--model", path("model"), "--prompt", "a", "--pack", pack}).status, 3);
  EXPECT_EQ(emend({"cache", "verify", "--cache", path("nowhere")}).status, 3);
}

// The class of mistakes that cost a source: what is read, its model, links, devices, the folder one stands in.
TEST_F(WholeTest, NothingThatIsReadIsWritten) {
  fs::create_symlink("nothing", path("link"));
  const std::string model = path("model"), facts = path("facts.jsonl"), before = model_bytes("model");
  const std::string rows = read_file(facts), pack = read_file(norway_);
  const auto edited = [&](std::vector<std::string> words) {
    const auto all = edit(std::move(words));
    std::vector<std::string> line = {"edit"};
    line.insert(line.end(), all.begin(), all.end());
    return line;
  };
  for (const auto& words : std::vector<std::vector<std::string>>{
           {"apply", norway_, "--model", model, "--out", model + "/.emend"},
           {"apply", norway_, "--model", model, "--out", model + "/inside"},
           {"apply", norway_, "--model", model, "--out", path("nowhere/../model")},
           {"export", norway_, "--model", model, "--to", "gguf", "--out", model + "/model.safetensors", "--force"},
           {"merge", norway_, bern_, "--out", norway_, "--force"},
           {"merge", norway_, bern_, "--out", "/dev/full", "--force"},
           {"merge", norway_, bern_, "--out", path("link"), "--force"},
           {"export", norway_, "--model", model, "--to", "model", "--out", path("link")},
           {"lint", facts, "--fix", "--out", facts},
           {"convert-facts", facts, facts, "--to", "counterfact"},
           {"list", "--model", model, "--log-file", model + "/model.safetensors"},
           {"lint", facts, "--log-file", facts},
           edited({"--out", folder_.string(), "--save", "model"})})
    refused(words, {"error: "});
  const std::string stand = "mkdir -p " + path("here/below") + " && cd " + path("here/below") + " && exec " +
                            program_path("emend").string() + " convert " + model + " --force --out ";
  for (const char* place : {".", ".."}) EXPECT_EQ(run_program("/bin/sh", {"-c", stand + place}).status, 2) << place;
  EXPECT_EQ(model_bytes("model"), before);
  EXPECT_EQ(read_file(facts), rows);
  EXPECT_EQ(read_file(norway_), pack);
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  // Through a link that leads somewhere, into the place that it names.
  fs::create_directory(path("real"));
  fs::create_directory_symlink(path("real"), path("through"));
  must({"apply", norway_, "--model", model, "--out", path("through"), "--quiet"});
  EXPECT_TRUE(fs::is_symlink(path("through")));
  EXPECT_EQ(list("real").size(), 1U);
  must({"apply", norway_, "--model", model, "--out", path("nowhere/../turned"), "--quiet"});
  EXPECT_EQ(list("turned").size(), 1U);
}

TEST_F(WholeTest, WhatOthersWroteStays) {
  const std::string model = path("model"), facts = path("facts.jsonl"), rows = read_file(facts);
  fs::create_directories(folder_ / "mine");
  fs::create_directories(folder_ / "run" / "checkpoint");
  write_file(folder_ / "mine" / "notes.txt", "mine");
  write_file(folder_ / "run" / "checkpoint" / "notes.txt", "mine");
  const auto mine = files_under(path("mine")), run = files_under(path("run"));
  refused({"convert", model, path("mine")}, {"not empty", "--force"});
  for (const std::string& file : {facts, path("mine/notes.txt"), model + "/config.json"})
    EXPECT_NE(emend({"list", "--model", model, "--log-file", file}).status, 0) << file;
  refused({"merge", norway_, bern_, "--out", path("m.safetensors"), "--log-file", path("m.safetensors")},
          {"two outputs"});
  expect_ended(run_program("memit_edit", edit({"--out", path("run"), "--quiet"})), 2, {"a folder that no run wrote"});
  EXPECT_EQ(files_under(path("mine")), mine);
  auto left = files_under(path("run"));
  left.erase(path("run/run.jsonl"));
  EXPECT_EQ(left, run);
  EXPECT_EQ(read_file(facts), rows);
  // The rights of a file and a link to it, where it is written in place.
  write_file(folder_ / "rows.jsonl", R"({"prompt": "{} is in ", "subject": "A", "target_new": "b"})"
                                     "\n");
  fs::permissions(path("rows.jsonl"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("rows.jsonl", path("to-rows"));
  must({"lint", path("to-rows"), "--fix"});
  EXPECT_TRUE(fs::is_symlink(path("to-rows")));
  EXPECT_EQ(read_file(folder_ / "rows.jsonl").find("in \""), std::string::npos);
  EXPECT_EQ(fs::status(path("rows.jsonl")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  // Another pack in the place of one that the ledger knows.
  must({"apply", norway_, "--model", model, "--out", path("changed"), "--quiet"});
  must({"apply", bern_, "--model", path("changed"), "--quiet"});
  const std::string id = list("changed")[0].at("id");
  const auto before = model_bytes("changed");
  fs::copy_file(rome_, folder_ / "changed" / ".emend" / "packs" / (id + ".safetensors"),
                fs::copy_options::overwrite_existing);
  expect_ended(emend({"revert", list("changed")[1].at("id"), "--model", path("changed")}), 3, {"put the pack back"});
  EXPECT_EQ(model_bytes("changed"), before);
}

TEST_F(WholeTest, TwoChangesAtOnceAreOneAfterTheOtherOrRefused) {
  for (int round = 0; round < 5; ++round) {
    fs::remove_all(path("copy"));
    fs::copy(path("model"), path("copy"), fs::copy_options::recursive);
    ProgramResult first, second;
    std::thread other([&] { second = emend({"apply", norway_, "--model", path("copy"), "--quiet"}); });
    first = emend({"apply", bern_, "--model", path("copy"), "--quiet"});
    other.join();
    const size_t done = (first.status == 0) + (second.status == 0);
    EXPECT_GE(done, 1U) << first.err << second.err;
    EXPECT_EQ(list("copy").size(), done);
    must({"revert", "--all", "--model", path("copy"), "--quiet"});
    EXPECT_EQ(model_bytes("copy"), model_bytes("model"));
  }
}

// What is printed is an output as well.
TEST_F(WholeTest, StandardOutputIsAPlaceLikeOthers) {
  const std::string program = program_path("emend").string();
  const auto shell = [](const std::string& line) { return run_program("/bin/sh", {"-c", line}); };
  for (const std::string& words :
       {"list --model " + path("model"), std::string("help"), "lint --json " + path("facts.jsonl"),
        std::string("completion bash"), "generate --max-new-tokens 1 --prompt a --model " + path("model")}) {
    const auto full = shell(program + " " + words + " > /dev/full");
    EXPECT_EQ(full.status, 3) << words << full.err;
    EXPECT_NE(full.err.find("standard output"), std::string::npos) << words << full.err;
    EXPECT_EQ(shell(program + " " + words + " | true").err.find("standard output"), std::string::npos)
        << words << ": a reader that has gone is no error";
  }
  EXPECT_EQ(shell(program + " convert " + path("model") + " " + path("open") + " --quiet").status, 0);
  EXPECT_EQ(shell(program + " convert " + path("model") + " " + path("closed") + " --quiet <&- >&- 2>&-").status, 0);
  EXPECT_EQ(model_bytes("open"), model_bytes("closed")) << "what was printed went into the file";
}

TEST_F(WholeTest, ARefusedApplyLeavesNothingAndARetryWorks) {
  std::string bytes = read_file(norway_);
  bytes[bytes.size() - 5] ^= 1;
  write_file(folder_ / "bad.safetensors", bytes);
  const std::string original = model_bytes();
  EXPECT_EQ(emend({"apply", bern_, path("bad.safetensors"), "--model", path("model")}).status, 3);
  EXPECT_EQ(model_bytes(), original);
  EXPECT_FALSE(fs::exists(folder_ / "model" / ".emend"));
  EXPECT_EQ(emend({"apply", bern_, path("bad.safetensors"), "--model", path("model"), "--out", path("a/b/out")}).status,
            3);
  EXPECT_FALSE(fs::exists(folder_ / "a"));
  must({"apply", bern_, "--model", path("model"), "--out", path("a/b/out")});
  EXPECT_EQ(emend({"revert", "--all", "--model", path("a/b/out")}).status, 0);
  EXPECT_EQ(read_file(folder_ / "a/b/out/model.safetensors"), original);
}

TEST_F(WholeTest, TheSharedCacheIsNotEdited) {
  const fs::path snapshot = folder_ / "hub" / "models--org--tiny" / "snapshots" / "0123abcd";
  fs::create_directories(snapshot.parent_path());
  fs::copy(folder_ / "model", snapshot);
  ProgramOptions cache;
  cache.environment = {{"HF_HUB_CACHE", path("hub")}};
  refused({"apply", bern_, "--model", "org/tiny"},
          {"org/tiny", "Hugging Face cache", "apply " + bern_ + " --model org/tiny --out tiny-edited"}, cache);
  refused({"apply", bern_, "--model", snapshot.string()}, {"org/tiny", "--out"}, cache);
  must({"list", "--model", "org/tiny"}, cache);
  EXPECT_FALSE(fs::exists(snapshot / ".emend"));
  EXPECT_THROW(editors::Ledger(snapshot).apply({bern_}), Error);
  must({"apply", bern_, "--model", "org/tiny", "--out", path("mine")}, cache);
  EXPECT_EQ(read_file(snapshot / "model.safetensors"), model_bytes());

  must({"export", bern_, "--to", "peft", "--model", "org/tiny", "--out", path("adapter")}, cache);
  const auto config = json::parse(read_file(folder_ / "adapter" / "adapter_config.json"));
  EXPECT_EQ(config["base_model_name_or_path"], "org/tiny");
  must({"export", bern_, "--to", "gguf", "--model", "org/tiny", "--out", path("edited.gguf")}, cache);
  const models::GgufFile file(folder_ / "edited.gguf");
  EXPECT_EQ(file.required_text("general.base_model.0.name"), "tiny");
  EXPECT_EQ(file.required_text("general.base_model.0.organization"), "org");
  const auto edits = file.texts("emend.edits");
  ASSERT_EQ(edits.size(), 1U);
  const auto edit = json::parse(edits[0]);
  EXPECT_EQ(edit["facts"][0]["target_new"], "Bern");
  EXPECT_EQ(edit["editor"], "memit");
  EXPECT_EQ(edit["base"], editors::load_pack(bern_).base_fingerprint);
}

TEST_F(WholeTest, AFolderBesideItsSourceSharesNothing) {
  must({"apply", bern_, "--model", path("model"), "--out", path("edited")});
  for (const auto& entry : fs::directory_iterator(folder_ / "edited")) {
    if (entry.is_regular_file()) {
      EXPECT_EQ(fs::hard_link_count(entry.path()), 1U) << entry.path();
    }
    EXPECT_FALSE(entry.is_symlink()) << entry.path();
  }
}

TEST_F(WholeTest, AnEditedFolderIsEditedAgain) {
  const std::string original = model_bytes();
  must({"apply", norway_, "--model", path("model"), "--out", path("edited")});
  const std::string again = pack("again", "Norway", "Lima", "edited", "pack,model");  // another answer, on top
  const auto history = list("again/model");
  ASSERT_EQ(history.size(), 2U);
  EXPECT_TRUE(history[0]["active"] && history[1]["active"]);
  EXPECT_EQ(history[1]["under"][0], history[0]["id"]);
  refused({"apply", again, "--model", path("model")}, {"on top of", history[0]["id"].get<std::string>()});
  must({"apply", again, "--model", path("edited")});
  EXPECT_EQ(model_bytes("edited"), model_bytes("again/model"));
  must({"export", bern_, "--to", "model", "--model", path("edited"), "--out", path("three")});
  EXPECT_EQ(list("three").size(), 3U);
  must({"revert", history[0]["id"].get<std::string>(), "--model", path("three")});
  for (const char* model : {"edited", "again/model", "three"}) {
    must({"revert", "--all", "--model", path(model)});
    EXPECT_EQ(model_bytes(model) == original, true) << model;
  }
  must({"convert", path("model"), path("plain.gguf")});
  EXPECT_TRUE(models::GgufFile(folder_ / "plain.gguf").texts("emend.edits").empty());
  must({"apply", norway_, "--model", path("edited")});
  must({"convert", path("edited"), path("edited.gguf")});
  EXPECT_EQ(models::GgufFile(folder_ / "edited.gguf").texts("emend.edits").size(), 1U);
  const auto rounded = run_program("emend", {"convert", path("edited"), path("small.gguf"), "--type", "Q8_0"});
  EXPECT_NE(rounded.out.find("edits (1) are rounded with the weights to Q8_0"), std::string::npos) << rounded.out;
  const auto back = run_program("emend", {"convert", path("edited.gguf"), path("back")});
  EXPECT_NE(back.out.find("the source's edits (1)"), std::string::npos) << back.out;
}

}  // namespace whole_test
}  // namespace emend::testing
