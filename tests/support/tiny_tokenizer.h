// Small hand-made tokenizers: every byte is a token, and a few merges.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/pipeline.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"

namespace emend::testing {

/// A tokenizer.json with ids 0 to 255 for the bytes in byte-level writing, then one for each merge ("t h" gives "th").
inline nlohmann::json byte_level_json(const std::vector<std::pair<std::string, std::string>>& merges = {}) {
  nlohmann::json vocabulary = nlohmann::json::object(), list = nlohmann::json::array();
  for (int byte = 0; byte < 256; ++byte) vocabulary[models::detail::byte_level_characters()[byte]] = byte;
  for (const auto& [left, right] : merges) {
    vocabulary[left + right] = 256 + list.size();
    list.push_back(left + " " + right);
  }
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", list}}}};
}

/// A tokenizer.json as Llama 2 has them: 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, 259 ▁, then letters, then merges.
inline nlohmann::json metaspace_json(const std::string& letters,
                                     const std::vector<std::pair<std::string, std::string>>& merges = {}) {
  nlohmann::json vocabulary = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}}, list = nlohmann::json::array();
  for (int byte = 0; byte < 256; ++byte) vocabulary[formatted("<0x%02X>", byte)] = 3 + byte;
  vocabulary["▁"] = 259;
  for (const char letter : letters) vocabulary[std::string(1, letter)] = vocabulary.size();
  for (const auto& [left, right] : merges) {
    vocabulary[left + right] = vocabulary.size();
    list.push_back({left, right});
  }
  const auto special = [](int id, const char* content) {
    return nlohmann::json{{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
  };
  const nlohmann::json space = {{"String", " "}}, metaspace = {{"String", "▁"}};
  return {{"version", "1.0"},
          {"added_tokens", {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")}},
          {"normalizer",
           {{"type", "Sequence"},
            {"normalizers",
             {{{"type", "Prepend"}, {"prepend", "▁"}}, {{"type", "Replace"}, {"pattern", space}, {"content", "▁"}}}}}},
          {"pre_tokenizer", nullptr},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single",
             {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
            {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}}}}}},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", metaspace}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"vocab", vocabulary},
            {"merges", list}}}};
}

inline nlohmann::json added_token(const std::string& content, int id,
                                  const nlohmann::json& flags = nlohmann::json::object()) {
  nlohmann::json token = {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                          {"rstrip", false}, {"normalized", false}, {"special", true}};
  token.update(flags);
  return token;
}

inline std::unique_ptr<models::Tokenizer> make_tokenizer(const nlohmann::json& document) {
  return models::detail::make_pipeline(models::detail::parse_tokenizer_json(document.dump(), "tokenizer.json"));
}

}  // namespace emend::testing
