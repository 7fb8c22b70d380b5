#define PCRE2_CODE_UNIT_WIDTH 8
#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/regex.h>
#include <pcre2.h>
#include <utf8proc.h>

#include <cstdlib>

namespace emend::evaluation::detail {
namespace {

pcre2_code* code_of(const std::shared_ptr<void>& code) {
  return static_cast<pcre2_code*>(code.get());
}

[[noreturn]] void fail(const char* what, int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  throw Error(ErrorClass::kInvalidArgument,
              {what, std::string(reinterpret_cast<char*>(text)), "text that the pattern can match", ""});
}

}  // namespace

Regex::Regex(const std::string& pattern) {
  int code = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       PCRE2_UTF | PCRE2_UCP, &code, &offset, nullptr);
  EMEND_CHECK(compiled != nullptr, "pattern does not compile: " + pattern);
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
  code_ = std::shared_ptr<void>(compiled, [](void* p) { pcre2_code_free(static_cast<pcre2_code*>(p)); });
}

std::string Regex::replace_all(std::string_view text, const std::string& replacement) const {
  std::string out(text.size() * 2 + 64, '\0');
  for (;;) {
    PCRE2_SIZE size = out.size();
    const int code = pcre2_substitute(code_of(code_), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                                      PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_OVERFLOW_LENGTH, nullptr, nullptr,
                                      reinterpret_cast<PCRE2_SPTR>(replacement.data()), replacement.size(),
                                      reinterpret_cast<PCRE2_UCHAR*>(out.data()), &size);
    if (code == PCRE2_ERROR_NOMEMORY) {
      out.resize(size + 1);
      continue;
    }
    if (code < 0) fail("replacing in a text", code);
    out.resize(size);
    return out;
  }
}

std::vector<std::string> Regex::find_all(std::string_view text) const {
  std::vector<std::string> found;
  std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(
      pcre2_match_data_create_from_pattern(code_of(code_), nullptr), pcre2_match_data_free);
  for (size_t at = 0; at <= text.size();) {
    const int code = pcre2_match(code_of(code_), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, 0,
                                 match.get(), nullptr);
    if (code == PCRE2_ERROR_NOMATCH) break;
    if (code < 0) fail("searching in a text", code);
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
    EMEND_CHECK(range[1] > range[0], "the pattern matches the empty text");
    found.emplace_back(text.substr(range[0], range[1] - range[0]));
    at = range[1];
  }
  return found;
}

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (const auto bad = first_invalid_utf8(text)) {
    out.append(text.substr(0, *bad)).append("\xEF\xBF\xBD");
    text.remove_prefix(*bad + 1);
  }
  return out.append(text);
}

std::string lower_case(std::string_view text) {
  const std::string valid = valid_utf8(text);
  utf8proc_uint8_t* mapped = nullptr;
  const auto size = utf8proc_map_custom(
      reinterpret_cast<const utf8proc_uint8_t*>(valid.data()), static_cast<utf8proc_ssize_t>(valid.size()), &mapped,
      UTF8PROC_STABLE, [](utf8proc_int32_t point, void*) { return utf8proc_tolower(point); }, nullptr);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  return size < 0 ? valid : std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
}

std::string compatibility_form(std::string_view text) {
  const std::string valid = valid_utf8(text);
  utf8proc_uint8_t* mapped = nullptr;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(valid.data()),
                                 static_cast<utf8proc_ssize_t>(valid.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  return size < 0 ? valid : std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
}

}  // namespace emend::evaluation::detail
