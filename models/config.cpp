#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/config.h>
#include <emend/models/detail/rotary.h>

#include <algorithm>
#include <cmath>

namespace emend::models {
namespace {

using Json = nlohmann::json;

void read_sizes(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config) {
  config.hidden_size = reader.integer(keys.hidden);
  config.n_layers = reader.integer(keys.layers);
  if (config.n_layers > 10000)
    reader.fail(keys.layers.front(), std::to_string(config.n_layers), "at most 10000 layers");
  config.n_heads = reader.integer(keys.heads);
  config.n_kv_heads = reader.integer_or(keys.kv_heads, config.n_heads);
  if (reader.find(keys.head_dim)) {
    config.head_dim = reader.integer(keys.head_dim);
  } else {
    if (keys.default_head_dim == 0 && config.hidden_size % config.n_heads != 0)
      reader.fail(keys.heads.front(), std::to_string(config.n_heads),
                  "a divisor of " + keys.hidden.front() + " " + std::to_string(config.hidden_size));
    config.head_dim = keys.default_head_dim > 0 ? keys.default_head_dim : config.hidden_size / config.n_heads;
  }
  config.mlp_width = keys.mlp_width_factor > 0
                         ? reader.integer_or(keys.mlp_width, keys.mlp_width_factor * config.hidden_size)
                         : reader.integer(keys.mlp_width);
  config.vocab_size = reader.integer(keys.vocab);
  config.max_positions = keys.default_max_positions > 0
                             ? reader.integer_or(keys.max_positions, keys.default_max_positions)
                             : reader.integer(keys.max_positions);
  config.embedding_width = config.hidden_size;
}

Activation read_activation(const ConfigReader& reader, const ConfigKeys& keys) {
  const std::string name = reader.text_or(keys.activation, keys.default_activation);
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_new" || name == "gelu_fast" || name == "gelu_pytorch_tanh" || name == "gelu_accurate")
    return Activation::kGeluTanh;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu" || name == "swish") return Activation::kSilu;
  reader.unsupported(keys.activation.front(), "\"" + name + "\"",
                     "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, gelu_accurate, quick_gelu, relu, silu or swish",
                     "this activation is not known");
}

void read_ends(const ConfigReader& reader, ModelConfig& config) {
  const Json* eos = reader.find({"eos_token_id"});
  if (!eos) return;
  for (const Json& value : eos->is_array() ? *eos : Json::array({*eos})) {
    if (!value.is_number_integer()) reader.fail("eos_token_id", eos->dump(), "an integer or a list of integers");
    if (value.get<int64_t>() >= 0) config.eos_ids.push_back(value.get<int64_t>());
  }
}

// Families that decide the number in `refine` do not declare the key.
std::string kv_heads_key(const ConfigReader& reader, const ConfigKeys& keys) {
  for (const char* known : {"multi_query_group_num", "num_kv_heads", "n_head_kv"})
    if (reader.has(known)) return known;
  return keys.kv_heads.empty() ? "number of key-value heads" : keys.kv_heads.front();
}

void check(const ConfigReader& reader, const FamilySpec& family, const ModelConfig& config) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  if (config.n_heads % config.n_kv_heads != 0)
    reader.fail(kv_heads_key(reader, family.keys), number(config.n_kv_heads),
                "a divisor of the " + number(config.n_heads) + " heads");
  if (config.norm_eps >= 1)
    reader.fail(family.keys.norm_eps.empty() ? "norm_eps" : family.keys.norm_eps.front(), short_number(config.norm_eps),
                "a small number, such as 1e-5");
  if (config.positions == Positions::kRotary && config.rotaries.empty())
    throw Error(ErrorClass::kUnsupported,
                {reader.where(), "no rotary form", "one", "the family's table is incomplete"});
  for (const Rotary& rotary : config.rotaries)
    if (rotary.dims < 2 || rotary.dims % 2 != 0 || rotary.dims > config.head_dim)
      reader.fail("rotary dimensions", number(rotary.dims) + " of a head of " + number(config.head_dim),
                  "an even number from 2 to the head size",
                  "check partial_rotary_factor, rotary_dim or rotary_pct, and the head size");
  for (const int64_t window : config.windows)
    if (window < 0) reader.fail("sliding_window", number(window), "a positive number of tokens or null");
  if (config.residual == Residual::kSequential && !config.mlp_norm)
    throw Error(ErrorClass::kUnsupported,
                {reader.where(), "a sequential block without its own MLP norm", "a norm for each", ""});
}

}  // namespace

bool ModelConfig::rotary_depends_on_length() const noexcept {
  return std::ranges::any_of(rotaries, [](const Rotary& rotary) { return rotary.depends_on_length(); });
}

bool ModelConfig::long_text_is_noise() const noexcept {
  return positions == Positions::kRotary && !rotary_depends_on_length();
}

void refuse_quantised(const Json& config, const std::string& file) {
  if (!config.is_object()) return;
  const ConfigReader reader(config, file);
  for (const char* key : {"quantization_config", "quantization", "quantization_bit"})
    if (const Json* given = reader.find({key}); given && (!given->is_number() || given->get<double>() != 0))
      reader.unsupported(key, "the weights are quantised", "float32, float16 or bfloat16 weights, or a GGUF file",
                         "use the unquantised checkpoint, or a GGUF conversion of it");
}

ModelConfig parse_config(const Json& json, const std::string& file) {
  return parse_config(json, file, family_of(json, file));
}

ModelConfig parse_config(const Json& json, const std::string& file, const FamilySpec& family) {
  refuse_quantised(json, file);
  const ConfigReader outer(json, file);
  // Multimodal checkpoints keep the language model's settings in an object of their own.
  Json nested;
  if (outer.has("text_config") && !family.nested_defaults.empty()) {
    nested = Json::parse(family.nested_defaults);
    nested.update(outer.object({"text_config"}).json());
  }
  const ConfigReader reader = nested.is_null() ? outer : ConfigReader(nested, file + ": text_config");
  const ConfigKeys& keys = family.keys;

  ModelConfig config = family.block;
  config.model_type = outer.text_or({"model_type"}, family.name);
  config.family = family.name;
  read_sizes(reader, keys, config);
  config.norm_eps = reader.number_or(keys.norm_eps, keys.default_norm_eps);
  config.activation = read_activation(reader, keys);
  config.tied_head = reader.flag_or({"tie_word_embeddings"}, keys.default_tied);
  read_ends(outer.find({"eos_token_id"}) ? outer : reader, config);
  if (config.positions == Positions::kRotary) detail::read_common_rotary(reader, keys, config);
  if (family.refine) family.refine(reader, config);
  if (config.attention_scale == 0) config.attention_scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  if (config.positions != Positions::kRotary) config.rotaries.clear(), config.rotary_of_layer.clear();
  check(reader, family, config);
  return config;
}

static Json to_json(const Rotary& r) {
  // LongRoPE's usual factor follows from the two lengths: it is in no pack's fingerprint.
  const bool usual = r.kind == Rotary::Kind::kLongrope &&
                     r.factor == static_cast<double>(r.max_positions) / static_cast<double>(r.original_max);
  return {{"kind", static_cast<int>(r.kind)},
          {"theta", r.theta},
          {"dims", r.dims},
          {"interleaved", r.interleaved},
          {"factor", usual ? 1.0 : r.factor},
          {"low", r.low_freq_factor},
          {"high", r.high_freq_factor},
          {"original", r.original_max},
          {"max", r.depends_on_length() ? r.max_positions : 0},
          {"beta", {r.beta_fast, r.beta_slow}},
          {"truncate", r.truncate},
          {"attention_factor", r.attention_factor.value_or(0)},
          {"mscale", {r.mscale.value_or(0), r.mscale_all_dim.value_or(0)}},
          {"short", r.short_factor},
          {"long", r.long_factor}};
}

Json arithmetic(const ModelConfig& c) {
  Json rotaries = Json::array();
  for (const Rotary& rotary : c.rotaries) rotaries.push_back(to_json(rotary));
  return {{"family", c.family},
          {"sizes",
           {c.hidden_size, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.mlp_width, c.vocab_size,
            c.embedding_width, c.n_experts, c.experts_per_token}},
          {"norm", {static_cast<int>(c.norm), c.norm_eps, c.norm_one_plus}},
          {"block",
           {static_cast<int>(c.residual), static_cast<int>(c.norm_order), c.mlp_norm, static_cast<int>(c.qkv),
            c.qk_norm, static_cast<int>(c.mlp), static_cast<int>(c.activation)}},
          {"bias", {c.qkv_bias, c.out_bias, c.mlp_bias, c.head_bias}},
          {"attention", {c.attention_scale, c.scale_by_inverse_layer, c.attention_softcap, c.logn_length}},
          {"windows", c.windows},
          {"positions",
           {static_cast<int>(c.positions), static_cast<int>(c.position_rule), c.position_offset, c.alibi_like_falcon}},
          {"rotaries", rotaries},
          {"rotary_of_layer", c.rotary_of_layer},
          {"ends", {c.embedding_scale, c.final_norm, c.tied_head, c.normalised_head, c.logit_softcap}}};
}

namespace {

constexpr int64_t kLargestSize = int64_t{1} << 31;
const Json kNothing = Json::object();

std::string shown(const Json& value) {
  return shorten(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::string spelled(const ConfigReader::Names& names) {
  std::string text = names.front();
  for (size_t i = 1; i < names.size(); ++i) text += " (or " + names[i] + ")";
  return text;
}

}  // namespace

ConfigReader::ConfigReader(const Json& object, std::string where) : object_(&object), where_(std::move(where)) {
  if (!object.is_object())
    throw Error(ErrorClass::kCorruption, {where_, "found " + shown(object), "a JSON object",
                                          "compare with the published config.json of the model"});
}

bool ConfigReader::is_null(const std::string& key) const {
  const auto it = object_->find(key);
  return it != object_->end() && it->is_null();
}

const Json* ConfigReader::find(const Names& names) const {
  for (const auto& name : names)
    if (const auto it = object_->find(name); it != object_->end() && !it->is_null()) return &*it;
  return nullptr;
}

int64_t ConfigReader::integer(const Names& names, int64_t least) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "an integer");
  const bool fits =
      value->is_number_integer() && !(value->is_number_unsigned() && value->get<uint64_t>() > kLargestSize);
  const int64_t n = fits ? value->get<int64_t>() : least - 1;
  if (!fits || n < least || n > kLargestSize)
    fail(spelled(names), shown(*value), "an integer from " + std::to_string(least) + " to 2^31");
  return n;
}

double ConfigReader::number(const Names& names) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "a number");
  const double x = value->is_number() ? value->get<double>() : 0;
  if (!(x > 0) || !std::isfinite(x)) fail(spelled(names), shown(*value), "a positive number");
  return x;
}

bool ConfigReader::flag_or(const Names& names, bool otherwise) const {
  const Json* value = find(names);
  if (!value) return otherwise;
  if (!value->is_boolean()) fail(spelled(names), shown(*value), "true or false");
  return value->get<bool>();
}

std::string ConfigReader::text_or(const Names& names, const std::string& otherwise) const {
  const Json* value = find(names);
  if (!value) return otherwise;
  if (!value->is_string()) fail(spelled(names), shown(*value), "a string");
  return value->get<std::string>();
}

std::vector<double> ConfigReader::numbers(const Names& names) const {
  const Json* value = find(names);
  if (!value) fail(spelled(names), "missing", "a list of numbers");
  std::vector<double> list;
  if (value->is_array())
    for (const Json& x : *value)
      if (x.is_number() && x.get<double>() > 0 && std::isfinite(x.get<double>())) list.push_back(x.get<double>());
  if (!value->is_array() || list.size() != value->size())
    fail(spelled(names), shown(*value), "a list of positive numbers");
  return list;
}

std::vector<std::string> ConfigReader::texts(const Names& names) const {
  const Json* value = find(names);
  std::vector<std::string> list;
  if (!value) return list;
  if (value->is_array())
    for (const Json& x : *value)
      if (x.is_string()) list.push_back(x.get<std::string>());
  if (!value->is_array() || list.size() != value->size()) fail(spelled(names), shown(*value), "a list of strings");
  return list;
}

ConfigReader ConfigReader::object(const Names& names) const {
  for (const auto& name : names) {
    const Json* value = find({name});
    if (!value) continue;
    if (!value->is_object()) fail(name, shown(*value), "an object or null");
    return {*value, where_ + ": " + name};
  }
  return {kNothing, where_};
}

void ConfigReader::fail(const std::string& key, const std::string& got, const std::string& expected,
                        const std::string& advice) const {
  throw Error(ErrorClass::kCorruption, {where_ + ": " + key, got, expected, advice});
}

void ConfigReader::unsupported(const std::string& key, const std::string& got, const std::string& expected,
                               const std::string& advice) const {
  throw Error(ErrorClass::kUnsupported, {where_ + ": " + key, got, expected, advice});
}

}  // namespace emend::models
