// Errors: a class that programs branch on and a text of four parts that people act on.
//
// Every error text says where it happened, what was got, what was expected and what to do:
//   hparams/memit/foo.yaml:12: unknown field "v_lrr"; expected one of v_lr, …; did you mean "v_lr"?
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace emend {

enum class ErrorClass {
  kInvalidArgument,  ///< the caller's input cannot be used: options, hyper-parameters, facts
  kNotFound,         ///< a file, tensor or name does not exist
  kCorruption,       ///< a file or cache is damaged or inconsistent
  kUnsupported,      ///< valid, but not something emend can do
  kIo,               ///< the operating system refused: full disk, no permission
  kDevice,           ///< a device is missing or out of memory
  kNumeric,          ///< non-finite values, a matrix that is not positive definite, the collapse guard
  kCancelled,        ///< the user asked to stop
};

/// "invalid argument", "not found", … for logs and tests.
[[nodiscard]] std::string_view to_string(ErrorClass error_class) noexcept;

/// The four parts of a message. `where` and `got` are required; empty parts are left out.
struct ErrorParts {
  std::string where;
  std::string got;
  std::string expected;
  std::string advice;
};

class Error;
/// Where, got, expected and advice, for programs that show or translate them; they live as long as the error.
[[nodiscard]] const ErrorParts& parts_of(const Error& error) noexcept;

/// The only exception type that the library throws on purpose.
class Error : public std::runtime_error {
 public:
  /// Text: "where: got; expected …; advice".
  Error(ErrorClass error_class, const ErrorParts& parts);

  [[nodiscard]] ErrorClass error_class() const noexcept { return class_; }
  friend const ErrorParts& parts_of(const Error& error) noexcept;

 private:
  ErrorClass class_;
  std::shared_ptr<const ErrorParts> parts_;  ///< shared: copies of an exception must not throw
};

inline const ErrorParts& parts_of(const Error& error) noexcept {
  return *error.parts_;
}

/// Throws Error(kInvalidArgument) of these parts.
[[noreturn]] void refuse(const ErrorParts& parts);

/// The process exit status that a `main` returns for an error of this class
/// (2 usage or configuration, 3 data or model unusable, 4 numeric, 5 device or memory, 130 cancelled).
[[nodiscard]] int exit_code(ErrorClass error_class) noexcept;
/// kDevice where memory is what lacks (ENOMEM), kIo for every other errno.
[[nodiscard]] ErrorClass class_of_errno(int error) noexcept;

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);
}

/// Levenshtein distance; exposed for closest_name.
[[nodiscard]] int edit_distance(std::string_view a, std::string_view b);

/// Text for "did you mean": the candidate closest to `word` by edit distance, or empty if none is close.
/// `projection` (a member, a function) gives an element's name.
template <class Range, class Projection = std::identity>
[[nodiscard]] std::string closest_name(std::string_view word, const Range& candidates, Projection projection = {}) {
  std::string best;
  int best_distance = static_cast<int>(word.size()) / 3 + 2;
  for (const auto& element : candidates) {
    const auto& candidate = std::invoke(projection, element);
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace emend

/// For our own mistakes only; never reachable by user input. Throws std::logic_error (exit status 1).
#define EMEND_CHECK(condition, message)                                                         \
  do {                                                                                          \
    if (!(condition)) ::emend::detail::check_failed(__FILE__, __LINE__, #condition, (message)); \
  } while (false)
