// emend generate --ids: greedy continuations of the recorded fixtures, through the program, without a tokenizer.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <gtest/gtest.h>
#include <pty.h>

#include <array>
#include <nlohmann/json.hpp>

#include "support/program.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace emend::testing {
namespace generate_ids_test {

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "models" / name;
}

ProgramResult generate(const std::string& model, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"generate", "--model", fixture(model).string(),
                                        "--json",   "--quiet", "--ignore-eos"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program("emend", arguments);
}

TEST(GenerateIds, EqualsTheRecordedContinuation) {
  for (const char* name : {"gpt2", "llama", "falcon_rw", "mixtral_window"}) {
    SCOPED_TRACE(name);
    const SafetensorsFile expected(fixture(name) / "expected.safetensors");
    const at::Tensor prompt = expected.tensor("gen.input_ids")[0].to(at::kLong).contiguous(),
                     whole = expected.tensor("gen.output_ids")[0].to(at::kLong).contiguous();
    std::string list;
    for (int64_t i = 0; i < prompt.numel(); ++i)
      list += (i == 0 ? "" : i % 2 == 0 ? "," : ", ") + std::to_string(prompt[i].item<int64_t>());
    std::vector<int64_t> wanted;
    for (int64_t i = prompt.numel(); i < whole.numel(); ++i) wanted.push_back(whole[i].item<int64_t>());
    const auto result =
        generate(name, {"--ids", list, "--ids", list, "--max-new-tokens", std::to_string(wanted.size())});
    ASSERT_EQ(result.status, 0) << result.err;
    const auto document = nlohmann::json::parse(result.out);
    ASSERT_EQ(document.size(), 2u);
    for (const auto& row : document) EXPECT_EQ(row["ids"].get<std::vector<int64_t>>(), wanted);
  }
}

TEST(GenerateIds, RefusesWhatIsNotAnId) {
  for (const char* wrong :
       {"1,x", "x", " , ", "-1", "1;2", "99999999999999999999", "1.5", "5,,6", ",5", "5,", "[5,6]"}) {
    const auto result = generate("llama", {"--ids", wrong});
    EXPECT_EQ(result.status, 2) << wrong << ": " << result.err;
    EXPECT_NE(result.err.find("--ids"), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find("loaded "), std::string::npos) << result.err;
  }
  auto result = generate("llama", {"--ids", "5,1000"});
  expect_ended(result, 2, {"--ids: id 1000"});
  result = generate("llama", {"--ids", "5", "--prompt", "text"});
  expect_ended(result, 2, {"one of them"});
  result = generate("llama", {"--prompt", "text"});  // there is no tokenizer
  EXPECT_EQ(result.status, 3) << result.err;
}

TEST(Generate, AByteOrderMarkIsNoText) {
  const TemporaryFolder folder("generate_mark");
  const auto said = [&](const std::string& text) {
    write_file(folder / "prompt.txt", text);
    const auto result =
        must_run("emend", {"generate", "--model", EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama", "--json",
                           "--prompt-file", (folder / "prompt.txt").string(), "--max-new-tokens", "3"});
    return result.out;
  };
  EXPECT_EQ(said("\xEF\xBB\xBFHello\r\n"), said("Hello"));
}

TEST(Generate, GoesOnFromTheTextNotFromAnEndTokenThatATokenizerAdds) {
  const TemporaryFolder folder("generate_suffix");
  const auto said = [&](const std::string& name, bool ends) {
    write_tiny_model(folder / name);
    auto tokenizer = byte_tokenizer();
    if (ends)
      tokenizer["post_processor"] = {
          {"type", "TemplateProcessing"},
          {"single",
           {{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, {{"SpecialToken", {{"id", "<|end|>"}, {"type_id", 0}}}}}},
          {"special_tokens", {{"<|end|>", {{"id", "<|end|>"}, {"ids", {256}}, {"tokens", {"<|end|>"}}}}}}};
    write_file(folder / name / "tokenizer.json", tokenizer.dump());
    const auto result = must_run("emend", {"generate", "--model", (folder / name).string(), "--json", "--prompt",
                                           "The tower is", "--max-new-tokens", "8", "--ignore-eos"});
    return result.out;
  };
  const std::string plain = said("plain", false);
  EXPECT_NE(plain.find("\"text\""), std::string::npos) << plain;
  EXPECT_EQ(said("ended", true), plain);
}

// What `emend chat` prints in a terminal of the kind `term` when these keys are pressed.
std::string typed(const std::string& term, const std::vector<std::string>& keys, int* status) {
  const std::string program = program_path("emend"), model = EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama";
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    ::setenv("TERM", term.c_str(), 1);
    ::setenv("LC_ALL", "C.UTF-8", 1);
    ::execl(program.c_str(), "emend", "chat", "--model", model.c_str(), "--max-new-tokens", "1", nullptr);
    ::_exit(127);
  }
  std::string out;
  size_t pressed = 0, seen = 0;
  for (std::array<char, 4096> buffer{};;) {
    pollfd ready{terminal, POLLIN, 0};
    const ssize_t n = ::poll(&ready, 1, 60000) > 0 ? ::read(terminal, buffer.data(), buffer.size()) : 0;
    if (n <= 0) break;
    out.append(buffer.data(), static_cast<size_t>(n));
    // The next keys when the last of them were answered by a prompt.
    if (const size_t prompt = out.rfind("> "); prompt != std::string::npos && prompt >= seen && pressed < keys.size()) {
      seen = out.size();
      EXPECT_GT(::write(terminal, keys[pressed].data(), keys[pressed].size()), 0);
      ++pressed;
    }
  }
  ::kill(child, SIGKILL);  // does nothing to one that has ended
  ::waitpid(child, status, 0);
  ::close(terminal);
  return out;
}

TEST(Chat, EditsLinesAtATerminal) {
  if (void* library = ::dlopen("libedit.so.2", RTLD_NOW); !library) GTEST_SKIP() << "needs libedit2";
  int status = -1;
  const std::string left = "\033[D", up = "\033[A";
  const auto out = typed("xterm", {"abü" + left + left + "X\n", up + "Y\n", "/history\n", "/exit\n"}, &status);
  EXPECT_EQ(status, 0) << out;
  EXPECT_NE(out.find("user: aXbü\r\n"), std::string::npos) << out;
  EXPECT_NE(out.find("user: aXbüY\r\n"), std::string::npos) << out;
}

TEST(Chat, CtrlCAtThePromptEndsIt) {
  int status = -1;
  const auto out = typed("xterm", {"a\003"}, &status);
  EXPECT_EQ(status, 0) << out;
  EXPECT_EQ(out.find("interrupted"), std::string::npos) << out;
}

TEST(Chat, TakesPlainLinesAtATerminalThatCannotMoveItsCursor) {
  int status = -1;
  const auto out = typed("dumb", {"abc\n", "\n", "/history\n", "\004"}, &status);
  EXPECT_EQ(status, 0) << out;
  EXPECT_NE(out.find("user: abc\r\n"), std::string::npos) << out;
  EXPECT_EQ(out.find('\033'), std::string::npos) << out;
}

}  // namespace generate_ids_test
}  // namespace emend::testing
