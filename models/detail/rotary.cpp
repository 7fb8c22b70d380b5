#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/kernels.h>
#include <emend/models/detail/rotary.h>

#include <cmath>

namespace emend::models::detail {
namespace {

constexpr double kPi = 3.14159265358979323846;

// theta^(-2i/r)
at::Tensor base_frequencies(double theta, int64_t dims) {
  const at::Tensor exponent = at::arange(0, dims, 2, at::kLong).to(at::kFloat).div(static_cast<double>(dims));
  return at::pow(theta, exponent).reciprocal();
}

at::Tensor llama3_frequencies(const Rotary& r) {
  const at::Tensor base = base_frequencies(r.theta, r.dims);
  const double original = static_cast<double>(r.original_max);
  const double low = original / r.low_freq_factor, high = original / r.high_freq_factor;
  const at::Tensor wavelength = 2 * kPi / base;
  const at::Tensor smooth = (original / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
  const at::Tensor between = (1 - smooth) * base / r.factor + smooth * base;
  at::Tensor scaled = at::where(wavelength > low, base / r.factor, base);
  return at::where((wavelength >= high).logical_and(wavelength <= low), between, scaled);
}

double yarn_mscale(double scale, double mscale) {
  return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

RotaryFrequencies yarn_frequencies(const Rotary& r) {
  const double dims = static_cast<double>(r.dims), original = static_cast<double>(r.original_max);
  const auto correction = [&](double beta) {
    return dims * std::log(original / (beta * 2 * kPi)) / (2 * std::log(r.theta));
  };
  double low = correction(r.beta_fast), high = correction(r.beta_slow);
  if (r.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;
  const at::Tensor ramp = at::arange(r.dims / 2, at::kFloat).sub(low).div(high - low).clamp(0, 1);
  const at::Tensor base = base_frequencies(r.theta, r.dims);
  RotaryFrequencies result;
  result.inverse = base / r.factor * ramp + base * (1 - ramp);
  if (r.attention_factor) {
    result.attention_factor = *r.attention_factor;
  } else if (r.mscale && r.mscale_all_dim) {
    result.attention_factor = yarn_mscale(r.factor, *r.mscale) / yarn_mscale(r.factor, *r.mscale_all_dim);
  } else {
    result.attention_factor = yarn_mscale(r.factor, 1);
  }
  return result;
}

RotaryFrequencies longrope_frequencies(const Rotary& r, int64_t length) {
  const auto& factors = length > r.original_max ? r.long_factor : r.short_factor;
  const at::Tensor exponent = at::arange(0, r.dims, 2, at::kLong).to(at::kFloat).div(static_cast<double>(r.dims));
  RotaryFrequencies result;
  result.inverse = (at::tensor(factors, at::kDouble).to(at::kFloat) * at::pow(r.theta, exponent)).reciprocal();
  result.attention_factor = r.attention_factor ? *r.attention_factor
                            : r.factor > 1
                                ? std::sqrt(1 + std::log(r.factor) / std::log(static_cast<double>(r.original_max)))
                                : 1.0;
  return result;
}

double dynamic_theta(const Rotary& r, int64_t length) {
  const double dims = static_cast<double>(r.dims), max = static_cast<double>(r.original_max);
  const double s = std::max(static_cast<double>(length), max);
  return r.theta * std::pow(r.factor * s / max - (r.factor - 1), dims / (dims - 2));
}

double qwen_theta(const Rotary& r, int64_t length) {
  const double context = std::log2(static_cast<double>(length) / static_cast<double>(r.original_max)) + 1;
  const double alpha = std::max(std::pow(2.0, std::ceil(context)) - 1, 1.0);
  const double dims = static_cast<double>(r.dims);
  return alpha == 1 ? r.theta : r.theta * std::pow(alpha, dims / (dims - 2));
}

}  // namespace

RotaryFrequencies rotary_frequencies(const Rotary& r, int64_t length) {
  switch (r.kind) {
    case Rotary::Kind::kDefault:
      return {base_frequencies(r.theta, r.dims)};
    case Rotary::Kind::kLinear:
      return {base_frequencies(r.theta, r.dims) / r.factor};
    case Rotary::Kind::kDynamic:
      return {base_frequencies(dynamic_theta(r, length), r.dims)};
    case Rotary::Kind::kLlama3:
      return {llama3_frequencies(r)};
    case Rotary::Kind::kYarn:
      return yarn_frequencies(r);
    case Rotary::Kind::kLongrope:
      return longrope_frequencies(r, length);
    case Rotary::Kind::kQwenNtk:
      return {base_frequencies(qwen_theta(r, length), r.dims)};
  }
  return {};
}

RotaryTable rotary_table(const Rotary& rotary, const std::vector<int64_t>& positions,
                         const std::vector<int64_t>& lengths, const std::vector<int64_t>& row_begin) {
  const at::NoGradGuard no_grad;
  const at::Tensor position = at::tensor(positions, at::kLong).to(at::kFloat).unsqueeze(1);
  at::Tensor angles;
  double factor = 1;
  if (!rotary.depends_on_length()) {
    const RotaryFrequencies frequencies = rotary_frequencies(rotary, 0);
    angles = position * frequencies.inverse;
    factor = frequencies.attention_factor;
  } else {
    angles = at::empty({position.size(0), rotary.dims / 2}, at::kFloat);
    for (size_t r = 0; r + 1 < row_begin.size(); ++r) {
      const RotaryFrequencies frequencies = rotary_frequencies(rotary, lengths[r]);
      const int64_t begin = row_begin[r], n = row_begin[r + 1] - begin;
      at::Tensor rows = angles.narrow(0, begin, n);
      at::mul_out(rows, position.narrow(0, begin, n), frequencies.inverse);
      factor = frequencies.attention_factor;  // the same for every length
    }
  }
  at::Tensor cos = angles.cos(), sin = angles.sin();
  if (factor != 1) cos.mul_(factor), sin.mul_(factor);
  RotaryTable table;
  table.interleaved = rotary.interleaved;
  if (rotary.interleaved) {
    table.cos = at::stack({cos, cos}, -1).flatten(1).unsqueeze(1);
    table.sin = at::stack({-sin, sin}, -1).flatten(1).unsqueeze(1);
  } else {
    table.cos = at::cat({cos, cos}, 1).unsqueeze(1);
    table.sin = at::cat({-sin, sin}, 1).unsqueeze(1);
  }
  return table;
}

at::Tensor apply_rotary(const at::Tensor& x_Nhd, const RotaryTable& table) {
  if (devices::own_kernels(x_Nhd)) return devices::rotate_heads(x_Nhd, table.cos, table.sin, table.interleaved);
  const int64_t r = table.cos.size(-1), d = x_Nhd.size(-1), half = r / 2;
  const at::Tensor x = r == d ? x_Nhd : x_Nhd.narrow(-1, 0, r);
  const at::Tensor partner = table.interleaved ? x.unflatten(-1, {half, 2}).flip(-1).flatten(-2)
                                               : at::cat({x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  const at::Tensor rotated = at::addcmul(x * table.cos, partner, table.sin);
  return r == d ? rotated : at::cat({rotated, x_Nhd.narrow(-1, r, d - r)}, -1);
}

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

// Zero is none.
std::optional<double> mscale_of(const ConfigReader& dict, const std::string& key) {
  const auto* value = dict.find({key});
  return value && *value == 0 ? std::nullopt : optional_number(dict, key);
}

void read_longrope(const ConfigReader& dict, Rotary& rotary) {
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
  // Phi-3 files keep the original length at the top level, where it wins.
  const ConfigReader& lengths = reader.has("original_max_position_embeddings") ? reader : dict;
  const auto factor_or_ratio = [&] {
    return dict.number_or({"factor"},
                          static_cast<double>(config.max_positions) / static_cast<double>(rotary.original_max));
  };
  rotary.kind = parse_kind(dict, dict.text_or({"rope_type", "type"}, "default"), keys);
  switch (rotary.kind) {
    case Rotary::Kind::kLinear:
    case Rotary::Kind::kDynamic:
      rotary.factor = dict.number({"factor"});
      break;
    case Rotary::Kind::kLlama3:
      rotary.factor = dict.number({"factor"});
      rotary.low_freq_factor = dict.number_or({"low_freq_factor"}, 1);
      rotary.high_freq_factor = dict.number_or({"high_freq_factor"}, 4);
      rotary.original_max = lengths.integer({"original_max_position_embeddings"});
      if (rotary.high_freq_factor <= rotary.low_freq_factor)
        dict.fail("high_freq_factor", std::to_string(rotary.high_freq_factor), "more than low_freq_factor");
      break;
    case Rotary::Kind::kYarn:
      rotary.original_max = lengths.integer_or({"original_max_position_embeddings"}, config.max_positions);
      rotary.factor = factor_or_ratio();
      rotary.beta_fast = dict.number_or({"beta_fast"}, 32);
      rotary.beta_slow = dict.number_or({"beta_slow"}, 1);
      rotary.truncate = dict.flag_or({"truncate"}, true);
      rotary.attention_factor = optional_number(dict, "attention_factor");
      rotary.mscale = mscale_of(dict, "mscale");
      rotary.mscale_all_dim = mscale_of(dict, "mscale_all_dim");
      break;
    case Rotary::Kind::kLongrope:
      rotary.original_max = lengths.integer({"original_max_position_embeddings"});
      rotary.factor = factor_or_ratio();
      read_longrope(dict, rotary);
      rotary.attention_factor = optional_number(dict, "attention_factor");
      break;
    case Rotary::Kind::kDefault:
    case Rotary::Kind::kQwenNtk:
      break;
  }
  return rotary;
}

void read_common_rotary(const ConfigReader& reader, const ConfigKeys& keys, ModelConfig& config) {
  // Users add rope_scaling to what transformers 5 wrote: as there, it takes the place of rope_parameters.
  const ConfigReader scaling = reader.object({"rope_scaling"}), parameters = reader.object({"rope_parameters"});
  const bool scaled = !scaling.json().empty();
  if (scaled && parameters.has("rope_theta") && !scaling.has("rope_theta") && !reader.find(keys.theta))
    scaling.fail("rope_theta", "absent, and rope_scaling takes the place of rope_parameters, which has one",
                 "the base in rope_scaling", "copy it there");
  config.rotaries = {read_rotary(reader, scaled ? scaling : parameters, keys, config)};
  config.rotary_of_layer.assign(config.n_layers, 0);
}

}  // namespace emend::models::detail
