#include <emend/evaluation/detail/html.h>
#include <emend/evaluation/detail/page.h>
#include <emend/evaluation/detail/report_style.h>

namespace emend::evaluation::detail {
namespace {

std::string series_rules() {
  std::string out;
  for (char digit = '0'; digit < '8'; ++digit)
    for (const char* c = kSeriesRule; *c; ++c) out += *c == '@' ? digit : *c;
  return out;
}

}  // namespace

std::string html_page(const std::string& title, const std::string& body) {
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
         "img-src "
         "data:\">"
         "<link rel=\"icon\" href=\"data:,\"><title>" +
         escape(title) + "</title><style>" + kReportStyle + series_rules() + "</style></head><body><main>" + body +
         "</main></body></html>\n";
}

}  // namespace emend::evaluation::detail
