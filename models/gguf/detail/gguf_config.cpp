// Configuration in both directions: GGUF metadata ↔ config.json.
#include <emend/core/json.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/detail/rotary.h>
#include <emend/models/gguf/detail/gguf_architecture.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace emend::models {
namespace {

using Json = nlohmann::json;
using detail::GgufFiles;
using detail::LocatedTensor;

constexpr int64_t kLargestSize = int64_t{1} << 31;
constexpr int64_t kMostLayers = 4096;

std::vector<double> factors(const GgufFiles& files, const std::string& name, int64_t expected) {
  const LocatedTensor located = files.find(name);
  if (!located) return {};
  std::vector<double> values = detail::small_tensor(located);
  const bool positive = std::ranges::all_of(values, [](double x) { return x > 0 && std::isfinite(x); });
  if (std::ssize(values) != expected || !positive)
    throw Error(ErrorClass::kCorruption,
                {located.file->path().string() + ": tensor " + name,
                 positive ? std::to_string(values.size()) + " values" : "values that are not positive",
                 std::to_string(expected) + " positive values, half the rotated dimensions", "fetch the file again"});
  return values;
}

Json named(const char* type) {
  return {{"rope_type", type}, {"type", type}};
}

/// Llama 3's divisors of the dims / 2 frequencies, as stored in rope_freqs.weight.
std::vector<float> llama3_divisors(const Rotary& rotary) {
  const double original = static_cast<double>(rotary.original_max);
  const double low = original / rotary.low_freq_factor, high = original / rotary.high_freq_factor;
  std::vector<float> divisors;
  for (int64_t i = 0; i < rotary.dims; i += 2) {
    const double wave =
        2 * std::numbers::pi * std::pow(rotary.theta, static_cast<double>(i) / static_cast<double>(rotary.dims));
    double divisor = 1;
    if (wave > low) {
      divisor = rotary.factor;
    } else if (wave >= high) {
      const double smooth =
          (original / wave - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor);
      divisor = 1 / ((1 - smooth) / rotary.factor + smooth);
    }
    divisors.push_back(static_cast<float>(divisor));
  }
  return divisors;
}

bool close(const std::vector<float>& a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > 1e-4 * b[i]) return false;
  return a.size() == b.size();
}

// Llama 3 scaling is stored as a table of divisors only; its parameters are found by trying the published ones (low 1,
// high 4, original length a power of two). A table that they do not explain becomes "longrope" with the same list for
// short and long texts, which divides the frequencies in the same way.
Json llama3(const std::vector<double>& divisors, const GgufConfigReader& reader) {
  Rotary rotary;
  rotary.theta = reader.rotary_base();
  rotary.dims = reader.rotary_dims();
  rotary.factor = *std::ranges::max_element(divisors);
  std::vector<int64_t> lengths{8192};
  for (int64_t length = 8; length <= int64_t{1} << 22; length *= 2) lengths.push_back(length);
  for (const int64_t length : lengths) {
    rotary.original_max = length;
    if (!close(llama3_divisors(rotary), divisors)) continue;
    Json scaling = named("llama3");
    scaling["factor"] = rotary.factor;
    scaling["low_freq_factor"] = rotary.low_freq_factor;
    scaling["high_freq_factor"] = rotary.high_freq_factor;
    scaling["original_max_position_embeddings"] = length;
    return scaling;
  }
  Json scaling = named("longrope");
  scaling["short_factor"] = scaling["long_factor"] = divisors;
  scaling["attention_factor"] = 1.0;
  scaling["original_max_position_embeddings"] = reader.positions;
  return scaling;
}

}  // namespace

GgufConfigReader::GgufConfigReader(const GgufFiles& files, const std::string& architecture)
    : files_(files), meta_(files.metadata()), prefix_(architecture + ".") {
  hidden = size("embedding_length");
  layers = size("block_count") - integer("nextn_predict_layers").value_or(0);
  if (layers < 1 || layers > kMostLayers)
    meta_.fail_key(key("block_count"), std::to_string(layers), "1 to 4096 layers");
  heads = per_layer("attention.head_count").value_or(0);
  if (heads < 1 || heads > hidden)
    meta_.fail_key(key("attention.head_count"), std::to_string(heads), "1 to embedding_length");
  kv_heads = per_layer("attention.head_count_kv").value_or(heads);
  if (kv_heads < 1 || kv_heads > heads || heads % kv_heads != 0)
    meta_.fail_key(key("attention.head_count_kv"), std::to_string(kv_heads), "a divisor of " + std::to_string(heads));
  read_head_dim();
  mlp = dimension("blk.0.ffn_down.weight", 1).value_or(dimension("blk.0.ffn_down_exps.weight", 2).value_or(0));
  if (mlp == 0) mlp = size("feed_forward_length");
  vocab = dimension("token_embd.weight", 0).value_or(0);
  if (vocab == 0)
    throw Error(ErrorClass::kCorruption,
                {meta_.path().string(), "no tensor \"token_embd.weight\"", "a model with weights",
                 "this may be a vocabulary or an adapter; name a model file"});
  positions = size("context_length");
}

bool GgufConfigReader::has(std::string_view tensor) const {
  return static_cast<bool>(files_.find(tensor));
}

int64_t GgufConfigReader::size(std::string_view name) const {
  const int64_t value = meta_.required_integer(key(name));
  if (value < 1 || value > kLargestSize) meta_.fail_key(key(name), std::to_string(value), "a size from 1 to 2^31");
  return value;
}

std::optional<int64_t> GgufConfigReader::dimension(std::string_view tensor, size_t index) const {
  const LocatedTensor located = files_.find(tensor);
  if (!located || index >= located.tensor->shape.size()) return std::nullopt;
  return located.tensor->shape[index];
}

double GgufConfigReader::epsilon() const {
  for (const char* name : {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"})
    if (const auto value = number(name)) {
      if (*value <= 0 || *value > 1) meta_.fail_key(key(name), std::to_string(*value), "a small positive number");
      return *value;
    }
  meta_.fail_key(key("attention.layer_norm_rms_epsilon"), "missing", "a small positive number");
}

// One number, or a list with one number a layer, which must all be equal.
std::optional<int64_t> GgufConfigReader::per_layer(std::string_view name) const {
  const GgufValue* value = meta_.find(key(name));
  if (!value || value->type != GgufValueType::kArray) return integer(name);
  const auto list = meta_.integers(key(name));
  if (list.empty()) meta_.fail_key(key(name), "an empty list", "one number a layer");
  if (std::ranges::any_of(list, [&](int64_t n) { return n != list.front(); }))
    throw Error(ErrorClass::kUnsupported, {meta_.path().string() + ": key " + key(name), "layers of different sizes",
                                           "the same number in every layer", ""});
  return list.front();
}

void GgufConfigReader::read_head_dim() {
  head_dim = integer("attention.key_length").value_or(0);
  if (head_dim == 0)
    if (const auto rows = dimension("blk.0.attn_q.weight", 0); rows && *rows % heads == 0) head_dim = *rows / heads;
  if (head_dim == 0)
    if (const auto rows = dimension("blk.0.attn_qkv.weight", 0); rows && *rows % (heads + 2 * kv_heads) == 0)
      head_dim = *rows / (heads + 2 * kv_heads);
  if (head_dim == 0) head_dim = hidden / heads;
  if (head_dim < 1 || head_dim > kLargestSize / heads)
    meta_.fail_key(key("attention.key_length"), std::to_string(head_dim), "a head size");
  if (integer("attention.value_length").value_or(head_dim) != head_dim)
    throw Error(ErrorClass::kUnsupported, {meta_.path().string() + ": key " + key("attention.value_length"),
                                           "values of another size than keys", std::to_string(head_dim), ""});
}

int64_t GgufConfigReader::rotary_dims() const {
  const int64_t dims = integer("rope.dimension_count").value_or(head_dim);
  if (dims < 2 || dims > head_dim || dims % 2 != 0)
    meta_.fail_key(key("rope.dimension_count"), std::to_string(dims),
                   "an even number up to " + std::to_string(head_dim));
  return dims;
}

double GgufConfigReader::rotary_fraction() const {
  double fraction = static_cast<double>(rotary_dims()) / static_cast<double>(head_dim);
  while (static_cast<int64_t>(static_cast<double>(head_dim) * fraction) < rotary_dims())
    fraction = std::nextafter(fraction, 2.0);
  return fraction;
}

int64_t GgufConfigReader::window() const {
  const int64_t window = integer("attention.sliding_window").value_or(0);
  if (window < 0 || window > kLargestSize)
    meta_.fail_key(key("attention.sliding_window"), std::to_string(window), "a length in tokens");
  return window;
}

Json GgufConfigReader::layer_types(int64_t period) const {
  const std::string name = key("attention.sliding_window_pattern");
  const GgufValue* value = meta_.find(name);
  std::vector<int64_t> flags;
  if (value && value->type == GgufValueType::kArray) {
    flags = meta_.integers(name);
    if (std::ssize(flags) < layers)
      meta_.fail_key(name, std::to_string(flags.size()) + " flags", std::to_string(layers) + ", one a layer");
  } else {
    if (const auto stored = integer("attention.sliding_window_pattern")) {
      period = *stored;
      if (period < 1) meta_.fail_key(name, std::to_string(period), "a positive period");
    }
    for (int64_t l = 0; l < layers; ++l) flags.push_back(period == 0 || l % period < period - 1);
  }
  Json types = Json::array();
  for (int64_t l = 0; l < layers; ++l)
    types.push_back(window() > 0 && flags[l] ? "sliding_attention" : "full_attention");
  return types;
}

// Null for plain rotary embedding.
Json GgufConfigReader::rotary_scaling() const {
  const auto original = [&] { return integer("rope.scaling.original_context_length").value_or(positions); };
  const auto long_factors = factors(files_, "rope_factors_long.weight", rotary_dims() / 2);
  const auto short_factors = factors(files_, "rope_factors_short.weight", rotary_dims() / 2);
  if (!long_factors.empty() && !short_factors.empty()) {
    Json scaling = named("longrope");
    scaling["long_factor"] = long_factors;
    scaling["short_factor"] = short_factors;
    scaling["original_max_position_embeddings"] = original();
    if (const auto attention = number("rope.scaling.attn_factor")) scaling["attention_factor"] = *attention;
    return scaling;
  }
  const auto divisors = factors(files_, "rope_freqs.weight", rotary_dims() / 2);
  if (std::ranges::any_of(divisors, [](double x) { return std::abs(x - 1) > 1e-6; })) return llama3(divisors, *this);

  const double factor = number("rope.scaling.factor").value_or(number("rope.scale_linear").value_or(1.0));
  const std::string type = meta_.text(key("rope.scaling.type")).value_or("linear");
  if (type == "none" || factor == 0 || factor == 1) return {};
  if (factor < 0) meta_.fail_key(key("rope.scaling.factor"), std::to_string(factor), "a positive number");
  if (type == "linear" || type == "yarn") {
    Json scaling = named(type.c_str());
    scaling["factor"] = factor;
    if (type == "linear") return scaling;
    scaling["original_max_position_embeddings"] = original();
    for (const char* name : {"attn_factor", "beta_fast", "beta_slow"})
      if (const auto value = number(std::string("rope.scaling.yarn_") + name))
        scaling[name == std::string_view("attn_factor") ? "attention_factor" : name] = *value;
    return scaling;
  }
  meta_.fail_key(key("rope.scaling.type"), "\"" + type + "\" without tables of factors",
                 "none, linear, yarn, or longrope with rope_factors_long and rope_factors_short");
}

void GgufConfigReader::put_rotary(Json& config, const std::string& theta) const {
  config[theta] = rotary_base();
  if (rotary_dims() != head_dim && !config.contains("partial_rotary_factor") && !config.contains("rotary_pct"))
    config["partial_rotary_factor"] = rotary_fraction();
  Json scaling = rotary_scaling();
  if (!scaling.is_null()) config["rope_scaling"] = std::move(scaling);
}

namespace detail {
namespace {

// Sizes, epsilon, activation, tie_word_embeddings, dtype and special ids, under the family's own keys.
Json common_config(const GgufFiles& files, const GgufConfigReader& r, const FamilySpec& family) {
  const ConfigKeys& keys = family.keys;
  Json config = {{"model_type", family.model_types.front()}, {"architectures", {family.gguf.class_name}}};
  const auto put = [&](const ConfigKeys::Names& names, const Json& value) {
    const auto& left_out = family.gguf.not_in_config;
    if (!names.empty() && std::ranges::count(left_out, names.front()) == 0) config[names.front()] = value;
  };
  put(keys.hidden, r.hidden);
  put(keys.layers, r.layers);
  put(keys.heads, r.heads);
  put(keys.kv_heads, r.kv_heads);
  put(keys.head_dim, r.head_dim);
  put(keys.mlp_width, r.mlp);
  put(keys.vocab, r.vocab);
  put(keys.max_positions, r.positions);
  put(keys.norm_eps, r.epsilon());
  for (const auto& name : keys.activation) config[name] = keys.default_activation;
  config["tie_word_embeddings"] = !r.has("output.weight");
  const LocatedTensor matrix = files.find("blk.0.ffn_down.weight");
  config["torch_dtype"] = dtype_name(plain_dtype(matrix ? matrix.tensor->type : GgmlType::kF32).value_or(at::kFloat));
  for (const auto& [name, id] : {std::pair{"bos_token_id", "tokenizer.ggml.bos_token_id"},
                                 std::pair{"eos_token_id", "tokenizer.ggml.eos_token_id"},
                                 std::pair{"pad_token_id", "tokenizer.ggml.padding_token_id"}})
    if (const auto value = r.file().integer(id); value && *value >= 0 && *value < r.vocab) config[name] = *value;
  return config;
}

// The original config.json, if emend wrote the file.
Json kept_config(const GgufFile& meta, const std::string& architecture, const FamilySpec* own) {
  const auto text = meta.text(kConfigKey);
  if (!text) return {};
  const Json config = parse_json(*text, meta.path().string() + ": key " + std::string(kConfigKey));
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  const auto has_type = [&](const FamilySpec* family) {
    return family->gguf.architecture == architecture &&
           std::ranges::count(family->model_types, type->get_ref<const std::string&>()) > 0;
  };
  if (!config.is_object() || type == config.end() || !type->is_string() ||
      std::ranges::none_of(gguf_families(own), has_type))
    meta.fail_key(kConfigKey, "text that is not a config.json of architecture " + architecture,
                  "what emend wrote there, or no such key");
  const int64_t blocks = meta.required_integer(architecture + ".block_count");
  for (const char* layers : {"num_hidden_layers", "n_layer", "num_layers"})
    if (const auto it = config.find(layers); it != config.end() && *it != blocks)
      meta.fail_key(kConfigKey, std::string(layers) + " " + it->dump().substr(0, 40),
                    std::to_string(blocks) + " as in block_count");
  return config;
}

/// Writes the keys of one architecture.
class ConfigWriter {
 public:
  ConfigWriter(const ModelConfig& config, const GgufForm& form, GgufConfig& out) : c_(config), form_(form), out_(out) {}

  void write() {
    write_sizes();
    number(c_.norm == Norm::kRms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", c_.norm_eps);
    if (c_.positions == Positions::kRotary) write_rotary();
    write_windows();
    if (c_.attention_softcap > 0) number("attn_logit_softcapping", c_.attention_softcap);
    if (c_.logit_softcap > 0) number("final_logit_softcapping", c_.logit_softcap);
    write_notes();
    if (form_.write) form_.write(c_, out_);
    if (form_.not_run_by_llama_cpp) note("llama.cpp has a name for this architecture but cannot run it");
  }

 private:
  void integer(const char* name, int64_t value) { out_.integer(name, value); }
  void number(const char* name, double value) { out_.number(name, value); }
  void note(const std::string& text) { out_.note(text); }

  void write_sizes() {
    integer("vocab_size", c_.vocab_size);
    integer("context_length", c_.max_positions);
    integer("embedding_length", c_.hidden_size);
    integer("block_count", c_.n_layers);
    integer("feed_forward_length", c_.mlp_width);
    integer("attention.head_count", c_.n_heads);
    integer("attention.head_count_kv", c_.n_kv_heads);
    integer("attention.key_length", c_.head_dim);
    integer("attention.value_length", c_.head_dim);
    if (c_.n_experts > 0) {
      integer("expert_count", c_.n_experts);
      integer("expert_used_count", c_.experts_per_token);
    }
  }

  void write_rotary() {
    const bool two = c_.rotaries.size() > 1;  // Gemma 3: the windowed layers have a base of their own
    const auto layer = std::ranges::find(c_.windows, 0);
    const Rotary& rotary =
        c_.rotary(two && layer != c_.windows.end() ? static_cast<int>(layer - c_.windows.begin()) : 0);
    integer("rope.dimension_count", rotary.dims);
    number("rope.freq_base", rotary.theta);
    if (two)
      for (int l = 0; l < c_.n_layers; ++l)
        if (c_.window(l) > 0) number("rope.freq_base_swa", c_.rotary(l).theta);
    write_scaling(rotary);
  }

  void write_scaling(const Rotary& rotary) {
    switch (rotary.kind) {
      case Rotary::Kind::kDefault:
        break;
      case Rotary::Kind::kLinear:
        out_.text("rope.scaling.type", "linear");
        number("rope.scaling.factor", rotary.factor);
        break;
      case Rotary::Kind::kYarn:
        out_.text("rope.scaling.type", "yarn");
        number("rope.scaling.factor", rotary.factor);
        integer("rope.scaling.original_context_length", rotary.original_max);
        if (rotary.attention_factor) number("rope.scaling.yarn_attn_factor", *rotary.attention_factor);
        if (rotary.beta_fast != 32) number("rope.scaling.yarn_beta_fast", rotary.beta_fast);
        if (rotary.beta_slow != 1) number("rope.scaling.yarn_beta_slow", rotary.beta_slow);
        if (rotary.mscale || rotary.mscale_all_dim) note("YaRN's mscale is not kept for llama.cpp");
        if (!rotary.truncate) note("llama.cpp rounds YaRN's correction range, which this model does not");
        break;
      case Rotary::Kind::kLlama3:
        out_.tables.emplace_back("rope_freqs.weight", llama3_divisors(rotary));
        break;
      case Rotary::Kind::kLongrope:
        write_longrope(rotary);
        break;
      case Rotary::Kind::kDynamic:
        note("dynamic rotary scaling past the trained length is not kept for llama.cpp");
        break;
      case Rotary::Kind::kQwenNtk:
        note("dynamic NTK scaling past seq_length is not kept for llama.cpp");
        break;
    }
  }

  void write_longrope(const Rotary& rotary) {
    const auto table = [&](const char* name, const std::vector<double>& values) {
      out_.tables.emplace_back(name, std::vector<float>(values.begin(), values.end()));
    };
    table("rope_factors_long.weight", rotary.long_factor);
    table("rope_factors_short.weight", rotary.short_factor);
    if (!form_.longrope_by_table) out_.text("rope.scaling.type", "longrope");
    integer("rope.scaling.original_context_length", rotary.original_max);
    number("rope.scaling.attn_factor", detail::rotary_frequencies(rotary, 0).attention_factor);
  }

  void write_windows() {
    const int64_t window = c_.windows.empty() ? 0 : *std::ranges::max_element(c_.windows);
    if (window == 0) return;
    integer("attention.sliding_window", window);
    const int64_t period = form_.window_period;
    std::vector<bool> slides;
    bool usual = true;
    for (int l = 0; l < c_.n_layers; ++l) {
      slides.push_back(c_.window(l) > 0);
      usual = usual && slides.back() == (period == 0 || l % period < period - 1);
    }
    if (!usual) out_.metadata.set_flags(out_.prefix + "attention.sliding_window_pattern", slides);
    if (period == 0 && window < c_.max_positions)
      note("llama.cpp ignores the attention window of " + std::to_string(window) + " tokens for this architecture");
  }

  // The scale of attention that llama.cpp assumes.
  [[nodiscard]] double assumed_scale() const {
    const bool large = form_.layers_of_largest > 0 && c_.n_layers == form_.layers_of_largest;
    return 1 / std::sqrt(static_cast<double>(large ? c_.hidden_size / c_.n_heads : c_.head_dim));
  }

  [[nodiscard]] Activation assumed_activation() const {
    if (c_.mlp != Mlp::kPlain) return c_.norm_one_plus ? Activation::kGeluTanh : Activation::kSilu;
    return Activation::kGeluTanh;
  }

  void write_notes() {
    if (std::abs(c_.attention_scale / assumed_scale() - 1) > 1e-6) {
      number("attention.scale", c_.attention_scale);
      note("llama.cpp assumes another scale of attention than this model's");
    }
    if (c_.scale_by_inverse_layer) note("llama.cpp does not divide the attention scores by the layer's number");
    if (c_.logn_length > 0) note("llama.cpp does not scale queries past seq_length by a logarithm");
    if (c_.activation == Activation::kGelu && assumed_activation() == Activation::kGeluTanh)
      note("llama.cpp computes the tanh form of GELU, which differs by about 1e-3 in the logits");
    else if (c_.activation != assumed_activation())
      note("llama.cpp computes another activation for this architecture");
    if (c_.normalised_head) note("llama.cpp does not divide the head's rows by their lengths: results differ there");
  }

  const ModelConfig& c_;
  const GgufForm& form_;
  GgufConfig& out_;
};

}  // namespace

Json config_from_gguf(const GgufFiles& files, const std::string& architecture, const FamilySpec* own) {
  if (Json kept = kept_config(files.metadata(), architecture, own); !kept.is_null()) return kept;
  const GgufConfigReader reader(files, architecture);
  const FamilySpec* family = nullptr;
  for (const FamilySpec* candidate : gguf_families(own)) {
    if (candidate->gguf.architecture != architecture) continue;
    const bool claimed = candidate->gguf.claims && candidate->gguf.claims(reader);
    if (claimed || (!candidate->gguf.claims && !family)) family = candidate;
    if (claimed) break;
  }
  EMEND_CHECK(family, "an architecture has a family that reads what no other claims");
  Json config = common_config(files, reader, *family);
  if (family->gguf.read) family->gguf.read(reader, config);
  if (family->block.positions == Positions::kRotary && !family->gguf.own_rotary)
    reader.put_rotary(config, family->keys.theta.front());
  return config;
}

GgufConfig config_to_gguf(const ModelConfig& config, const GgufForm& form) {
  GgufConfig out;
  out.prefix = form.architecture + ".";
  ConfigWriter(config, form, out).write();
  return out;
}

}  // namespace detail
}  // namespace emend::models
