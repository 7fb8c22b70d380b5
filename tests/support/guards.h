// For tests of the guard against operands on two devices.
#pragma once

#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "support/simulated.h"

namespace emend::testing {

/// The operation mixes devices: LibTorch must say so, in the words that users know.
inline void expect_mix_refused(const std::function<void()>& mix) {
  try {
    mix();
    FAIL() << "operands on different devices went through";
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("same device"), std::string::npos) << text;
  }
}

/// An Error of this class whose text has all the words.
inline void expect_error(ErrorClass error_class, const std::vector<std::string>& words,
                         const std::function<void()>& call) {
  try {
    call();
    FAIL() << "went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), error_class) << error.what();
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << "no \"" << word << "\" in " << error.what();
  }
}

}  // namespace emend::testing
