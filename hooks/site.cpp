#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/hooks/site.h>

#include <algorithm>
#include <array>
#include <ranges>

namespace emend::hooks {
namespace {

// In the order of Site.
constexpr std::array<std::string_view, 23> kNames = {
    "embedding",     "layer_in",      "attn_in",     "attn_q",       "attn_k",     "attn_v",
    "attn_q_rotary", "attn_k_rotary", "attn_scores", "attn_pattern", "attn_z",     "attn_out",
    "mlp_in",        "mlp_gate",      "mlp_up",      "router",       "expert_out", "mlp_down_in",
    "mlp_down_out",  "mlp_out",       "layer_out",   "final_norm",   "logits"};

constexpr std::string_view kLayerPrefix = "layers.";

std::string with_prefix(Site site, const std::string& layer) {
  const auto name = std::string(kNames[static_cast<size_t>(site)]);
  return is_layer_site(site) ? std::string(kLayerPrefix) + layer + "." + name : name;
}

[[noreturn]] void bad_site(std::string_view text) {
  const auto all = mapped(all_sites(), [](Site site) { return with_prefix(site, "N"); });
  const auto firsts = mapped(all_sites(), [](Site site) { return with_prefix(site, "0"); });
  refuse({"site \"" + std::string(text) + "\"", "no such place in a decoder", "one of " + join(all),
          did_you_mean(text, firsts)});
}

}  // namespace

std::string to_string(const SiteRef& ref) {
  return with_prefix(ref.site, std::to_string(ref.layer));
}

SiteRef parse_site(std::string_view text) {
  std::string_view name = text;
  int layer = -1;
  if (text.starts_with(kLayerPrefix)) {
    const std::string_view rest = text.substr(kLayerPrefix.size());
    const size_t dot = rest.find('.');
    layer = number_in<int>(rest.substr(0, dot)).value_or(-1);
    if (layer < 0 || dot == rest.npos) bad_site(text);
    name = rest.substr(dot + 1);
  }
  const auto found = std::ranges::find(kNames, name);
  const auto site = static_cast<Site>(found - kNames.begin());
  if (found == kNames.end() || is_layer_site(site) != (layer >= 0)) bad_site(text);
  return {site, layer};
}

bool is_layer_site(Site site) noexcept {
  return site > Site::kEmbedding && site < Site::kFinalNorm;
}

const std::vector<Site>& all_sites() {
  static const auto sites =
      mapped(std::views::iota(size_t{0}, kNames.size()), [](size_t i) { return static_cast<Site>(i); });
  return sites;
}

}  // namespace emend::hooks
