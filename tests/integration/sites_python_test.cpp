// The sites inside a block against transformers, and the Python recipes.
#include <gtest/gtest.h>

#include "support/python.h"
#include "support/shared.h"

namespace emend {
namespace sites_python_test {

// Runs a script of this folder with the package of the build tree; its last line has to hold `last`.
void run_script(const std::string& script, const std::string& words, const std::string& last) {
  if (!std::filesystem::exists(EMEND_BINARY_DIR "/python/emend/__init__.py"))
    GTEST_SKIP() << "the package is not built: it needs python3-dev and a LibTorch with its Python part";
  const auto [status, output] = testing::run_shell(
      "OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=" EMEND_BINARY_DIR "/python " +
      testing::test_python().string() + " " EMEND_SOURCE_DIR "/tests/integration/" + script + " " + words);
  EXPECT_EQ(status, 0) << output;
  EXPECT_NE(output.find(last), std::string::npos) << output;
}

TEST(InnerSites, EqualWhatTransformersComputesForEveryFamily) {
  EMEND_NEEDS_PYTHON();
  EMEND_NEEDS_SHARED();
  run_script("sites_with_transformers.py", (testing::shared_dir() / "fixtures").string(), "33 families agree");
}

TEST(Recipes, PrintWhatTheyDoInCxx) {
  EMEND_NEEDS_PYTHON();
  run_script("recipes.py", EMEND_SOURCE_DIR "/examples/recipes " EMEND_SOURCE_DIR "/tests/fixtures/tiny_llama",
             "10 recipes");
}

}  // namespace sites_python_test
}  // namespace emend
