#include <emend/core/error.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace emend {
namespace {

struct ClassFacts {
  std::string_view name;
  int exit_code;
};
// In the order of ErrorClass.
constexpr ClassFacts kClasses[] = {{"invalid argument", 2}, {"not found", 3}, {"corruption", 3}, {"unsupported", 3},
                                   {"input/output", 3},     {"device", 5},    {"numeric", 4},    {"cancelled", 130}};

}  // namespace

std::string_view to_string(ErrorClass error_class) noexcept {
  return kClasses[static_cast<size_t>(error_class)].name;
}

int exit_code(ErrorClass error_class) noexcept {
  return kClasses[static_cast<size_t>(error_class)].exit_code;
}

static std::string join_parts(const ErrorParts& parts) {
  std::string text = parts.where.empty() ? parts.got : parts.where + ": " + parts.got;
  if (!parts.expected.empty()) text += "; expected " + parts.expected;
  if (!parts.advice.empty()) text += "; " + parts.advice;
  std::ranges::replace(text, '\0', '?');  // the text ends at the first one for everybody who prints it
  return text;
}

Error::Error(ErrorClass error_class, const ErrorParts& parts)
    : std::runtime_error(join_parts(parts)), class_(error_class), parts_(std::make_shared<const ErrorParts>(parts)) {}

void refuse(const ErrorParts& parts) {
  throw Error(ErrorClass::kInvalidArgument, parts);
}

ErrorClass class_of_errno(int error) noexcept {
  return error == ENOMEM ? ErrorClass::kDevice : ErrorClass::kIo;
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substitute = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

namespace detail {
void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw std::logic_error(std::string("internal error at ") + file + ":" + std::to_string(line) + ": " + condition +
                         ": " + message);
}
}  // namespace detail

}  // namespace emend
