#include <emend/core/sha256.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/page.h>

#include <map>

namespace emend::evaluation::detail {

// The files of templates/.
std::string_view page_html();
std::string_view page_css();
std::string_view page_js();
std::string_view quality_js();

namespace {

/// Text of others with its control characters and marks of direction escaped.
nlohmann::json shown(const nlohmann::json& data) {
  if (data.is_string()) return printable(data.get_ref<const std::string&>());
  nlohmann::json out = data;
  if (data.is_array())
    for (auto& item : out) item = shown(item);
  if (data.is_object()) {
    out.clear();
    for (const auto& [key, value] : data.items()) out[printable(key)] = shown(value);
  }
  return out;
}

/// JSON that may stand in a script element, which "<" could end.
std::string embeddable(const nlohmann::json& data) {
  std::string out;
  for (const char c : shown(data).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) {
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  }
  return out;
}

}  // namespace

std::string fill_page(const nlohmann::json& data) {
  const std::string text = embeddable(data), nonce = sha256_hex(text).substr(0, 32);
  const std::map<std::string_view, std::vector<std::string_view>> parts = {
      {"style", {page_css()}}, {"script", {page_js(), quality_js()}}, {"data", {text}}, {"nonce", {nonce}}};
  std::string out;
  std::string_view left = page_html();
  for (size_t at = left.find("{{"); at != std::string_view::npos; at = left.find("{{")) {
    const size_t end = left.find("}}", at);
    out += left.substr(0, at);
    for (const auto part : parts.at(left.substr(at + 2, end - at - 2))) out += part;
    left.remove_prefix(end + 2);
  }
  return out.append(left);
}

}  // namespace emend::evaluation::detail
