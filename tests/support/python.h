// The Python with transformers, peft and safetensors that ./run-tests installs for tests which compare with them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace emend::testing {

/// $EMEND_TEST_PYTHON, or the interpreter of .venv-tests; empty if there is neither.
inline std::filesystem::path test_python() {
  const char* named = std::getenv("EMEND_TEST_PYTHON");
  const auto path =
      named ? std::filesystem::path(named) : std::filesystem::path(EMEND_SOURCE_DIR) / ".venv-tests" / "bin" / "python";
  return std::filesystem::exists(path) ? path : std::filesystem::path();
}

}  // namespace emend::testing

/// Skips the running test with a reason when there is no Python with the reference libraries.
#define EMEND_NEEDS_PYTHON()                   \
  if (::emend::testing::test_python().empty()) \
  GTEST_SKIP() << "needs the Python libraries that ./run-tests installs into .venv-tests (or EMEND_TEST_PYTHON)"
