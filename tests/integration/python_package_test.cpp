// The Python package of the build tree, tested from Python.
#include <gtest/gtest.h>

#include <filesystem>

#include "support/python.h"

namespace emend {
namespace python_package_test {

TEST(PythonPackage, WorksFromTheBuildTree) {
  EMEND_NEEDS_PYTHON();
  const std::filesystem::path package = EMEND_BINARY_DIR "/python";
  if (!std::filesystem::exists(package / "emend" / "__init__.py"))
    GTEST_SKIP() << "the package is not built: it needs python3-dev and a LibTorch with its Python part";
  const auto scratch = std::filesystem::path(::testing::TempDir()) / "emend_python_package";
  std::filesystem::remove_all(scratch);
  std::filesystem::create_directories(scratch);
  const auto result = testing::run_shell(
      "OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=" + package.string() + " " +
      testing::test_python().string() + " " EMEND_SOURCE_DIR "/tests/integration/python_package.py " +
      EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama " + scratch.string() + " " + package.string());
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find("\nOK"), std::string::npos) << result.output;
  std::filesystem::remove_all(scratch);
}

}  // namespace python_package_test
}  // namespace emend
