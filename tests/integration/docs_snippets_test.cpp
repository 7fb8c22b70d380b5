// The code in the documentation, run as it stands: commands and Python by docs_snippets.py, C++ here.
#include <emend/core/atomic_file.h>
#include <emend/devices/route.h>
#include <emend/models/placing.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/models/trace.h>
#include <emend/workflow/run.h>
#include <emend/workflow/session.h>

#include <iostream>
#include <regex>
#include <sstream>

#include "support/python.h"
#include "support/temporary_folder.h"

namespace emend {
namespace docs_snippets_test {

namespace fs = std::filesystem;

void run_kind(const std::string& kind, const std::string& python) {
  const auto [status, output] =
      testing::run_shell("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=" EMEND_BINARY_DIR "/python " + python +
                         " " EMEND_SOURCE_DIR "/tests/integration/docs_snippets.py " + kind +
                         " " EMEND_SOURCE_DIR " " EMEND_BINARY_DIR "/bin " EMEND_BINARY_DIR "/docs-snippets-" + kind);
  EXPECT_EQ(status, 0) << output;
  if (const size_t last = output.rfind(" blocks ran"); last != std::string::npos)
    std::cout << "[ figure   ] " << output.substr(output.rfind('\n', last) + 1) << '\n';
}

TEST(DocsSnippets, Commands) {
  run_kind("sh", "python3");
}

TEST(DocsSnippets, Python) {
  EMEND_NEEDS_PYTHON();
  if (!fs::exists(EMEND_BINARY_DIR "/python/emend/__init__.py"))
    GTEST_SKIP() << "the package is not built: it needs python3-dev and a LibTorch with its Python part";
  run_kind("python", testing::test_python().string());
}

// The lines of a text without their indentation.
std::string without_indentation(const std::string& text) {
  std::istringstream lines(text);
  std::string all;
  for (std::string line; std::getline(lines, line);)
    all += line.substr(std::min(line.find_first_not_of(' '), line.size())) + "\n";
  return all;
}

TEST(DocsSnippets, CxxStandsInThisFile) {
  const std::string own = without_indentation(read_file(EMEND_SOURCE_DIR "/tests/integration/docs_snippets_test.cpp"));
  int found = 0;
  for (const auto& entry : fs::recursive_directory_iterator(EMEND_SOURCE_DIR "/docs")) {
    const std::string name = entry.path().filename();
    if (entry.path().extension() != ".md" || name == "extending.md" || name == "adding-a-family.md") continue;
    const std::string text = read_file(entry.path());
    const std::string fence = "\n```cpp\n";
    for (size_t at = text.find(fence); at != std::string::npos; at = text.find(fence, at + 1)) {
      if (at >= 4 && text.substr(at - 4, 4) == " -->") continue;  // not run, for the reason that it names
      const size_t begin = at + fence.size();
      EXPECT_NE(own.find(without_indentation(text.substr(begin, text.find("\n```", begin) + 1 - begin))),
                std::string::npos)
          << name << ": not in this file, where it would be run:\n"
          << text.substr(begin, 200);
      ++found;
    }
  }
  EXPECT_EQ(found, 5);
}

class DocsSnippetsCxx : public ::testing::Test {
 protected:
  void SetUp() override {
    const fs::path tiny = EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama";
    fs::create_directories(folder_.path() / "path" / "to");
    fs::copy(tiny, folder_.path() / "path" / "to" / "model");
    fs::copy_file(tiny / "memit.yaml", folder_.path() / "gpt2-xl");  // a file wins over a preset of that name
    fs::copy_file(tiny / "corpus.txt", folder_.path() / "wiki.jsonl");
    before_ = fs::current_path();
    fs::current_path(folder_.path());
  }
  void TearDown() override { fs::current_path(before_); }

  testing::TemporaryFolder folder_{"docs_snippets"};
  fs::path before_;
  models::Model model = models::load_placed(EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama");
  datasets::FactSet facts = datasets::load_facts(EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama/facts.jsonl");
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
// clang-format off
TEST_F(DocsSnippetsCxx, Guide) {
  const auto before = model.current_fingerprint();
  const auto ask_the_window = [](const ProgressUpdate&) { return true; };
  {
    workflow::RunOptions options{.editor = "memit", .hparams = "gpt2-xl", .corpus = "wiki.jsonl", .out = "runs/mine", .resume = true};
    workflow::Run run(model, facts, options);
    run.execute();                      // judges, edits batch by batch, judges again, saves, reports
    std::cout << run.summary();
    run.session().undo();

    workflow::Session session(model, options, {.progress = workflow::stopping(ask_the_window)});
    session.edit(facts.facts);          // one batch; call again for the next
    session.save_pack("edit.safetensors");
    session.undo();                     // every byte back
  }
  EXPECT_TRUE(fs::exists("runs/mine/report.html") && fs::exists("edit.safetensors"));
  EXPECT_EQ(model.current_fingerprint(), before);
}

TEST_F(DocsSnippetsCxx, Recipes) {
  using hooks::Site, models::Patch;
  const auto run = model.trace("The Eiffel Tower is in", {{Site::kAttnPattern, 3}});   // <emend/models/trace.h>
  run[{Site::kAttnPattern, 3}];
  model.trace("The Eiffel Tower is in", {}, {Patch::zero({Site::kAttnZ, 3}).heads({2}).tokens({-1})}).logits;
}

TEST_F(DocsSnippetsCxx, Tokenizers) {
  std::string pieces;
  const auto use = [&](const auto& span) { pieces += std::string("The Eiffel Tower").substr(span.begin, span.end - span.begin); };
  const auto tokenizer = emend::models::load_tokenizer("path/to/model");
  const auto encoding = tokenizer->encode("The Eiffel Tower", /*add_special=*/true);
  for (size_t i = 0; i < encoding.size(); ++i)
    use(encoding.span(i));   // id and the byte range of the text that it stands for
  EXPECT_EQ(pieces, "The Eiffel Tower");
}

TEST_F(DocsSnippetsCxx, Devices) {
  const auto run_step = [&] { model.forward(models::TokenBatch::from_rows({{1, 2, 3}})); };
  devices::TransferScope scope;
  run_step();
  EXPECT_EQ(scope.total(devices::Purpose::kWeight).count, 0);
}
// clang-format on
#pragma GCC diagnostic pop

}  // namespace docs_snippets_test
}  // namespace emend
