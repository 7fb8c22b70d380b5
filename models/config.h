// What config.json says about a model, in one form for all families.
//
// Goals: everything the executor needs is here, checked once, so that the forward path never asks which family it runs;
// both the transformers 4 and the transformers 5 spelling of a key are read, and null means the default.
// Non-goals: training settings, generation settings.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace emend::models {

struct FamilySpec;

enum class Norm { kLayer, kRms };  ///< kind of norm
enum class Residual {
  kSequential,  ///< y = x + attn(norm x); y + mlp(norm y)
  kParallel,    ///< x + attn(norm x) + mlp(norm' x)
};
enum class NormOrder {
  kPre,       ///< before attention and MLP
  kPost,      ///< after the residual sums (OPT-350m)
  kSandwich,  ///< before and after each, the latter inside the residual branch (Gemma 2, GLM-4-0414)
};
enum class Qkv {
  kSeparate,  ///< three matrices
  kBlocks,    ///< one matrix: all query rows, all key rows, all value rows
  kPerHead,   ///< one matrix: [heads, 3, d]
  kPerGroup,  ///< one matrix: [kv heads, heads / kv heads + 2, d]; the last two rows of a group are key and value
};
enum class Positions { kRotary, kLearned, kAlibi };  ///< how the model knows where a token stands
enum class PositionRule {
  kGiven,     ///< the batch's positions: position ids if given, else columns
  kFromMask,  ///< without position ids, the number of real tokens before it in the row (OPT)
  kColumns,   ///< always the column, position ids are ignored (Qwen v1)
};
enum class Mlp {
  kPlain,       ///< down(act(up x))
  kGated,       ///< down(act(gate x) * up x)
  kGatedFused,  ///< the same with one matrix: gate rows, then up rows
  kExperts,     ///< a router and several gated MLPs
};
enum class Activation { kGelu, kGeluTanh, kQuickGelu, kRelu, kSilu };  ///< of the MLP

/// One form of rotary embedding. Formulas: docs/adding-a-family.md and models/detail/rotary.cpp.
struct Rotary {
  enum class Kind { kDefault, kLinear, kDynamic, kLlama3, kYarn, kLongrope, kQwenNtk };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  int64_t dims = 0;          ///< rotated dimensions at the start of each head; the rest passes through
  bool interleaved = false;  ///< pairs (2i, 2i+1) instead of (i, i + dims/2)
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3
  int64_t original_max = 0;                          ///< positions the model was first trained for
  int64_t max_positions = 0;
  double beta_fast = 32, beta_slow = 1;  ///< yarn
  bool truncate = true;                  ///< yarn
  std::optional<double> attention_factor, mscale, mscale_all_dim;
  std::vector<double> short_factor, long_factor;  ///< longrope

  /// True if the frequencies depend on how long the text is.
  [[nodiscard]] bool depends_on_length() const noexcept {
    return kind == Kind::kDynamic || kind == Kind::kLongrope || kind == Kind::kQwenNtk;
  }
};

struct ModelConfig {
  std::string model_type;  ///< as in the file
  std::string family;      ///< FamilySpec::name

  // Sizes
  int64_t hidden_size = 0;
  int64_t n_layers = 0;
  int64_t n_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t mlp_width = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t embedding_width = 0;  ///< differs from hidden_size only with input and output projections (OPT-350m)
  int64_t n_experts = 0, experts_per_token = 0;

  // Block
  Norm norm = Norm::kRms;
  double norm_eps = 1e-6;
  bool norm_one_plus = false;  ///< the norm multiplies by 1 + weight (Gemma)
  Residual residual = Residual::kSequential;
  NormOrder norm_order = NormOrder::kPre;
  bool mlp_norm = true;  ///< false: the MLP shares attention's norm (parallel residual only)
  Qkv qkv = Qkv::kSeparate;
  bool qk_norm = false;  ///< an RMS norm on every query and key head, before rotary
  Mlp mlp = Mlp::kGated;
  Activation activation = Activation::kSilu;
  bool qkv_bias = false, out_bias = false, mlp_bias = false;

  // Attention
  double attention_scale = 0;  ///< times query·key
  bool scale_by_inverse_layer = false;
  double attention_softcap = 0;  ///< 0: none
  std::vector<int64_t> windows;  ///< a layer's window in tokens, itself included; 0: none
  int64_t logn_length = 0;       ///< queries past this column are scaled by log_length(column); 0: none

  // Positions
  Positions positions = Positions::kRotary;
  PositionRule position_rule = PositionRule::kGiven;
  int64_t position_offset = 0;  ///< row of the learned table for position 0
  std::vector<Rotary> rotaries;
  std::vector<int> rotary_of_layer;  ///< index into `rotaries`
  bool alibi_like_falcon = false;    ///< rounded through bfloat16 and scaled together with the scores

  // Ends
  double embedding_scale = 1;
  bool final_norm = true;
  bool tied_head = false;
  bool head_bias = false;
  bool normalised_head = false;  ///< each head row is divided by its length (Baichuan 2)
  double logit_softcap = 0;      ///< 0: none

  /// Why no single matrix holds a layer's rewritten key-value memory; empty if one does.
  std::string no_edit_site;
  /// The layer's norm stands between the rewritten matrix and the residual stream (Gemma 2 and 3, GLM-4-0414,
  /// post-norm OPT): a residual at the layer's output is not reached by adding it to the matrix's output.
  [[nodiscard]] bool mlp_post_norm() const noexcept { return norm_order != NormOrder::kPre; }

  // Tokens
  std::vector<int64_t> eos_ids;  ///< empty if the file names none

  [[nodiscard]] int64_t window(int layer) const { return windows.empty() ? 0 : windows.at(layer); }
  [[nodiscard]] const Rotary& rotary(int layer) const { return rotaries.at(rotary_of_layer.at(layer)); }
  /// True if a token's frequencies depend on how long its text is, in any layer.
  [[nodiscard]] bool rotary_depends_on_length() const noexcept;
  /// True if text behind max_positions is read, but as noise: learned positions end there, others are made for more.
  [[nodiscard]] bool long_text_is_noise() const noexcept;
};

/// Reads and checks a config.json.
///   file  for messages
/// Throws Error(kUnsupported) for a model_type or a form that emend does not know; Error(kCorruption) for missing keys,
/// wrong types and impossible sizes, naming file, key, what was got and expected.
[[nodiscard]] ModelConfig parse_config(const nlohmann::json& config, const std::string& file);

/// The same for a family that is not in families.def.
[[nodiscard]] ModelConfig parse_config(const nlohmann::json& config, const std::string& file, const FamilySpec& family);

/// Throws Error(kUnsupported) if it says that the weights are quantised.
void refuse_quantised(const nlohmann::json& config, const std::string& file);

/// Everything that decides the arithmetic, however config.json spelled it; for fingerprints.
[[nodiscard]] nlohmann::json arithmetic(const ModelConfig& config);

}  // namespace emend::models
