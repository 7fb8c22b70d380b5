// The recorded cases of a tokenizer fixture, and the check of a tokenizer against them.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::testing {

inline nlohmann::json read_json(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_file(path));
}

/// The spans of an encoding, one after another, cover the text without a gap.
inline void expect_cover(const models::Encoding& encoding, const std::string& text) {
  size_t covered = 0, last_begin = 0;
  ASSERT_EQ(encoding.ids.size(), encoding.offsets.size());
  for (const auto& [begin, end] : encoding.offsets) {
    ASSERT_LE(begin, end);
    ASSERT_GE(begin, last_begin) << text;
    ASSERT_LE(end, text.size());
    ASSERT_LE(begin, covered) << "bytes " << covered << " to " << begin << " of: " << text;
    covered = std::max(covered, end);
    last_begin = begin;
  }
  ASSERT_EQ(covered, text.size()) << text;
}

/// Every text of `path` (cases.json or llama_cpp_cases.json) gives the recorded ids. Returns the number of cases.
inline size_t expect_cases(const models::Tokenizer& tokenizer, const std::filesystem::path& path) {
  const nlohmann::json cases = read_json(path);
  for (const auto& entry : cases) {
    const auto& text = entry.at("text").get_ref<const std::string&>();
    const auto ids = entry.at("ids").get<std::vector<int64_t>>();
    EXPECT_EQ(tokenizer.encode_ids(text), ids) << path << ": " << entry.at("text");
    EXPECT_EQ(tokenizer.encode(text).ids, ids) << path << ": " << entry.at("text");
    if (entry.contains("ids_with_special")) {
      EXPECT_EQ(tokenizer.encode_ids(text, true), entry.at("ids_with_special").get<std::vector<int64_t>>())
          << entry.at("text");
    }
    if (!entry.contains("decoded")) continue;
    const auto& decoded = entry.at("decoded").get_ref<const std::string&>();
    EXPECT_EQ(tokenizer.decode(ids), decoded) << entry.at("text");
    models::StreamDecoder stream(tokenizer, false);
    std::string streamed;
    for (const int64_t id : ids) streamed += stream.push(id);
    EXPECT_EQ(streamed + stream.finish(), decoded) << entry.at("text");
  }
  return cases.size();
}

}  // namespace emend::testing
