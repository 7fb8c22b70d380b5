// tokenizer.json: what loads must encode and decode any text. The first line of the input that does not begin with "{"
// is the text; the rest is the file.
#include <emend/models/tokenizer/tokenizer.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(tokenizer) {
  static const Folder folder("tokenizer");
  std::string_view text = "The city of Z\xC3\xBCrich \xE6\x9D\xB1 is 1234.\n";
  if (!input.empty() && input[0] != '{')
    if (const size_t end = input.find('\n'); end != std::string_view::npos) {
      text = input.substr(0, end);
      input = input.substr(end + 1);
    }
  folder.write("tokenizer.json", input);
  std::unique_ptr<models::Tokenizer> tokenizer;
  expect_error_or_success([&] { tokenizer = models::load_tokenizer(folder.path()); });
  if (!tokenizer) return;
  expect_error_or_success([&] {
    const auto encoding = tokenizer->encode(text, true);
    for (const auto& [begin, end] : encoding.offsets)
      if (begin > end || end > text.size()) std::abort();
    (void)tokenizer->decode(encoding.ids);
    for (const int64_t id : encoding.ids) (void)tokenizer->token_bytes(id);
  });
}

}  // namespace emend::fuzz
