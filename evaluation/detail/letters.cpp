#include <emend/core/utf8.h>
#include <emend/evaluation/detail/letters.h>
#include <utf8proc.h>

#include <algorithm>
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

std::string plain_letters(std::string_view text) {
  const std::string mapped = lower_case(compatibility_form(text));
  std::string plain;
  utf8proc_int32_t point = 0;
  for (size_t at = 0; at < mapped.size();) {
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(mapped.data()) + at;
    const auto size =
        static_cast<size_t>(std::max<utf8proc_ssize_t>(1, utf8proc_iterate(bytes, mapped.size() - at, &point)));
    const auto category = utf8proc_category(point);
    if (point < 0x80 || category <= UTF8PROC_CATEGORY_NO)
      plain += mapped.substr(at, size);
    else if (category >= UTF8PROC_CATEGORY_ZS)
      plain += ' ';
    else
      plain += category == UTF8PROC_CATEGORY_PD                                       ? '-'
               : point == 0x2018 || point == 0x2019                                   ? '\''
               : category == UTF8PROC_CATEGORY_PI || category == UTF8PROC_CATEGORY_PF ? '"'
                                                                                      : ';';
    at += size;
  }
  return plain;
}

bool spaceless(std::string_view text, size_t at) {
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  utf8proc_int32_t point = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                   static_cast<utf8proc_ssize_t>(text.size() - at), &point);
  const auto in = [&](int first, int last) { return point >= first && point <= last; };
  return in(0x0E00, 0x0EFF) || in(0x1000, 0x109F) || in(0x1780, 0x17FF) || in(0x2E80, 0x9FFF) || in(0xF900, 0xFAFF) ||
         in(0x20000, 0x3FFFF);
}

}  // namespace emend::evaluation::detail
