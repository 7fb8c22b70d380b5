#include <emend/models/detail/rotary.h>

namespace emend::models::detail {
namespace {

Rotary::Kind parse_kind(const ConfigReader& dict, const std::string& name, const ConfigKeys& keys) {
  if (name == "default") return Rotary::Kind::kDefault;
  if (name == "linear") return Rotary::Kind::kLinear;
  if (name == "dynamic") return Rotary::Kind::kDynamic;
  if (name == "llama3") return Rotary::Kind::kLlama3;
  if (name == "longrope" || name == "su") return Rotary::Kind::kLongrope;
  if (name == "yarn") return keys.yarn_means_longrope ? Rotary::Kind::kLongrope : Rotary::Kind::kYarn;
  dict.unsupported("rope_type", "\"" + name + "\"", "default, linear, dynamic, llama3, yarn or longrope",
                   "this rotary form is not known; use a model with one of these");
}

std::optional<double> optional_number(const ConfigReader& dict, const std::string& key) {
  if (!dict.has(key)) return std::nullopt;
  return dict.number({key});
}

void read_longrope(const ConfigReader& reader, const ConfigReader& dict, Rotary& rotary) {
  // Phi-3 files keep the original length at the top level, where it wins.
  const ConfigReader& holder = reader.has("original_max_position_embeddings") ? reader : dict;
  rotary.original_max = holder.integer({"original_max_position_embeddings"});
  rotary.short_factor = dict.numbers({"short_factor"});
  rotary.long_factor = dict.numbers({"long_factor"});
  for (const auto* factors : {&rotary.short_factor, &rotary.long_factor})
    if (static_cast<int64_t>(factors->size()) != rotary.dims / 2)
      dict.fail(factors == &rotary.short_factor ? "short_factor" : "long_factor",
                std::to_string(factors->size()) + " numbers",
                std::to_string(rotary.dims / 2) + ", half the rotated dimensions");
}

}  // namespace

Rotary read_rotary(const ConfigReader& reader, const ConfigReader& dict, const ConfigKeys& keys,
                   const ModelConfig& config) {
  Rotary rotary;
  rotary.theta =
      dict.has("rope_theta") ? dict.number({"rope_theta"}) : reader.number_or(keys.theta, keys.default_theta);
  if (rotary.theta <= 1) dict.fail("rope_theta", std::to_string(rotary.theta), "a base above 1");
  const double fraction = dict.has("partial_rotary_factor")
                              ? dict.number({"partial_rotary_factor"})
                              : reader.number_or(keys.rotary_fraction_keys, keys.rotary_fraction);
  if (fraction > 1)
    (dict.has("partial_rotary_factor") ? dict : reader)
        .fail(dict.has("partial_rotary_factor") ? "partial_rotary_factor" : keys.rotary_fraction_keys.front(),
              std::to_string(fraction), "a share of the head, above 0 and at most 1");
  rotary.dims = static_cast<int64_t>(static_cast<double>(config.head_dim) * fraction);
  if (dict.has("partial_rotary_factor") && (rotary.dims < 2 || rotary.dims % 2 != 0))
    dict.fail("partial_rotary_factor",
              std::to_string(fraction) + ", which is " + std::to_string(rotary.dims) + " rotary dimensions of " +
                  std::to_string(config.head_dim),
              "a share that gives an even number of them, at least 2");
  rotary.max_positions = config.max_positions;
  rotary.original_max = config.max_positions;
  rotary.kind = parse_kind(dict, dict.text_or({"rope_type", "type"}, "default"), keys);
  switch (rotary.kind) {
    case Rotary::Kind::kLinear:
      rotary.factor = dict.number({"factor"});
      break;
    case Rotary::Kind::kDynamic:
      rotary.factor = dict.number({"factor"});
      rotary.original_max = dict.integer_or({"original_max_position_embeddings"}, config.max_positions);
      break;
    case Rotary::Kind::kLlama3:
      rotary.factor = dict.number({"factor"});
      rotary.low_freq_factor = dict.number_or({"low_freq_factor"}, 1);
      rotary.high_freq_factor = dict.number_or({"high_freq_factor"}, 4);
      rotary.original_max = dict.integer({"original_max_position_embeddings"});
      if (rotary.high_freq_factor <= rotary.low_freq_factor)
        dict.fail("high_freq_factor", std::to_string(rotary.high_freq_factor), "more than low_freq_factor");
      break;
    case Rotary::Kind::kYarn:
      rotary.original_max = dict.integer_or({"original_max_position_embeddings"}, config.max_positions);
      rotary.factor = dict.has("factor")
                          ? dict.number({"factor"})
                          : static_cast<double>(config.max_positions) / static_cast<double>(rotary.original_max);
      rotary.beta_fast = dict.number_or({"beta_fast"}, 32);
      rotary.beta_slow = dict.number_or({"beta_slow"}, 1);
      rotary.truncate = dict.flag_or({"truncate"}, true);
      rotary.attention_factor = optional_number(dict, "attention_factor");
      rotary.mscale = optional_number(dict, "mscale");
      rotary.mscale_all_dim = optional_number(dict, "mscale_all_dim");
      break;
    case Rotary::Kind::kLongrope:
      read_longrope(reader, dict, rotary);
      rotary.attention_factor = optional_number(dict, "attention_factor");
      break;
    case Rotary::Kind::kDefault:
    case Rotary::Kind::kQwenNtk:
      break;
  }
  return rotary;
}

void read_common_rotary(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config) {
  config.rotaries = {read_rotary(reader, reader.object({"rope_parameters", "rope_scaling"}), keys, config)};
  config.rotary_of_layer.assign(config.n_layers, 0);
}

}  // namespace emend::models::detail
