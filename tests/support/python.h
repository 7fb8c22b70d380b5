// The Python with transformers, peft and safetensors that ./run-tests installs for tests which compare with them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace emend::testing {

/// $EMEND_TEST_PYTHON, or the interpreter of .venv-tests; empty if there is neither.
inline std::filesystem::path test_python() {
  const char* named = std::getenv("EMEND_TEST_PYTHON");
  const auto path =
      named ? std::filesystem::path(named) : std::filesystem::path(EMEND_SOURCE_DIR) / ".venv-tests" / "bin" / "python";
  return std::filesystem::exists(path) ? path : std::filesystem::path();
}

/// What a command of the shell printed (both streams) and its status; -1 if it could not be started.
struct ShellResult {
  int status = -1;
  std::string output;
};
inline ShellResult run_shell(const std::string& command) {
  ShellResult result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer{};
  while (fgets(buffer.data(), buffer.size(), pipe) != nullptr) result.output += buffer.data();
  result.status = pclose(pipe);
  return result;
}

}  // namespace emend::testing

/// Skips the running test with a reason when there is no Python with the reference libraries.
#define EMEND_NEEDS_PYTHON()                   \
  if (::emend::testing::test_python().empty()) \
  GTEST_SKIP() << "needs the Python libraries that ./run-tests installs into .venv-tests (or EMEND_TEST_PYTHON)"
