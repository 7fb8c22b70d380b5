#include <emend/models/gguf/detail/gguf_config.h>
#include <emend/models/gguf/detail/gguf_rotary.h>

#include <algorithm>
#include <cmath>

namespace emend::models::detail {
namespace {

/// Collects the keys of one architecture.
class Writer {
 public:
  Writer(const ModelConfig& config, const GgufArchitecture& architecture, GgufConfig& out)
      : c_(config), architecture_(architecture.name), prefix_(architecture.name + "."), out_(out) {}

  void write() {
    write_sizes();
    write_norm();
    if (c_.positions == Positions::kRotary) write_rotary();
    write_windows();
    write_family();
    write_notes();
  }

 private:
  void integer(const char* name, int64_t value) { out_.metadata.set_integer(prefix_ + name, value); }
  void number(const char* name, double value) { out_.metadata.set_number(prefix_ + name, value); }
  void note(const std::string& text) { out_.notes.push_back(text); }

  void write_sizes() {
    integer("vocab_size", c_.vocab_size);
    integer("context_length", c_.max_positions);
    integer("embedding_length", c_.hidden_size);
    integer("block_count", c_.n_layers);
    integer("feed_forward_length", architecture_ == "qwen" ? 2 * c_.mlp_width : c_.mlp_width);
    integer("attention.head_count", c_.n_heads);
    integer("attention.head_count_kv", c_.n_kv_heads);
    integer("attention.key_length", c_.head_dim);
    integer("attention.value_length", c_.head_dim);
    if (c_.n_experts > 0) {
      integer("expert_count", c_.n_experts);
      integer("expert_used_count", c_.experts_per_token);
    }
  }

  void write_norm() {
    number(c_.norm == Norm::kRms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", c_.norm_eps);
  }

  void write_rotary() {
    const bool two = c_.rotaries.size() > 1;  // Gemma 3: the windowed layers have a base of their own
    const auto layer = std::find(c_.windows.begin(), c_.windows.end(), 0);
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
        out_.metadata.set_text(prefix_ + "rope.scaling.type", "linear");
        number("rope.scaling.factor", rotary.factor);
        break;
      case Rotary::Kind::kYarn:
        out_.metadata.set_text(prefix_ + "rope.scaling.type", "yarn");
        number("rope.scaling.factor", rotary.factor);
        integer("rope.scaling.original_context_length", rotary.original_max);
        if (rotary.attention_factor) number("rope.scaling.yarn_attn_factor", *rotary.attention_factor);
        if (rotary.beta_fast != 32) number("rope.scaling.yarn_beta_fast", rotary.beta_fast);
        if (rotary.beta_slow != 1) number("rope.scaling.yarn_beta_slow", rotary.beta_slow);
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
    if (architecture_ != "phi3") out_.metadata.set_text(prefix_ + "rope.scaling.type", "longrope");
    integer("rope.scaling.original_context_length", rotary.original_max);
    const double scale = static_cast<double>(c_.max_positions) / static_cast<double>(rotary.original_max);
    const double usual =
        scale > 1 ? std::sqrt(1 + std::log(scale) / std::log(static_cast<double>(rotary.original_max))) : 1;
    number("rope.scaling.attn_factor", rotary.attention_factor.value_or(usual));
  }

  void write_windows() {
    const int64_t window = c_.windows.empty() ? 0 : *std::max_element(c_.windows.begin(), c_.windows.end());
    const bool gemma = architecture_ == "gemma2" || architecture_ == "gemma3";
    if (window == 0 && architecture_ != "phi3") return;
    integer("attention.sliding_window", window);
    const int64_t period = architecture_ == "gemma2" ? 2 : 6;
    std::vector<bool> slides;
    bool usual = true;
    for (int l = 0; l < c_.n_layers; ++l) {
      slides.push_back(c_.window(l) > 0);
      usual = usual && slides.back() == (!gemma || l % period < period - 1);
    }
    if (window > 0 && !usual) out_.metadata.set_flags(prefix_ + "attention.sliding_window_pattern", slides);
    if (!gemma && window > 0 && window < c_.max_positions)
      note("llama.cpp ignores the attention window of " + std::to_string(window) + " tokens for this architecture");
  }

  void write_family() {
    if (architecture_ == "gptneox")
      out_.metadata.set_flag(prefix_ + "use_parallel_residual", c_.residual == Residual::kParallel);
    if (architecture_ == "falcon") out_.metadata.set_text(prefix_ + "tensor_data_layout", "jploski");
    if (architecture_ == "baichuan") out_.metadata.set_text(prefix_ + "tensor_data_layout", "Meta AI original pth");
    if (c_.attention_softcap > 0) number("attn_logit_softcapping", c_.attention_softcap);
    if (c_.logit_softcap > 0) number("final_logit_softcapping", c_.logit_softcap);
  }

  // The scale of attention that llama.cpp assumes.
  [[nodiscard]] double assumed_scale() const {
    const bool large =
        (architecture_ == "gemma2" && c_.n_layers == 46) || (architecture_ == "gemma3" && c_.n_layers == 62);
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
    if (architecture_ == "falcon" && (c_.residual != Residual::kParallel || c_.positions != Positions::kRotary))
      note("llama.cpp cannot run this model: it knows Falcon only with parallel blocks and rotary positions");
    if (c_.normalised_head) note("llama.cpp does not divide the head's rows by their lengths: results differ there");
    if (architecture_ == "baichuan" && c_.n_layers != (c_.positions == Positions::kAlibi ? 40 : 32))
      note("llama.cpp knows this architecture's positions only for 32 layers (rotary) and 40 layers (ALiBi)");
  }

  const ModelConfig& c_;
  std::string architecture_, prefix_;
  GgufConfig& out_;
};

}  // namespace

GgufConfig config_to_gguf(const ModelConfig& config, const GgufArchitecture& architecture) {
  GgufConfig out;
  Writer(config, architecture, out).write();
  if (architecture.not_run_by_llama_cpp)
    out.notes.emplace_back("llama.cpp has a name for this architecture but cannot run it");
  return out;
}

}  // namespace emend::models::detail
