#include <emend/core/utf8.h>
#include <emend/evaluation/detail/letters.h>
#include <utf8proc.h>

#include <memory>

namespace emend::evaluation::detail {

std::string lower_case(std::string_view text) {
  const std::string valid = repair_utf8(text);
  utf8proc_uint8_t* mapped = nullptr;
  const auto size = utf8proc_map_custom(
      reinterpret_cast<const utf8proc_uint8_t*>(valid.data()), static_cast<utf8proc_ssize_t>(valid.size()), &mapped,
      UTF8PROC_STABLE, [](utf8proc_int32_t point, void*) { return utf8proc_tolower(point); }, nullptr);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  return size < 0 ? valid : std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
}

std::string compatibility_form(std::string_view text) {
  const std::string valid = repair_utf8(text);
  utf8proc_uint8_t* mapped = nullptr;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(valid.data()),
                                 static_cast<utf8proc_ssize_t>(valid.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  return size < 0 ? valid : std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
}

}  // namespace emend::evaluation::detail
