// Short ways to read facts from a text, and to look at what is refused.
#pragma once

#include <emend/core/error.h>
#include <emend/datasets/fact.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace emend::datasets {

inline FactSet read(const std::string& text, const ReadOptions& options = {}) {
  return parse_facts(text, "f.json", options);
}

inline void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
}

inline std::string refusal(const std::string& text, const ReadOptions& options = {}) {
  try {
    (void)read(text, options);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return "";
}

}  // namespace emend::datasets
