// The Python libraries that other integration tests compare with can be imported together, torch being shared with the
// LibTorch that the build uses.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>

#include "support/python.h"

namespace {

TEST(PythonLibraries, ImportTogetherAndComputeOnTheCpu) {
  EMEND_NEEDS_PYTHON();
  const std::string command = emend::testing::test_python().string() +
                              " -c 'import torch, transformers, peft, safetensors.torch, tokenizers, accelerate; "
                              "print(torch.__version__.split(\"+\")[0], transformers.__version__, (torch.ones(2, 3) @ "
                              "torch.ones(3, 2)).sum().item())'"
                              " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  std::array<char, 512> buffer{};
  while (fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
  EXPECT_EQ(pclose(pipe), 0) << output;
  EXPECT_NE(output.find("2.11.0 5.17.0 12.0"), std::string::npos) << output;
}

}  // namespace
