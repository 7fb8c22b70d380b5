// For tests of the guard against operands on two devices.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "support/error_of.h"
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

}  // namespace emend::testing
