// Random texts that tokenizers find hard: white space, marks, digits, special tokens, every part of Unicode.
#pragma once

#include <emend/models/tokenizer/detail/unicode.h>

#include <random>
#include <string>
#include <vector>

namespace emend::testing {

/// Valid UTF-8 of up to `parts` parts, a quarter of them single characters from anywhere.
inline std::string random_text(std::mt19937_64& random, size_t parts = 20, const std::vector<std::string>& more = {}) {
  static const std::vector<std::string> kParts = {" ",
                                                  "  ",
                                                  "\n",
                                                  "\r\n",
                                                  "\t",
                                                  "the",
                                                  " of",
                                                  "'ll",
                                                  "'S",
                                                  "12",
                                                  "345",
                                                  "é",
                                                  "e\u0301",
                                                  "漢字",
                                                  "かな",
                                                  "안녕",
                                                  "\u1100\u1161",
                                                  "👍🏽",
                                                  "👨\u200D👩",
                                                  "<s>",
                                                  "</s>",
                                                  "<|x|>",
                                                  "▁",
                                                  "Ġ",
                                                  "<0x41>",
                                                  ".",
                                                  "...",
                                                  "a",
                                                  "b",
                                                  "ab",
                                                  "ba",
                                                  "\u00A0",
                                                  "\u3000",
                                                  "\u2028",
                                                  std::string(1, '\0'),
                                                  "\u0327",
                                                  "ﬁ",
                                                  "½",
                                                  "मस्ते",
                                                  "{\n    return x;\n}",
                                                  "مرحبا",
                                                  "http://",
                                                  "don't",
                                                  "    ",
                                                  "\u180E",
                                                  "Hello",
                                                  " World",
                                                  "ﷺ",
                                                  "\u200B",
                                                  "1.5e-7"};
  std::string text;
  for (size_t n = random() % (parts + 1); n > 0; --n) {
    const size_t choice = random() % 8;
    if (choice == 0 && !more.empty()) {
      text += more[random() % more.size()];
    } else if (choice > 2) {
      text += kParts[random() % kParts.size()];
    } else {
      char32_t character = static_cast<char32_t>(random() % (choice == 1 ? 0x3000 : 0x110000));
      if (character >= 0xD800 && character < 0xE000) character = '?';
      models::detail::append_utf8(text, character);
    }
  }
  return text;
}

}  // namespace emend::testing
