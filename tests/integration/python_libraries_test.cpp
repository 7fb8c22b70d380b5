// The Python libraries that other integration tests compare with can be imported together, torch being shared with the
// LibTorch that the build uses.
#include <gtest/gtest.h>

#include <string>

#include "support/python.h"

namespace python_libraries_test {

TEST(PythonLibraries, ImportTogetherAndComputeOnTheCpu) {
  EMEND_NEEDS_PYTHON();
  const std::string command = emend::testing::test_python().string() +
                              " -c 'import torch, transformers, peft, safetensors.torch, tokenizers, accelerate; "
                              "print(torch.__version__.split(\"+\")[0], transformers.__version__, (torch.ones(2, 3) @ "
                              "torch.ones(3, 2)).sum().item())'";
  const auto [status, output] = emend::testing::run_shell(command);
  EXPECT_EQ(status, 0) << output;
  EXPECT_NE(output.find("2.11.0 5.17.0 12.0"), std::string::npos) << output;
}

}  // namespace python_libraries_test
