// A folder with a tiny model, facts, hyper-parameters and a corpus, and helpers to run the programs on them.
#pragma once

#include <emend/core/atomic_file.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/tiny_model.h"

namespace emend::testing {

class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("emend_program_test_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    write_tiny_model(folder_ / "model");
    write_file(folder_ / "hparams.yaml", tiny_hparams());
    write_file(folder_ / "rome.yaml", tiny_hparams("[1]"));
    write_file(folder_ / "corpus.txt", corpus());
    write_file(folder_ / "facts.jsonl",
               "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n"
               "{\"prompt\": \"The capital of {} is\", \"subject\": \"France\", \"target_new\": \"Oslo\", "
               "\"target_true\": \"Paris\"}\n");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static std::string corpus() {
    std::string text;
    for (int i = 0; i < 40; ++i)
      text += "Paragraph " + std::to_string(i * 37) + " speaks of towers, rivers and " + std::string(1 + i % 7, 'x') +
              " things.\n\n";
    return text;
  }
  /// Five facts with a paraphrase and a neighbour each, and a folder "health" with a task and text.
  void write_cities(const std::string& file) const {
    std::string facts;
    for (const char* subject : {"Oslo", "Paris", "Cairo", "Lima", "Quito"})
      facts += "{\"prompt\": \"{} is twinned with\", \"subject\": \"" + std::string(subject) +
               "\", \"target_new\": \"Rome\", \"target_true\": \"Bern\", \"paraphrase_prompts\": [\"The twin of " +
               subject + " is\"], \"neighborhood_prompts\": [\"Vienna is twinned with\"]}\n";
    write_file(folder_ / file, facts);
    std::filesystem::create_directories(folder_ / "health");
    write_file(folder_ / "health" / "lambada.jsonl", "{\"text\": \"the river runs to the sea\"}\n");
    write_file(folder_ / "health" / "wikitext.txt", corpus());
  }
  [[nodiscard]] nlohmann::json results(const std::string& run = "run") const {
    return nlohmann::json::parse(read_file(folder_ / run / "results.json"));
  }
  [[nodiscard]] std::vector<nlohmann::json> cases(const std::string& run = "run") const {
    std::vector<nlohmann::json> all;
    std::istringstream lines(read_file(folder_ / run / "cases.jsonl"));
    for (std::string line; std::getline(lines, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }
  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::vector<std::string> edit(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"--model",   path("model"),        "--facts",  path("facts.jsonl"),
                                          "--hparams", path("hparams.yaml"), "--corpus", path("corpus.txt"),
                                          "--cache",   path("cache"),        "--out",    path("run")};
    for (auto& argument : more) {
      // A later value of an option that is given twice replaces the earlier one.
      if (argument.rfind("--", 0) == 0)
        for (size_t i = 0; i + 1 < arguments.size(); ++i)
          if (arguments[i] == argument) {
            arguments.erase(arguments.begin() + static_cast<long>(i), arguments.begin() + static_cast<long>(i) + 2);
            break;
          }
      arguments.push_back(argument);
    }
    return arguments;
  }
  [[nodiscard]] std::string model_bytes(const std::string& model = "model") const {
    return read_file(folder_ / model / "model.safetensors");
  }

  // The four parts: the text names `where`, and mentions each of the other words.
  void expect_error(const std::vector<std::string>& arguments, int status, const std::vector<std::string>& words,
                    const ProgramOptions& options = {}) {
    const std::string before = model_bytes();
    const auto result = run_program("memit_edit", arguments, options);
    expect_ended(result, status, words);
    EXPECT_EQ(result.err.find("internal error"), std::string::npos) << result.err;
    EXPECT_EQ(model_bytes(), before) << "the input model was touched";
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "edit.safetensors"));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "results.json"));
    no_temporaries();
  }
  void no_temporaries() const {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_))
      EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path();
  }

  std::filesystem::path folder_;
};

}  // namespace emend::testing
