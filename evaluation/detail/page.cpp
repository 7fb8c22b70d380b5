#include <emend/core/sha256.h>
#include <emend/evaluation/detail/page.h>

namespace emend::evaluation::detail {
namespace {

/// JSON that may stand in a script element: "<" could end it, and the two line ends are none in JSON alone.
std::string embeddable(const nlohmann::json& data) {
  std::string out;
  const std::string text = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = std::string_view(text).substr(i, 3);
    if (text[i] == '<') {
      out += "\\u003c";
    } else if (rest == "\u2028" || rest == "\u2029") {
      out += rest == "\u2028" ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::string fill_page(const nlohmann::json& data) {
  const std::string text = embeddable(data), nonce = sha256_hex(text).substr(0, 32);
  std::string out;
  std::string_view left = page_template();
  for (size_t at = left.find("{{"); at != std::string_view::npos; at = left.find("{{")) {
    out += left.substr(0, at);
    out += left.substr(at).starts_with("{{data}}") ? text : nonce;
    left.remove_prefix(left.find("}}", at) + 2);
  }
  return out.append(left);
}

}  // namespace emend::evaluation::detail
