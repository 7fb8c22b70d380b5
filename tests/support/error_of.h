// The message of an error that some work must throw.
#pragma once

#include <emend/core/error.h>
#include <gtest/gtest.h>

#include <ctime>
#include <functional>
#include <string>
#include <vector>

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

inline void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
}

inline void expect_error(ErrorClass error_class, const std::vector<std::string>& parts,
                         const std::function<void()>& work) {
  expect_parts(error_of(work, error_class), parts);
}

// What is made to do harm ends soon in an error of a few words of emend's own, these among them.
inline std::string expect_refused(const std::function<void()>& work, ErrorClass error_class,
                                  const std::vector<std::string>& parts, size_t longest = 1000) {
  const std::clock_t start = std::clock();  // processor time: a busy machine must not fail the test
  const std::string message = error_of(work, error_class);
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 2.0) << message;
  EXPECT_LT(message.size(), longest) << "a message must not echo the file";
  EXPECT_EQ(message.find("json.exception"), std::string::npos) << message;
  expect_parts(message, parts);
  return message;
}

inline std::string repeat(const std::string& text, size_t times) {
  std::string result;
  for (size_t i = 0; i < times; ++i) result += text;
  return result;
}

}  // namespace emend::testing
