// Names of the places in a decoder where activations can be read or replaced.
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <vector>

namespace emend::hooks {

/// Every tensor at a site is packed: [tokens, …], the tokens of all rows one after the other (see models/batch.h).
///   N tokens · D model width · F MLP width · V vocabulary · h heads · g key-value heads · d head size · X experts
///   S key slots: the tokens of the longest row; with a cache, those before them first
/// Nothing is computed or kept for a site without hooks. Where a layer's scores or pattern are hooked, its attention is
/// written out instead of left to a fused kernel, which rounds differently.
enum class Site {
  kEmbedding,    ///< input of layer 0: after embedding scale, position embedding and input projection [N,D]
  kLayerIn,      ///< input of the layer (residual stream) [N,D]
  kAttnIn,       ///< input of the attention module, after its norm [N,D]
  kAttnQ,        ///< queries as projected, bias included [N,h,d]
  kAttnK,        ///< keys as projected [N,g,d]
  kAttnV,        ///< values [N,g,d]
  kAttnQRotary,  ///< queries as they meet the keys: after the norm of heads and rotary embedding, where there are any
                 ///< [N,h,d]
  kAttnKRotary,  ///< keys as they meet the queries, and as a cache keeps them [N,g,d]
  kAttnScores,   ///< what the softmax gets: scaled, capped, -inf where a key is hidden [N,h,S]
  kAttnPattern,  ///< what each token gives to the values of which [N,h,S]
  kAttnZ,        ///< what each head mixed, before the output projection [N,h,d]
  kAttnOut,      ///< output of the attention module (after the output projection) [N,D]
  kMlpIn,        ///< input of the MLP, after its norm [N,D]
  kMlpGate,      ///< output of the gate's matrix, before the activation; gated MLPs only [N,F]
  kMlpUp,        ///< output of the other first matrix; of plain MLPs, before the activation [N,F]
  kRouter,       ///< the router's logits; mixtures of experts only [N,X]
  kExpertOut,    ///< outputs of the experts before they are weighed, 0 where a token does not go [N,X,D]
  kMlpDownIn,    ///< input of the rewritten matrix: the "key" [N,F]
  kMlpDownOut,   ///< output of the rewritten matrix, bias included: the "value" [N,D]
  kMlpOut,       ///< output of the MLP module (equals kMlpDownOut except where a family adds something) [N,D]
  kLayerOut,     ///< output of the layer (residual stream) [N,D]
  kFinalNorm,    ///< output of the final norm: what enters the head [M,D], M the projected tokens
  kLogits,       ///< what the model returns [M,V]
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
