// The frame of a page: head, style sheet, no scripts, no network.
#pragma once

#include <string>

namespace emend::evaluation::detail {

/// A complete HTML document. `title` is escaped, `body` is HTML.
[[nodiscard]] std::string html_page(const std::string& title, const std::string& body);

}  // namespace emend::evaluation::detail
