// A tokenizer for random models: a word with the space before it becomes one id that depends on its letters alone.
#pragma once

#include <emend/models/tokenizer/tokenizer.h>

#include "support/debug_models.h"
#include "support/memory_checkpoint.h"

namespace emend::testing {

class HashTokenizer final : public models::Tokenizer {
 public:
  /// Ids 3 … vocabulary-1; with `bos`, id 1 goes in front and id 2 behind when specials are asked for.
  explicit HashTokenizer(int64_t vocabulary, bool bos) : vocabulary_(vocabulary) {
    fingerprint_ = "hash" + std::to_string(vocabulary) + (bos ? "b" : "");
    if (!bos) return;
    special_.bos = 1;
    special_.prefix_ids = {1};
    special_.suffix_ids = {2};
  }
  [[nodiscard]] models::Encoding encode(std::string_view text, bool add_special) const override {
    models::Encoding out;
    if (add_special)
      for (int64_t id : special_.prefix_ids) out.ids.push_back(id), out.offsets.emplace_back(0, 0);
    for (size_t at = 0; at < text.size();) {
      size_t end = text.find(' ', at + 1);
      if (end == std::string_view::npos) end = text.size();
      uint64_t hash = 1469598103934665603ULL;
      for (char c : text.substr(at, end - at)) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
      out.ids.push_back(3 + static_cast<int64_t>(hash % static_cast<uint64_t>(vocabulary_ - 3)));
      out.offsets.emplace_back(at, end);
      at = end;
    }
    if (add_special)
      for (int64_t id : special_.suffix_ids) out.ids.push_back(id), out.offsets.emplace_back(text.size(), text.size());
    return out;
  }
  [[nodiscard]] std::string decode(std::span<const int64_t> ids, bool) const override {
    std::string text;
    for (int64_t id : ids) text += token_text(id);
    return text;
  }
  [[nodiscard]] std::string token_text(int64_t id) const override { return " t" + std::to_string(id); }
  [[nodiscard]] std::string token_bytes(int64_t id, bool) const override { return token_text(id); }
  [[nodiscard]] std::optional<int64_t> token_id(std::string_view) const override { return std::nullopt; }
  [[nodiscard]] bool is_special(int64_t id) const override { return id < 3; }
  [[nodiscard]] int64_t vocab_size() const override { return vocabulary_; }
  void save(const std::filesystem::path&) const override {}

 private:
  int64_t vocabulary_;
};

/// A checkpoint of random weights that has a HashTokenizer.
inline std::shared_ptr<const models::Checkpoint> hashed_checkpoint(std::shared_ptr<const models::Checkpoint> inner,
                                                                   bool bos = false) {
  const int64_t vocabulary = models::parse_config(inner->config(), "hashed").vocab_size;
  return models::with_tokenizer(std::move(inner),
                                [vocabulary, bos] { return std::make_unique<HashTokenizer>(vocabulary, bos); });
}

/// A random model of a family's debug flavour with such a tokenizer.
inline models::Model worded_model(const FamilyFlavour& flavour, bool bos = false, at::ScalarType dtype = at::kDouble,
                                  uint64_t seed = 1) {
  const auto plain = models::random_checkpoint(debug_config(flavour.family, flavour.flavour), seed);
  return models::load_model(hashed_checkpoint(plain, bos), {.dtype = dtype});
}

}  // namespace emend::testing
