// What the name in "tokenizer.ggml.pre" of a GGUF file stands for.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace emend::models::detail {

struct GgufPre {
  nlohmann::json pre_tokenizer;  ///< as in a tokenizer.json
  bool nfc = false;
  bool ignore_merges = false;
  bool add_bos = false;  ///< unless the file says otherwise
};

/// Throws Error(kUnsupported) naming `file` for an unknown name, with the closest known one.
[[nodiscard]] GgufPre gguf_pre(const std::string& name, const std::string& file);

}  // namespace emend::models::detail
