#define PCRE2_CODE_UNIT_WIDTH 8
#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/regex.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <pcre2.h>

namespace emend::models::detail {
namespace {

// A pattern that needs more is hostile or broken: tokenizer patterns take a few steps a character.
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
struct Scratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = nullptr;

  Scratch() {
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, kHeapLimitKib);
  }
  ~Scratch() {
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

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool jit = false;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern, std::string where)
    : code_(std::make_unique<Code>()), source_(pattern), where_(std::move(where)) {
  const std::string translated = translate_pattern(pattern, where_);
  std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  pcre2_set_max_pattern_length(context.get(), 64 * 1024);
  int error = 0;
  PCRE2_SIZE at = 0;
  code_->code =
      pcre2_compile(bytes_of(translated), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, context.get());
  const auto refuse = [&](const std::string& reason) {
    throw Error(ErrorClass::kCorruption,
                {where_, "cannot use the pattern \"" + excerpt(pattern) + "\" (" + reason + ")", "a regular expression",
                 "get the tokenizer file again, or correct the pattern"});
  };
  if (!code_->code) refuse(message_of(error) + " at position " + std::to_string(at));
  code_->jit = pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE) == 0;
}

Regex Regex::literal(std::string text, std::string where) {
  EMEND_CHECK(!text.empty(), "an empty literal matches everywhere");
  Regex regex;
  regex.source_ = std::move(text);
  regex.where_ = std::move(where);
  return regex;
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

bool Regex::match(std::string_view text, size_t start, size_t& begin, size_t& end) const {
  if (!code_) {
    begin = text.find(source_, start);
    end = begin + source_.size();
    return begin != std::string_view::npos;
  }
  Scratch& work = scratch();
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
  if (result < 0)
    throw Error(ErrorClass::kInvalidArgument,
                {where_,
                 "the pattern \"" + excerpt(source_) + "\" gave up on the text after byte " + std::to_string(start) +
                     " (" + message_of(result) + ")",
                 "a pattern that needs few steps for each character", "split the text, or correct the pattern"});
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(work.data);
  begin = offsets[0];
  end = offsets[1];
  if (end < begin) end = begin;  // \K in a look-ahead
  return true;
}

Regex::Scan::Scan(const Regex& regex, std::string_view text) : regex_(regex), text_(text) {
  if (regex.code_ && !is_ascii(text) && with_known_characters(text, known_)) text_ = known_;
}

bool Regex::Scan::next(size_t& begin, size_t& end) {
  while (position_ <= text_.size()) {
    if (!regex_.match(text_, position_, begin, end)) break;
    if (end > begin || end != last_end_) {
      position_ = last_end_ = end;
      return true;
    }
    if (end >= text_.size()) break;
    position_ = end + utf8_length(text_[end]);
  }
  position_ = text_.size() + 1;
  return false;
}

}  // namespace emend::models::detail
