// Tokens that are looked for in the text before anything else: special tokens and words added after training.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace emend::models::detail {

struct AddedToken {
  std::string content = {};
  uint32_t id = 0;
  bool single_word = false;  ///< only where no word character is next to it
  bool lstrip = false;       ///< takes the white space on its left
  bool rstrip = false;       ///< takes the white space on its right
  bool normalized = false;   ///< looked for in the normalised text
  bool special = true;       ///< left out by decode(…, skip_special = true)
};

/// A stretch of text: an added token, or the text between two of them.
struct AddedSpan {
  size_t begin = 0, end = 0;
  const AddedToken* token = nullptr;
};

/// Finds all of a set of tokens in one pass: at each place the longest one that starts there.
class AddedTokenSearch {
 public:
  /// Of several tokens with the same pattern the last counts.
  void add(std::string_view pattern, const AddedToken& token);
  [[nodiscard]] bool empty() const { return tokens_.empty(); }
  /// Appends the spans of `text` in order. Like the reference, a token that takes white space may overlap the next.
  void split(std::string_view text, std::vector<AddedSpan>& spans) const;

 private:
  using Tokens = std::map<std::string, AddedToken, std::less<>>;  // by pattern
  [[nodiscard]] Tokens::const_iterator longest(std::string_view text) const;

  Tokens tokens_;
  std::array<bool, 256> begins_{};  // some pattern, by byte
};

}  // namespace emend::models::detail
