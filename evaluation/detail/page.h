// The page that shows a run or a causal trace: templates/page.html with one JSON document in it, which its script
// draws.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace emend::evaluation::detail {

/// A complete document. `data` is embedded so that no text in it can end the element that holds it; broken UTF-8 is
/// replaced. The page's policy allows the template's own script and style by a nonce made from the data, nothing else.
[[nodiscard]] std::string fill_page(const nlohmann::json& data);

}  // namespace emend::evaluation::detail
