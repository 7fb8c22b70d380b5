#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/sha256.h>
#include <emend/core/splitmix64.h>
#include <emend/core/text.h>
#include <emend/models/family.h>
#include <emend/models/published_shapes.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <array>
#include <numeric>
#include <regex>

namespace emend::models {
namespace {

struct Shape {
  const char* name;
  const char* config;
};

// One line a model: what its config.json says about sizes.
constexpr std::array kShapes = {
    Shape{"gpt2", R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
                      "vocab_size": 50257})"},
    Shape{"gpt2-xl", R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
                         "vocab_size": 50257})"},
    Shape{"gpt-j-6b", R"({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
                          "rotary_dim": 64, "vocab_size": 50400, "tie_word_embeddings": false})"},
    Shape{"gpt-neox-20b", R"({"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44,
                              "num_attention_heads": 64, "intermediate_size": 24576, "max_position_embeddings": 2048,
                              "rotary_pct": 0.25, "use_parallel_residual": true, "vocab_size": 50432})"},
    Shape{"smollm2-135m", R"({"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
                              "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
                              "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
                              "rope_theta": 100000, "tie_word_embeddings": true})"},
    Shape{"llama-3.2-1b", R"({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
                              "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                              "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192,
                              "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": true})"},
    Shape{"llama-2-7b", R"({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
                            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                            "tie_word_embeddings": false})"},
    Shape{"llama-3-8b", R"({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
                            "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
                            "rope_theta": 500000, "tie_word_embeddings": false})"},
    Shape{"mistral-7b", R"({"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
                            "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
                            "sliding_window": 4096, "tie_word_embeddings": false})"},
    Shape{"qwen2.5-7b", R"({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
                            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
                            "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                            "rope_theta": 1000000, "tie_word_embeddings": false})"},
};

class RandomWeights final : public Checkpoint {
 public:
  RandomWeights(nlohmann::json config, const std::string& name, uint64_t seed)
      : Checkpoint(name, "random", std::move(config)), seed_(seed) {
    const ModelConfig parsed = parse_config(config_, name);
    norm_one_plus_ = parsed.norm_one_plus;
    for (const auto& expected : expected_tensors(family_named(parsed.family), parsed)) {
      TensorInfo info;
      info.name = expected.name;
      info.dtype = at::kFloat;
      info.shape = expected.shape;
      info.bytes = c10::elementSize(at::kFloat);
      for (const int64_t n : expected.shape) info.bytes *= static_cast<uint64_t>(n);
      tensors_.push_back(std::move(info));
      if (expected.bias) biases_.push_back(expected.name);
    }
  }

  [[nodiscard]] at::Tensor read(const std::string& name) const override {
    const auto info = std::ranges::find(tensors_, name, &TensorInfo::name);
    if (info == tensors_.end())
      throw Error(ErrorClass::kNotFound,
                  {path_.string(), "no tensor \"" + name + "\"", "one of the checkpoint's tensors", ""});
    if (std::ranges::find(biases_, name) != biases_.end()) return at::zeros(info->shape);
    if (info->shape.size() == 1) return norm_one_plus_ ? at::zeros(info->shape) : at::ones(info->shape);
    const uint64_t own = std::stoull(sha256_hex(name).substr(0, 15), nullptr, 16);
    constexpr double kLimit = 0.02 * 1.7320508;
    // Blocks with seeds of their own: billions of numbers are drawn on every core, and are the same on any number of
    // them. LibTorch's generator looks at the lower half of a seed only.
    constexpr int64_t kBlock = 1 << 20;
    auto values = at::empty(info->shape);
    const auto flat = values.view({-1});
    const int64_t n_blocks = (flat.numel() + kBlock - 1) / kBlock;
    at::parallel_for(0, n_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const uint64_t seed = splitmix64((seed_ ^ own) + static_cast<uint64_t>(block));
        flat.slice(0, block * kBlock, (block + 1) * kBlock)
            .uniform_(-kLimit, kLimit, at::make_generator<at::CPUGeneratorImpl>(seed));
      }
    });
    return values;
  }

 private:
  [[nodiscard]] std::string hash() const override {
    return sha256_hex(path_.string() + config_.dump() + std::to_string(seed_));
  }

  uint64_t seed_;
  bool norm_one_plus_ = false;
  std::vector<std::string> biases_;
};

// Heads keep their size.
void set_width(nlohmann::json& config, const std::string& name, int64_t width) {
  const bool gpt2 = config.contains("n_embd");
  const int64_t before = config[gpt2 ? "n_embd" : "hidden_size"].get<int64_t>();
  int64_t groups = 0;
  for (const char* heads : {"n_head", "num_attention_heads", "num_key_value_heads"})
    if (config.contains(heads)) groups = std::gcd(groups, config[heads].get<int64_t>());
  if (const int64_t step = before / groups; width % step != 0)
    refuse(
        {"width of " + name, std::to_string(width), "a multiple of " + std::to_string(step), "heads keep their size"});
  for (const char* key :
       {"n_embd", "n_head", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"})
    if (config.contains(key)) config[key] = config[key].get<int64_t>() * width / before;
}

}  // namespace

std::vector<std::string> published_shape_names() {
  return mapped(kShapes, [](const auto& shape) { return std::string(shape.name); });
}

nlohmann::json published_shape(const std::string& name, int64_t layers, int64_t width) {
  for (const auto& shape : kShapes) {
    if (name != shape.name) continue;
    auto config = nlohmann::json::parse(shape.config);
    if (layers > 0) config[config.contains("n_layer") ? "n_layer" : "num_hidden_layers"] = layers;
    if (width > 0) set_width(config, name, width);
    return config;
  }
  throw Error(ErrorClass::kNotFound, {"shape", "\"" + name + "\"", "one of " + join(published_shape_names()),
                                      did_you_mean(name, published_shape_names())});
}

std::shared_ptr<const Checkpoint> random_weights(nlohmann::json config, const std::string& name, uint64_t seed) {
  return std::make_shared<RandomWeights>(std::move(config), name, seed);
}

std::shared_ptr<const Checkpoint> shape_checkpoint(const std::string& name) {
  static const std::regex kForm("shape:([^/@]+)(?:/([0-9]{1,4}))?(?:@(.+))?");
  std::smatch parts;
  if (!name.starts_with("shape:")) return nullptr;
  if (!std::regex_match(name, parts, kForm)) refuse({name, "not the name of a shape", "shape:NAME/LAYERS@MODEL", ""});
  const int64_t layers = parts[2].matched ? std::stoll(parts[2]) : 0;
  auto weights = random_weights(published_shape(parts[1], layers), parts[1], 0);
  if (!parts[3].matched) return weights;
  return with_tokenizer(std::move(weights), [from = parts[3].str()] {
    return std::filesystem::exists(from + "/config.json") || from.ends_with(".gguf")
               ? open_checkpoint(from)->load_tokenizer()
               : load_tokenizer(from);
  });
}

}  // namespace emend::models
