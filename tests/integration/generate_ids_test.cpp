// emend generate --ids: greedy continuations of the recorded fixtures, through the program, without a tokenizer.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/program.h"

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
  for (const char* wrong : {"1,x", "x", " , ", "-1", "1;2", "99999999999999999999", "1.5"}) {
    const auto result = generate("llama", {"--ids", wrong});
    EXPECT_EQ(result.status, 2) << wrong << ": " << result.err;
    EXPECT_NE(result.err.find("--ids"), std::string::npos) << result.err;
  }
  auto result = generate("llama", {"--ids", "5,1000"});
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_NE(result.err.find("id 1000"), std::string::npos) << result.err;
  result = generate("llama", {"--ids", "5", "--prompt", "text"});
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_NE(result.err.find("one of them"), std::string::npos) << result.err;
  result = generate("llama", {"--prompt", "text"});  // there is no tokenizer
  EXPECT_EQ(result.status, 3) << result.err;
}

}  // namespace generate_ids_test
}  // namespace emend::testing
