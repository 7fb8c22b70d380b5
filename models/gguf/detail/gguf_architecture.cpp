#include <emend/core/error.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/model.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

// Sources: the converter, name tables and graph builders of llama.cpp as of 2026-10. Checked with files that its
// converter wrote from the parity fixtures, see docs/formats/gguf.md.
const std::vector<GgufArchitecture> kArchitectures = {
    {.name = "llama", .model_types = {"llama", "mistral", "mixtral", "internlm"}, .paired_rotary_rows = true},
    {.name = "qwen2", .model_types = {"qwen2"}},
    {.name = "qwen3", .model_types = {"qwen3"}},
    {.name = "qwen", .model_types = {"qwen"}},
    {.name = "gpt2", .model_types = {"gpt2"}},
    {.name = "gptneox", .model_types = {"gpt_neox"}},
    {.name = "gptj", .model_types = {"gptj"}, .not_run_by_llama_cpp = true},
    {.name = "phi2", .model_types = {"phi"}},
    {.name = "phi3", .model_types = {"phi3"}},
    {.name = "gemma", .model_types = {"gemma"}},
    {.name = "gemma2", .model_types = {"gemma2"}},
    {.name = "gemma3", .model_types = {"gemma3_text", "gemma3"}},
    {.name = "falcon", .model_types = {"falcon", "RefinedWeb", "RefinedWebModel"}},
    {.name = "chatglm", .model_types = {"chatglm", "glm"}},
    {.name = "glm4", .model_types = {"glm4"}},
    {.name = "baichuan", .model_types = {"baichuan"}, .paired_rotary_rows = true, .splits_qkv = true},
    {.name = "internlm2", .model_types = {"internlm2"}, .paired_rotary_rows = true, .splits_qkv = true},
};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// Name inside a block, or of a tensor that occurs once.
std::string part_name(const ModelConfig& config, Part part) {
  // Falcon's second norm came later: the MLP's kept the old name.
  const bool falcon_two_norms = config.family == "falcon" && config.mlp_norm && config.residual == Residual::kParallel;
  switch (part) {
    case Part::kEmbedding:
      return "token_embd";
    case Part::kPositions:
      return "position_embd";
    case Part::kFinalNorm:
      return "output_norm";
    case Part::kHead:
      return "output";
    case Part::kAttnNorm:
      return falcon_two_norms ? "attn_norm_2" : "attn_norm";
    case Part::kQkv:
      return "attn_qkv";
    case Part::kQ:
      return "attn_q";
    case Part::kK:
      return "attn_k";
    case Part::kV:
      return "attn_v";
    case Part::kQNorm:
      return "attn_q_norm";
    case Part::kKNorm:
      return "attn_k_norm";
    case Part::kAttnOut:
      return "attn_output";
    case Part::kAttnPostNorm:
      return "post_attention_norm";
    case Part::kMlpNorm:
      return falcon_two_norms ? "attn_norm" : "ffn_norm";
    case Part::kGateUp:
    case Part::kUp:
      return "ffn_up";
    case Part::kGate:
      return "ffn_gate";
    case Part::kDown:
      return "ffn_down";
    case Part::kMlpPostNorm:
      return "post_ffw_norm";
    case Part::kRouter:
      return "ffn_gate_inp";
    case Part::kExpertGate:
      return "ffn_gate_exps";
    case Part::kExpertUp:
      return "ffn_up_exps";
    case Part::kExpertDown:
      return "ffn_down_exps";
    case Part::kProjectIn:
    case Part::kProjectOut:
      break;  // OPT only, which has no architecture
  }
  EMEND_CHECK(false, "a part without a GGUF name");
}

// Row of a head-major matrix whose heads have d rows, in the paired order.
int64_t paired_row(int64_t row, int64_t d) {
  const int64_t head = row / d, i = row % d, half = d / 2;
  return head * d + 2 * (i % half) + i / half;
}

// Row of our fused projection as a row of queries, keys, values in blocks.
int64_t block_row(const ModelConfig& c, int64_t row) {
  const int64_t d = c.head_dim, n = c.n_heads, g = c.n_kv_heads, i = row % d;
  if (c.qkv == Qkv::kPerHead) {
    const int64_t head = row / (3 * d), which = row / d % 3;
    return (which * n + head) * d + i;
  }
  if (c.qkv == Qkv::kPerGroup) {
    const int64_t per_group = n / g + 2, group = row / (per_group * d), member = row / d % per_group;
    if (member < n / g) return (group * (n / g) + member) * d + i;
    return (n + (member - n / g) * g + group) * d + i;
  }
  return row;
}

}  // namespace

const std::vector<GgufArchitecture>& gguf_architectures() {
  return kArchitectures;
}

const GgufArchitecture& gguf_architecture(const std::string& name, const std::string& where) {
  std::vector<std::string> names;
  for (const auto& architecture : kArchitectures) {
    if (architecture.name == name) return architecture;
    names.push_back(architecture.name);
  }
  throw Error(ErrorClass::kUnsupported, {where, "architecture \"" + name + "\"", "one of " + listed(names),
                                         "use the model's Hugging Face checkpoint if its family is supported"});
}

const GgufArchitecture& gguf_architecture_for(const std::string& model_type, const std::string& where) {
  std::vector<std::string> types;
  for (const auto& architecture : kArchitectures)
    for (const auto& type : architecture.model_types) {
      if (type == model_type) return architecture;
      types.push_back(type);
    }
  throw Error(ErrorClass::kUnsupported, {where, "GGUF has no architecture for model_type \"" + model_type + "\"",
                                         "one of " + listed(types), "save the model as a Hugging Face folder instead"});
}

std::vector<std::string> gguf_names(const GgufArchitecture& architecture, const ModelConfig& config,
                                    const ExpectedTensor& tensor) {
  const std::string block = tensor.layer < 0 ? "" : "blk." + std::to_string(tensor.layer) + ".";
  if (tensor.part == Part::kQkv && architecture.splits_qkv)
    return {block + "attn_q", block + "attn_k", block + "attn_v"};
  return {block + part_name(config, tensor.part)};
}

std::vector<int64_t> gguf_row_order(const GgufArchitecture& architecture, const ModelConfig& c, Part part) {
  const bool fused = part == Part::kQkv;
  const bool paired = architecture.paired_rotary_rows && c.head_dim % 2 == 0;
  if (!(fused && (paired || c.qkv == Qkv::kPerHead || c.qkv == Qkv::kPerGroup)) &&
      !(paired && (part == Part::kQ || part == Part::kK)))
    return {};
  const int64_t q = c.n_heads * c.head_dim, k = c.n_kv_heads * c.head_dim;
  const int64_t rows = fused ? q + 2 * k : part == Part::kQ ? q : k;
  std::vector<int64_t> order(rows);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t to = fused ? block_row(c, row) : row;
    if (paired && (!fused || to < q + k)) to = paired_row(to, c.head_dim);  // heads have equal size: no offset needed
    order[row] = to;
  }
  return order;
}

bool is_transposed(const FamilySpec& family, const ExpectedTensor& tensor) {
  if (family.orientation != Orientation::kInOut || tensor.bias) return false;
  switch (tensor.part) {
    case Part::kQkv:
    case Part::kAttnOut:
    case Part::kUp:
    case Part::kDown:
      return true;
    default:
      return false;
  }
}

bool is_stored_plus_one(const ModelConfig& config, const ExpectedTensor& tensor) {
  if (!config.norm_one_plus || tensor.bias) return false;
  switch (tensor.part) {
    case Part::kFinalNorm:
    case Part::kAttnNorm:
    case Part::kAttnPostNorm:
    case Part::kMlpNorm:
    case Part::kMlpPostNorm:
    case Part::kQNorm:
    case Part::kKNorm:
      return true;
    default:
      return false;
  }
}

bool is_rotary_table(std::string_view name) {
  return name == "rope_freqs.weight" || name == "rope_factors_long.weight" || name == "rope_factors_short.weight" ||
         name.ends_with(".attn_rot_embd.weight") || name.ends_with(".rope_freqs.weight");
}

}  // namespace emend::models::detail
