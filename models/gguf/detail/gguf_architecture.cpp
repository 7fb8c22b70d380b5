#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/model.h>

#include <algorithm>
#include <array>

namespace emend::models::detail {
namespace {

// Sources: the converter, name tables and graph builders of llama.cpp as of 2026-10. Checked with files that its
// converter wrote from the parity fixtures, see docs/formats/gguf.md.
constexpr std::array<const char*, kParts> kUsualNames = {
    "token_embd",   "position_embd", nullptr,
    nullptr,        "output_norm",   "output",  // no architecture projects (OPT)
    "attn_norm",    "attn_qkv",      "attn_q",
    "attn_k",       "attn_v",        "attn_q_norm",
    "attn_k_norm",  "attn_output",   "post_attention_norm",
    "ffn_norm",     "ffn_up",        "ffn_gate",
    "ffn_up",       "ffn_down",      "post_ffw_norm",
    "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
    "ffn_down_exps"};

/// Name inside a block, or of a tensor that occurs once.
std::string part_name(const GgufForm& form, const ModelConfig& config, Part part) {
  if (form.tensor_name)
    if (std::string name = form.tensor_name(config, part); !name.empty()) return name;
  const char* name = kUsualNames[static_cast<size_t>(part)];
  EMEND_CHECK(name, "a part without a GGUF name");
  return name;
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

std::vector<const FamilySpec*> gguf_families(const FamilySpec* own) {
  std::vector<const FamilySpec*> families;
  if (own) families.push_back(own);
  for (const FamilySpec& family : all_families()) families.push_back(&family);
  std::erase_if(families, [](const FamilySpec* family) { return family->gguf.architecture.empty(); });
  return families;
}

const GgufForm& gguf_architecture(const std::string& name, const std::string& where, const FamilySpec* own) {
  std::vector<std::string> known;
  for (const FamilySpec* family : gguf_families(own)) {
    const std::string& architecture = family->gguf.architecture;
    if (architecture == name) return family->gguf;
    if (std::ranges::count(known, architecture) == 0) known.push_back(architecture);
  }
  throw Error(ErrorClass::kUnsupported, {where, "architecture \"" + name + "\"", "one of " + join(known),
                                         "use the model's Hugging Face checkpoint if its family is supported"});
}

const GgufForm& gguf_architecture_for(const std::string& model_type, const std::string& where, const FamilySpec* own) {
  std::vector<std::string> known;
  for (const FamilySpec* family : gguf_families(own))
    for (const std::string& type : family->model_types) {
      if (type == model_type) return family->gguf;
      if (std::ranges::count(known, type) == 0) known.push_back(type);
    }
  throw Error(ErrorClass::kUnsupported, {where, "GGUF has no architecture for model_type \"" + model_type + "\"",
                                         "one of " + join(known), "save the model as a Hugging Face folder instead"});
}

std::vector<std::string> gguf_names(const GgufForm& form, const ModelConfig& config, const ExpectedTensor& tensor) {
  const std::string block = tensor.layer < 0 ? "" : "blk." + std::to_string(tensor.layer) + ".";
  if (tensor.part == Part::kQkv && form.splits_qkv) return {block + "attn_q", block + "attn_k", block + "attn_v"};
  return {block + part_name(form, config, tensor.part)};
}

std::vector<int64_t> gguf_rows(const ModelConfig& config, size_t names, int64_t rows) {
  if (names == 1) return {rows};
  const int64_t q = config.n_heads * config.head_dim, k = config.n_kv_heads * config.head_dim;
  return {q, k, k};
}

std::vector<int64_t> gguf_row_order(const GgufForm& form, const ModelConfig& c, Part part) {
  const bool fused = part == Part::kQkv;
  const bool paired = form.paired_rotary_rows && c.head_dim % 2 == 0;
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
  return tensor.part == Part::kQkv || tensor.part == Part::kAttnOut || tensor.part == Part::kUp ||
         tensor.part == Part::kDown;
}

bool is_stored_plus_one(const ModelConfig& config, const ExpectedTensor& tensor) {
  static constexpr std::array kNorms = {Part::kFinalNorm,   Part::kAttnNorm, Part::kAttnPostNorm, Part::kMlpNorm,
                                        Part::kMlpPostNorm, Part::kQNorm,    Part::kKNorm};
  return config.norm_one_plus && !tensor.bias && std::ranges::count(kNorms, tensor.part) > 0;
}

bool is_rotary_table(std::string_view name) {
  return name == "rope_freqs.weight" || name == "rope_factors_long.weight" || name == "rope_factors_short.weight" ||
         name.ends_with(".attn_rot_embd.weight") || name.ends_with(".rope_freqs.weight");
}

}  // namespace emend::models::detail
