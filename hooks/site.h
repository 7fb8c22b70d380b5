// Names of the places in a decoder where activations can be read or replaced.
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <vector>

namespace emend::hooks {

/// Every tensor at a site is packed: [tokens, width], the tokens of all rows one after the other (see models/batch.h).
enum class Site {
  kEmbedding,   ///< input of layer 0: after embedding scale, position embedding and input projection [N,D]
  kLayerIn,     ///< input of the layer (residual stream) [N,D]
  kAttnIn,      ///< input of the attention module, after its norm [N,D]
  kAttnOut,     ///< output of the attention module (after the output projection) [N,D]
  kMlpIn,       ///< input of the MLP, after its norm [N,D]
  kMlpDownIn,   ///< input of the rewritten matrix: the "key" [N,F]
  kMlpDownOut,  ///< output of the rewritten matrix, bias included: the "value" [N,D]
  kMlpOut,      ///< output of the MLP module (equals kMlpDownOut except where a family adds something) [N,D]
  kLayerOut,    ///< output of the layer (residual stream) [N,D]
  kFinalNorm,   ///< output of the final norm: what enters the head [M,D], M the projected tokens
  kLogits,      ///< what the model returns [M,V]
};

/// A site in one layer; `layer` is -1 for the sites outside layers (kEmbedding, kFinalNorm, kLogits).
struct SiteRef {
  Site site;
  int layer = -1;
  auto operator<=>(const SiteRef&) const = default;
};

/// "layers.3.mlp_down_in", "embedding", … for messages and files.
[[nodiscard]] std::string to_string(const SiteRef& ref);
/// The inverse. Throws Error(kInvalidArgument) with the closest name.
[[nodiscard]] SiteRef parse_site(std::string_view text);
[[nodiscard]] bool is_layer_site(Site site) noexcept;
/// All sites, in the order in which a forward pass meets them.
[[nodiscard]] const std::vector<Site>& all_sites();

}  // namespace emend::hooks
