#include <emend/core/error.h>
#include <emend/models/gguf/detail/gguf_rotary.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace emend::models::detail {
namespace {

using Json = nlohmann::json;

std::vector<double> factors(const GgufFiles& files, const std::string& name, int64_t expected) {
  const LocatedTensor located = files.find(name);
  if (!located) return {};
  std::vector<double> values = small_tensor(located);
  const bool positive = std::all_of(values.begin(), values.end(), [](double x) { return x > 0 && std::isfinite(x); });
  if (static_cast<int64_t>(values.size()) != expected || !positive)
    throw Error(ErrorClass::kCorruption,
                {located.file->path().string() + ": tensor " + name,
                 positive ? std::to_string(values.size()) + " values" : "values that are not positive",
                 std::to_string(expected) + " positive values, half the rotated dimensions", "fetch the file again"});
  return values;
}

Json named(const char* type) {
  return {{"rope_type", type}, {"type", type}};
}

bool close(const std::vector<float>& a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > 1e-4 * b[i]) return false;
  return a.size() == b.size();
}

Json llama3(const std::vector<double>& divisors, const RotaryContext& context) {
  Rotary rotary;
  rotary.theta = context.theta;
  rotary.dims = context.dims;
  rotary.factor = *std::max_element(divisors.begin(), divisors.end());
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
  scaling["original_max_position_embeddings"] = context.positions;
  return scaling;
}

Json yarn(const GgufFile& meta, const RotaryContext& context, double factor) {
  Json scaling = named("yarn");
  scaling["factor"] = factor;
  scaling["original_max_position_embeddings"] =
      meta.integer(context.prefix + "rope.scaling.original_context_length").value_or(context.positions);
  const auto copy = [&](const char* from, const char* to) {
    if (const auto value = meta.number(context.prefix + from)) scaling[to] = *value;
  };
  copy("rope.scaling.yarn_attn_factor", "attention_factor");
  copy("rope.scaling.yarn_beta_fast", "beta_fast");
  copy("rope.scaling.yarn_beta_slow", "beta_slow");
  return scaling;
}

}  // namespace

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

Json rotary_scaling(const GgufFiles& files, const RotaryContext& context) {
  const GgufFile& meta = files.metadata();
  const auto long_factors = factors(files, "rope_factors_long.weight", context.dims / 2);
  const auto short_factors = factors(files, "rope_factors_short.weight", context.dims / 2);
  if (!long_factors.empty() && !short_factors.empty()) {
    Json scaling = named("longrope");
    scaling["long_factor"] = long_factors;
    scaling["short_factor"] = short_factors;
    scaling["original_max_position_embeddings"] =
        meta.integer(context.prefix + "rope.scaling.original_context_length").value_or(context.positions);
    if (const auto attention = meta.number(context.prefix + "rope.scaling.attn_factor"))
      scaling["attention_factor"] = *attention;
    return scaling;
  }
  const auto divisors = factors(files, "rope_freqs.weight", context.dims / 2);
  if (std::any_of(divisors.begin(), divisors.end(), [](double x) { return std::abs(x - 1) > 1e-6; }))
    return llama3(divisors, context);

  const double factor = meta.number(context.prefix + "rope.scaling.factor")
                            .value_or(meta.number(context.prefix + "rope.scale_linear").value_or(1.0));
  const std::string type = meta.text(context.prefix + "rope.scaling.type").value_or("linear");
  if (type == "none" || factor == 0 || factor == 1) return {};
  if (factor < 0) meta.fail_key(context.prefix + "rope.scaling.factor", std::to_string(factor), "a positive number");
  if (type == "linear") {
    Json scaling = named("linear");
    scaling["factor"] = factor;
    return scaling;
  }
  if (type == "yarn") return yarn(meta, context, factor);
  meta.fail_key(context.prefix + "rope.scaling.type", "\"" + type + "\" without tables of factors",
                "none, linear, yarn, or longrope with rope_factors_long and rope_factors_short");
}

}  // namespace emend::models::detail
