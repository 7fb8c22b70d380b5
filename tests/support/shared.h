// Where the evaluation data and fixtures that are not part of the repository lie, if they are there at all.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace emend::testing {

/// The folder "shared" beside the checkout (or $EMEND_SHARED_DIR); empty if there is none, or nothing in it.
inline std::filesystem::path shared_dir() {
  const char* named = std::getenv("EMEND_SHARED_DIR");
  const std::filesystem::path path = named ? named : std::filesystem::path(EMEND_SOURCE_DIR) / ".." / "shared";
  const bool there = std::filesystem::is_directory(path) && !std::filesystem::is_empty(path);
  return there ? std::filesystem::canonical(path) : std::filesystem::path();
}

}  // namespace emend::testing

/// Skips the running test with a reason when the shared folder is absent.
#define EMEND_NEEDS_SHARED()                  \
  if (::emend::testing::shared_dir().empty()) \
  GTEST_SKIP() << "needs the evaluation data folder ../shared (or EMEND_SHARED_DIR)"
