// A model family as data: names in config.json, block flags, tensor table, names of modules, a tiny flavour for tests.
//
// Adding a family is one file in models/families/ and one line in models/families.def (docs/adding-a-family.md).
#pragma once

#include <emend/devices/placement.h>
#include <emend/models/config.h>
#include <emend/models/config_reader.h>
#include <emend/models/gguf/gguf_form.h>

namespace emend::models {

enum class Orientation;

/// What a tensor is for. The executor finds weights by part; names exist only in the tables.
enum class Part {
  kEmbedding,
  kPositions,
  kProjectIn,
  kProjectOut,
  kFinalNorm,
  kHead,  // once a model
  kAttnNorm,
  kQkv,
  kQ,
  kK,
  kV,
  kQNorm,
  kKNorm,
  kAttnOut,
  kAttnPostNorm,  // once a layer
  kMlpNorm,
  kGateUp,
  kGate,
  kUp,
  kDown,
  kMlpPostNorm,
  kRouter,
  kExpertGate,
  kExpertUp,
  kExpertDown,  // once an expert
};
inline constexpr int kParts = static_cast<int>(Part::kExpertDown) + 1;

/// One row of a family's tensor table.
struct TensorSpec {
  Part part;
  /// "model.layers.{layer}.mlp.down_proj.weight"; {expert} where the part is an expert's.
  std::string name;
  /// Stored shape: one term a dimension. Symbols: D hidden, F MLP width, V vocabulary, P position rows, Q heads times
  /// head size, K key-value heads times head size, d head size, E embedding width, X experts; also "3D", "Q+2K".
  std::string shape;
  /// The tensor exists only if this holds; absent: always. Takes `&ModelConfig::qkv_bias` or a lambda.
  std::function<bool(const ModelConfig&)> when = {};
};

/// The name of a table's first row of a part, which is its weight; empty if there is none.
[[nodiscard]] std::string name_of(const std::vector<TensorSpec>& table, Part part);

/// Names of modules as MEMIT's and EasyEdit's hyper-parameter files write them, "{}" for the layer.
struct ModuleNames {
  std::string layer = "model.layers.{}";
  std::string attn = "model.layers.{}.self_attn";
  std::string mlp = "model.layers.{}.mlp";  ///< empty: the family has no such module (OPT)
  std::string rewrite = "model.layers.{}.mlp.down_proj";
  std::string ln_f = "model.norm";
  std::string lm_head = "lm_head";
  std::string embedding = "model.embed_tokens";
  std::string position;  ///< empty: no learned positions
};

/// The spelling of config.json. Each list holds synonyms; the first one found counts.
struct ConfigKeys {
  using Names = std::vector<std::string>;
  Names hidden{"hidden_size"}, layers{"num_hidden_layers"}, heads{"num_attention_heads"};
  Names kv_heads{"num_key_value_heads"};  ///< default: heads
  Names head_dim{"head_dim"};
  int64_t default_head_dim = 0;  ///< 0: hidden / heads
  Names mlp_width{"intermediate_size"};
  int64_t mlp_width_factor = 0;  ///< default of mlp_width in units of hidden; 0: required
  Names vocab{"vocab_size"}, max_positions{"max_position_embeddings"};
  int64_t default_max_positions = 0;  ///< 0: required
  Names norm_eps{"rms_norm_eps"};
  double default_norm_eps = 1e-6;
  Names activation{"hidden_act"};
  std::string default_activation = "silu";
  bool default_tied = false;
  double rotary_fraction = 1;  ///< default of partial_rotary_factor
  Names rotary_fraction_keys{"partial_rotary_factor"};
  Names theta{"rope_theta"};
  double default_theta = 10000;
  bool yarn_means_longrope = false;  ///< Phi-3
};

/// A tiny configuration from which tests build a random model.
struct DebugFlavour {
  std::string name;
  std::string config;  ///< JSON text
};

struct FamilySpec {
  std::string name;                      ///< "llama"
  std::vector<std::string> model_types;  ///< values of config.json's model_type
  std::string base_prefix;  ///< "model.": checkpoints may leave it out, or have it, in all names but the head's
  ConfigKeys keys;
  ModelConfig block;  ///< flags that all members share; sizes are ignored
  /// Reads what the common keys do not say and changes flags accordingly; may be empty.
  std::function<void(const ConfigReader&, ModelConfig&)> refine;
  std::vector<TensorSpec> tensors;
  std::vector<std::string> ignored;  ///< names that may appear and are not weights; "*" stands for anything
  ModuleNames modules;
  Orientation orientation{};  ///< of the linear layers in blocks (kOutIn unless said)
  /// JSON text: what a text_config inside a multimodal configuration leaves out; empty if there is no such form.
  std::string nested_defaults;
  GgufForm gguf;
  std::vector<DebugFlavour> debug;
};

/// All families, in the order of families.def.
[[nodiscard]] const std::vector<FamilySpec>& all_families();
/// The family of a model_type. Throws Error(kUnsupported) with the list and the closest name; `where` for the message.
[[nodiscard]] const FamilySpec& find_family(const std::string& model_type, const std::string& where);
/// By FamilySpec::name. Throws Error(kNotFound).
[[nodiscard]] const FamilySpec& family_named(const std::string& name);
/// `own`, a family that is not in families.def, or the one that config.json's model_type names. Throws as find_family.
[[nodiscard]] const FamilySpec& family_of(const nlohmann::json& config, const std::string& file,
                                          const FamilySpec* own = nullptr);

/// A tensor that a checkpoint of this configuration must hold.
struct ExpectedTensor {
  std::string name;  ///< with the base prefix
  std::vector<int64_t> shape;
  Part part;
  int layer = -1;
  int expert = -1;
  bool bias = false;
};
/// The family's table for one configuration, layers and experts written out; without the head's weight if it is tied.
[[nodiscard]] std::vector<ExpectedTensor> expected_tensors(const FamilySpec& family, const ModelConfig& config);

/// What a file's tensor may be called in the table: without the base prefix, in multimodal files behind another.
[[nodiscard]] std::vector<std::string> table_spellings(const FamilySpec& family, const std::string& name);

/// True for a tensor that a checkpoint may hold and that is no weight: masks, inverse frequencies.
[[nodiscard]] bool is_ignored(const FamilySpec& family, const std::string& name);
/// A name without the family's base prefix: the same for both spellings of one weight.
[[nodiscard]] std::string without_base(const FamilySpec& family, const std::string& name);

/// Module names for device maps (devices/placement.h).
[[nodiscard]] devices::ModuleNames device_module_names(const FamilySpec& family, const ModelConfig& config);

/// The module names of a hyper-parameter file; empty ones are not checked.
struct NamedModules {
  std::string layer_module_tmp, attn_module_tmp, mlp_module_tmp, rewrite_module_tmp, ln_f_module, lm_head_module;
};
/// Checks them against the family. Accepts names with or without the base prefix, and for the head also the embedding
/// of a tied model and "lm_head" (transformer.wte, model.embed_tokens and lm_head all mean the head's weight). Throws
/// Error(kInvalidArgument) with where(key) (a line of a file) and key, what was got and expected.
void check_module_names(const FamilySpec& family, const ModelConfig& config, const NamedModules& names,
                        const std::function<std::string(const char* key)>& where);

}  // namespace emend::models
