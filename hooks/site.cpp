#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/hooks/site.h>

#include <array>

namespace emend::hooks {
namespace {

struct SiteName {
  Site site;
  std::string_view name;
  bool in_layer;
};

constexpr std::array<SiteName, 23> kSites = {{
    {Site::kEmbedding, "embedding", false},
    {Site::kLayerIn, "layer_in", true},
    {Site::kAttnIn, "attn_in", true},
    {Site::kAttnQ, "attn_q", true},
    {Site::kAttnK, "attn_k", true},
    {Site::kAttnV, "attn_v", true},
    {Site::kAttnQRotary, "attn_q_rotary", true},
    {Site::kAttnKRotary, "attn_k_rotary", true},
    {Site::kAttnScores, "attn_scores", true},
    {Site::kAttnPattern, "attn_pattern", true},
    {Site::kAttnZ, "attn_z", true},
    {Site::kAttnOut, "attn_out", true},
    {Site::kMlpIn, "mlp_in", true},
    {Site::kMlpGate, "mlp_gate", true},
    {Site::kMlpUp, "mlp_up", true},
    {Site::kRouter, "router", true},
    {Site::kExpertOut, "expert_out", true},
    {Site::kMlpDownIn, "mlp_down_in", true},
    {Site::kMlpDownOut, "mlp_down_out", true},
    {Site::kMlpOut, "mlp_out", true},
    {Site::kLayerOut, "layer_out", true},
    {Site::kFinalNorm, "final_norm", false},
    {Site::kLogits, "logits", false},
}};

constexpr std::string_view kLayerPrefix = "layers.";

[[noreturn]] void bad_site(std::string_view text) {
  std::vector<std::string> names;
  for (const auto& s : kSites) names.push_back(s.in_layer ? "layers.0." + std::string(s.name) : std::string(s.name));
  const auto in_full = [](const auto& s) { return (s.in_layer ? "layers.N." : "") + std::string(s.name); };
  refuse({"site \"" + std::string(text) + "\"", "no such place in a decoder", "one of " + join(kSites, ", ", in_full),
          did_you_mean(text, names)});
}

}  // namespace

std::string to_string(const SiteRef& ref) {
  const auto& entry = kSites[static_cast<size_t>(ref.site)];
  if (!entry.in_layer) return std::string(entry.name);
  return std::string(kLayerPrefix) + std::to_string(ref.layer) + "." + std::string(entry.name);
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
  for (const auto& s : kSites)
    if (s.name == name && s.in_layer == (layer >= 0)) return {s.site, layer};
  bad_site(text);
}

bool is_layer_site(Site site) noexcept {
  return kSites[static_cast<size_t>(site)].in_layer;
}

const std::vector<Site>& all_sites() {
  static const auto sites = mapped(kSites, [](const auto& s) { return s.site; });
  return sites;
}

}  // namespace emend::hooks
