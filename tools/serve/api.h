// The routes of `emend serve`: one table from which the server, its documentation and its tests are made.
#pragma once

#include "completions.h"
#include "jobs.h"

namespace emend::tools::serve {

struct Api {
  Engine& engine;
  PackFolder& packs;
  Jobs& jobs;
  Completions& completions;
  std::filesystem::path scratch;                   ///< for files that are made for a download
  Log log = {};                                    ///< what is lost in a download
  std::function<std::string()> http_metrics = {};  ///< of the server, once there is one
};

/// `api` must outlive them.
[[nodiscard]] std::vector<Route> api_routes(Api& api);
/// An OpenAPI 3.1 document of these routes.
[[nodiscard]] nlohmann::ordered_json openapi(const std::vector<Route>& routes);
/// The page's three files (page.cpp, made by the build).
[[nodiscard]] std::string_view page_html();
[[nodiscard]] std::string_view page_css();
[[nodiscard]] std::string_view page_js();

}  // namespace emend::tools::serve
