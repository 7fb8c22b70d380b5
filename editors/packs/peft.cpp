// W' = W + (lora_alpha / r) · B A with A [r, in], B [out, r] (Hu et al. 2021); for MEMIT ΔW = left·rightᵀ, so B = left,
// A = rightᵀ.
//   D output width · F input width · R rank
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/peft.h>
#include <emend/models/checkpoint.h>
#include <emend/models/family.h>

namespace emend::editors {
namespace {

using Factors = std::pair<at::Tensor, at::Tensor>;  // left_DR and right_FR, float32
double relative_error(const at::Tensor& full_DF, const Factors& factors) {
  const double norm = full_DF.norm().item<double>();
  if (norm == 0) return 0;
  const auto& [left_DR, right_FR] = factors;
  return (full_DF - left_DR.to(at::kDouble).matmul(right_FR.to(at::kDouble).t())).norm().item<double>() / norm;
}

// Columns of both factors get equal norms, so that float32 holds both equally well.
Factors balanced(const at::Tensor& left_DR, const at::Tensor& right_FR) {
  const auto left = left_DR.to(at::kDouble), right = right_FR.to(at::kDouble);
  const auto left_norms = left.norm(2, 0), right_norms = right.norm(2, 0);
  const auto scale = (right_norms / left_norms.clamp_min(1e-300)).sqrt().clamp(1e-150, 1e150);
  return {(left * scale).to(at::kFloat).contiguous(), (right / scale.clamp_min(1e-300)).to(at::kFloat).contiguous()};
}

Factors cut(const at::Tensor& full_DF, int64_t rank) {
  const auto [u, s, vh] = at::linalg_svd(full_DF, /*full_matrices=*/false);
  const int64_t numeric = (s > s.max() * 1e-14).sum().item<int64_t>();
  const int64_t r = std::max<int64_t>(1, std::min(rank, numeric));
  return balanced(u.narrow(1, 0, r) * s.narrow(0, 0, r), vh.narrow(0, 0, r).t());
}

AdapterFactors factors_of(const WeightDelta& delta, const PeftOptions& options) {
  const at::Tensor full_DF = devices::to_host(delta.matrix());
  const int64_t exact = std::min(full_DF.size(0), full_DF.size(1));
  const int64_t limit = options.max_rank > 0 ? std::min(options.max_rank, exact) : exact;
  const Factors factors = delta.low_rank() && delta.rank() <= limit
                              ? balanced(devices::to_host(delta.left_DR), devices::to_host(delta.right_FR))
                              : cut(full_DF, limit);
  return {delta.weight, delta.orientation, factors.second.t().contiguous(), factors.first,
          relative_error(full_DF, factors)};
}

// "model.layers.4.mlp.down_proj.weight" → "model.layers.4.mlp.down_proj", as the Hugging Face class names the module.
std::string module_of(const std::string& weight, const models::FamilySpec& family) {
  std::string module = weight.substr(0, weight.rfind(".weight"));
  if (constexpr std::string_view before = "language_model.model."; module.starts_with(before))  // in multimodal files
    module = "model.language_model." + module.substr(before.size());
  const std::string& prefix = family.base_prefix;
  if (!prefix.empty() && module.rfind(prefix, 0) != 0 && module != family.modules.lm_head) module = prefix + module;
  return module;
}

std::string base_name(const models::Model& model) {
  const auto& path = model.checkpoint().path();
  if (const auto hub = models::hub_name(path); !hub.empty()) return hub;
  // A folder's "_name_or_path" is what it was made from, before fine-tuning or edits.
  if (std::filesystem::is_directory(path)) return path.string();
  for (const char* key : {"_name_or_path", "name"})
    if (const auto it = model.checkpoint().config().find(key);
        it != model.checkpoint().config().end() && it->is_string())
      return it->get<std::string>();
  return path.filename().string();
}

}  // namespace

std::vector<AdapterFactors> adapter_factors(const EditPack& pack, const PeftOptions& options) {
  if (!pack.runtime.empty())
    throw Error(ErrorClass::kUnsupported,
                {"adapter", "an edit with a part beside the weights (" + pack.runtime_kinds() + ")",
                 "a change of weights", "save the pack: generate, chat and eval load it"});
  const c10::NoGradGuard no_grad;
  std::vector<AdapterFactors> all;
  for (const auto& delta : merge_deltas(pack.deltas)) {
    if (delta.shape().size() != 2 || !delta.weight.ends_with(".weight"))
      throw Error(ErrorClass::kUnsupported,
                  {delta.weight, "a change of something that is not a matrix", "linear modules only",
                   "save the whole model instead (" + setting("save", "model") + ")"});
    const AdapterFactors& factors = all.emplace_back(factors_of(delta, options));
    constexpr double kExact = 1e-6;  // of factors in float32
    if (factors.error > std::max(options.max_error, kExact))
      refuse({delta.weight,
              "rank " + std::to_string(factors.rank()) + formatted(" leaves a relative error of %.2g", factors.error),
              formatted("at most %.2g", options.max_error), "allow a larger rank or error, or save the whole model"});
  }
  return all;
}

std::vector<AdapterFactors> export_peft(const std::filesystem::path& folder, const EditPack& pack,
                                        const models::Model& model, const PeftOptions& options) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  nlohmann::ordered_json ranks = nlohmann::ordered_json::object(), modules = nlohmann::ordered_json::array();
  int64_t largest = 1;
  bool in_out = false;
  std::vector<AdapterFactors> layers = adapter_factors(pack, options);
  for (const auto& factors : layers) {
    const std::string module = module_of(factors.weight, model.family());
    for (const auto& table : {model.family().modules.embedding, model.family().modules.position})
      if (!table.empty() && module == module_of(table + ".weight", model.family()))
        throw Error(ErrorClass::kUnsupported,
                    {factors.weight, "a change of an embedding, which PEFT keeps in a form of its own",
                     "linear modules only", "save the whole model instead (" + setting("save", "model") + ")"});
    tensors.emplace_back("base_model.model." + module + ".lora_A.weight", factors.a_RI);
    tensors.emplace_back("base_model.model." + module + ".lora_B.weight", factors.b_OR);
    ranks[module] = factors.rank();
    modules.push_back(module);
    largest = std::max(largest, factors.rank());
    in_out = in_out || factors.orientation == models::Orientation::kInOut;
  }
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"task_type", "CAUSAL_LM"},
                                         {"base_model_name_or_path", base_name(model)},
                                         {"inference_mode", true},
                                         {"r", largest},
                                         {"lora_alpha", largest},
                                         {"lora_dropout", 0.0},
                                         {"bias", "none"},
                                         {"fan_in_fan_out", in_out},
                                         {"init_lora_weights", true},
                                         {"use_rslora", false},
                                         {"use_dora", false},
                                         {"modules_to_save", nullptr},
                                         {"target_modules", modules},
                                         {"rank_pattern", ranks},
                                         {"alpha_pattern", ranks}};
  write_whole(folder, [&](const std::filesystem::path& staged) {
    std::filesystem::create_directory(staged);
    write_safetensors(staged / "adapter_model.safetensors", tensors, {{"format", "pt"}});
    write_file(staged / "adapter_config.json", config.dump(2) + "\n");
  });
  return layers;
}

}  // namespace emend::editors
