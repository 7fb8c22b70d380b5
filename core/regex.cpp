#define PCRE2_CODE_UNIT_WIDTH 8
#include <emend/core/regex.h>
#include <emend/core/text.h>
#include <pcre2.h>

namespace emend {
namespace {

// A pattern that needs more is hostile or broken: patterns take a few steps a character.
constexpr uint32_t kMatchLimit = 2'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;
constexpr size_t kJitStackMax = 8 * 1024 * 1024;

std::string message_of(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof buffer) < 0) return "error " + std::to_string(code);
  return reinterpret_cast<const char*>(buffer);
}

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

// Working memory of one thread. It holds no state between matches.
struct RegexScratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = nullptr;

  RegexScratch() {
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, kHeapLimitKib);
  }
  ~RegexScratch() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
  // The JIT first runs on 32 KiB of the machine stack; a real one is made when that is not enough.
  void grow() {
    stack = pcre2_jit_stack_create(256 * 1024, kJitStackMax, nullptr);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
};

RegexScratch& regex_scratch() {
  thread_local RegexScratch instance;
  return instance;
}

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool jit = false;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern, std::string where, bool lines) : pattern_(pattern), where_(std::move(where)) {
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  pcre2_set_max_pattern_length(context.get(), 64 * 1024);
  int error = 0;
  PCRE2_SIZE at = 0;
  auto compiled = std::make_shared<Code>();
  compiled->code = pcre2_compile(bytes_of(pattern), pattern.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | (lines ? PCRE2_MULTILINE : 0),
                                 &error, &at, context.get());
  if (!compiled->code)
    throw Error(ErrorClass::kCorruption, {where_,
                                          "cannot use the pattern \"" + shorten(pattern) + "\" (" + message_of(error) +
                                              " at position " + std::to_string(at) + ")",
                                          "a regular expression", "get the file again, or correct the pattern"});
  compiled->jit = pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE) == 0;
  code_ = std::move(compiled);
}

void Regex::give_up(int reason, size_t start) const {
  refuse({where_,
          "the pattern \"" + shorten(pattern_) + "\" gave up on the text after byte " + std::to_string(start) + " (" +
              message_of(reason) + ")",
          "a pattern that needs few steps for each character", "split the text, or correct the pattern"});
}

bool Regex::match(std::string_view text, size_t start, size_t& begin, size_t& end) const {
  RegexScratch& work = regex_scratch();
  const auto run = [&] {
    return code_->jit ? pcre2_jit_match(code_->code, bytes_of(text), text.size(), start, 0, work.data, work.context)
                      : pcre2_match(code_->code, bytes_of(text), text.size(), start, PCRE2_NO_UTF_CHECK, work.data,
                                    work.context);
  };
  int result = run();
  if (result == PCRE2_ERROR_JIT_STACKLIMIT && !work.stack) {
    work.grow();
    result = run();
  }
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0) give_up(result, start);
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(work.data);
  begin = offsets[0];
  end = offsets[1];
  if (end < begin) end = begin;  // \K in a look-ahead
  return true;
}

std::string Regex::replace_all(std::string_view text, const std::string& replacement) const {
  std::string out(text.size() * 2 + 64, '\0');
  for (;;) {
    PCRE2_SIZE size = out.size();
    const int code =
        pcre2_substitute(code_->code, bytes_of(text), text.size(), 0,
                         PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_OVERFLOW_LENGTH, nullptr, regex_scratch().context,
                         bytes_of(replacement), replacement.size(), reinterpret_cast<PCRE2_UCHAR*>(out.data()), &size);
    if (code == PCRE2_ERROR_NOMEMORY) {
      out.resize(size + 1);
      continue;
    }
    if (code < 0) give_up(code, 0);
    out.resize(size);
    return out;
  }
}

std::vector<std::string> Regex::find_all(std::string_view text) const {
  std::vector<std::string> found;
  for (size_t at = 0, begin = 0, end = 0; match(text, at, begin, end); at = end) {
    EMEND_CHECK(end > begin, "the pattern matches the empty text");
    found.emplace_back(text.substr(begin, end - begin));
  }
  return found;
}

}  // namespace emend
