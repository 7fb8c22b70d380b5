// The message of an error that some work must throw.
#pragma once

#include <emend/core/error.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace emend::testing {

inline std::string error_of(const std::function<void()>& work, ErrorClass error_class) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.error_class(), error_class) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace emend::testing
