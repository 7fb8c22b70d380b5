#include <emend/core/text.h>
#include <emend/models/family.h>
#include <emend/models/model.h>
#include <emend/models/tied_head.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>

namespace emend::models {

#define EMEND_FAMILY(name) FamilySpec name##_family();
#include <emend/models/families.def>
#undef EMEND_FAMILY

const std::vector<FamilySpec>& all_families() {
  static const std::vector<FamilySpec> families = {
#define EMEND_FAMILY(name) name##_family(),
#include <emend/models/families.def>
#undef EMEND_FAMILY
  };
  return families;
}

const FamilySpec& find_family(const std::string& model_type, const std::string& where) {
  std::vector<std::string> known;
  for (const FamilySpec& family : all_families()) {
    for (const std::string& type : family.model_types) {
      if (type == model_type) return family;
      known.push_back(type);
    }
  }
  throw Error(ErrorClass::kUnsupported, {where, "\"" + model_type + "\" is not a known family", "one of " + join(known),
                                         did_you_mean(model_type, known, "see docs/adding-a-family.md")});
}

const FamilySpec& family_named(const std::string& name) {
  std::vector<std::string> names;
  for (const FamilySpec& family : all_families()) {
    if (family.name == name) return family;
    names.push_back(family.name);
  }
  throw Error(ErrorClass::kNotFound,
              {"families", "no family \"" + name + "\"", "a name in families.def", did_you_mean(name, names)});
}

const FamilySpec& family_of(const nlohmann::json& config, const std::string& file, const FamilySpec* own) {
  if (own) return *own;
  const ConfigReader reader(config, file);
  if (!reader.has("model_type")) reader.fail("model_type", "missing", "the name of a model family");
  return find_family(reader.text_or({"model_type"}, ""), file + ": model_type");
}

std::string name_of(const std::vector<TensorSpec>& table, Part part) {
  const auto row = std::ranges::find(table, part, &TensorSpec::part);
  return row == table.end() ? "" : row->name;
}

namespace {

int64_t symbol_size(char symbol, const ModelConfig& c) {
  const std::map<char, int64_t> sizes = {{'D', c.hidden_size},
                                         {'F', c.mlp_width},
                                         {'V', c.vocab_size},
                                         {'P', c.max_positions + c.position_offset},
                                         {'Q', c.n_heads * c.head_dim},
                                         {'K', c.n_kv_heads * c.head_dim},
                                         {'d', c.head_dim},
                                         {'E', c.embedding_width},
                                         {'X', c.n_experts}};
  EMEND_CHECK(sizes.contains(symbol), std::string("unknown shape symbol ").append(1, symbol));
  return sizes.at(symbol);
}

// "D 3D" or "Q+2K D": a space between dimensions, plus signs between terms, a number before a symbol.
std::vector<int64_t> evaluate_shape(const std::string& text, const ModelConfig& config) {
  std::vector<int64_t> shape{0};
  int64_t factor = 0;
  for (const char c : text) {
    if (c == ' ') {
      shape.push_back(0);
    } else if (c >= '0' && c <= '9') {
      factor = 10 * factor + (c - '0');
    } else if (c != '+') {
      shape.back() += std::max<int64_t>(factor, 1) * symbol_size(c, config);
      factor = 0;
    }
  }
  return shape;
}

// True if `name` fits a pattern as a shell's (fnmatch), in which "{layer}" stands for anything too.
bool fits(const std::string& pattern, const std::string& name) {
  return fnmatch(replace_all(pattern, "{layer}", "*").c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

std::string stripped(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

}  // namespace

std::vector<ExpectedTensor> expected_tensors(const FamilySpec& family, const ModelConfig& config) {
  std::vector<ExpectedTensor> expected;
  for (const TensorSpec& spec : family.tensors) {
    if (spec.when && !spec.when(config)) continue;
    const bool is_bias = spec.name.ends_with(".bias");
    if (spec.part == Part::kHead && !is_bias && config.tied_head) continue;
    const bool in_layer = spec.name.find("{layer}") != std::string::npos;
    const bool in_expert = spec.name.find("{expert}") != std::string::npos;
    const std::vector<int64_t> shape = evaluate_shape(spec.shape, config);
    for (int layer = in_layer ? 0 : -1; layer < (in_layer ? config.n_layers : 0); ++layer) {
      for (int expert = in_expert ? 0 : -1; expert < (in_expert ? config.n_experts : 0); ++expert) {
        const std::string name =
            replace_all(replace_all(spec.name, "{layer}", std::to_string(layer)), "{expert}", std::to_string(expert));
        expected.push_back({name, shape, spec.part, layer, expert, is_bias});
      }
    }
  }
  return expected;
}

std::vector<std::string> table_spellings(const FamilySpec& family, const std::string& name) {
  std::vector<std::string> all{name, family.base_prefix + name};
  for (const std::string prefix : {"language_model.", "model.language_model."})
    if (name.starts_with(prefix)) {
      all.push_back(name.substr(prefix.size()));
      all.push_back(family.base_prefix + all.back());
    }
  return all;
}

// Whether a file's tensor is the one that the table calls so.
static bool may_be(const FamilySpec& family, const std::string& name, const std::string& in_table) {
  return std::ranges::count(table_spellings(family, name), in_table) > 0;
}

bool repeats_embedding(const FamilySpec& family, const ModelConfig& config, const std::string& name) {
  return config.tied_head && may_be(family, name, name_of(family.tensors, Part::kHead));
}

TiedNames tied_names(const FamilySpec& family, const ModelConfig& config, const std::vector<std::string>& names) {
  TiedNames tied;
  for (const auto& name : names) {
    if (may_be(family, name, name_of(family.tensors, Part::kEmbedding))) tied.embedding = name;
    if (repeats_embedding(family, config, name)) tied.heads.push_back(name);
  }
  return tied;
}

bool is_ignored(const FamilySpec& family, const std::string& name) {
  const auto spellings = table_spellings(family, name);
  return std::ranges::any_of(family.ignored, [&](const std::string& pattern) {
    return std::ranges::any_of(spellings, [&](const std::string& spelling) { return fits(pattern, spelling); });
  });
}

std::string without_base(const FamilySpec& family, const std::string& name) {
  return stripped(name, family.base_prefix);
}

devices::ModuleNames device_module_names(const FamilySpec& family, const ModelConfig& config) {
  const ModuleNames& modules = family.modules;
  devices::ModuleNames names;
  names.embedding = {modules.embedding};
  names.position.clear();
  if (!modules.position.empty()) names.position = {modules.position};
  names.layer = [tmp = modules.layer](int64_t l) { return replace_all(tmp, "{}", std::to_string(l)); };
  names.final_norm.clear();
  if (config.final_norm) names.final_norm.push_back(modules.ln_f);
  for (const char* table : {"rotary_emb", "rotary_emb_local", "rotary_pos_emb", "drop", "emb_dropout", "embed_dropout"})
    names.ignored.push_back(family.base_prefix + table);
  names.head = {modules.lm_head};
  for (const ExpectedTensor& tensor : expected_tensors(family, config)) {
    const std::string module = tensor.name.substr(0, tensor.name.rfind('.'));
    if (tensor.part == Part::kProjectIn) names.embedding.push_back(module);
    if (tensor.part == Part::kProjectOut) names.final_norm.push_back(module);
  }
  return names;
}

void check_module_names(const FamilySpec& family, const ModelConfig& config, const NamedModules& names,
                        const std::function<std::string(const char* key)>& where) {
  const auto check = [&](const char* key, const std::string& got, const std::vector<std::string>& accepted) {
    if (got.empty()) return;
    for (const std::string& name : accepted)
      if (!name.empty() && (got == name || stripped(got, family.base_prefix) == stripped(name, family.base_prefix)))
        return;
    const std::string& expected = accepted.front();
    refuse({where(key) + ": " + key, "\"" + got + "\"",
            expected.empty() ? "no such module in family " + family.name
                             : "\"" + expected + "\" for family " + family.name,
            "use the hyper-parameter file of this model family, or leave the field out"});
  };
  const ModuleNames& modules = family.modules;
  const auto within = [&](const std::string& got, const std::string& module) {  // EasyEdit names what they end in, too
    const bool below = stripped(got, family.base_prefix).starts_with(stripped(module, family.base_prefix) + ".");
    return !module.empty() && below ? got : std::string();
  };
  check("layer_module_tmp", names.layer_module_tmp, {modules.layer});
  check("attn_module_tmp", names.attn_module_tmp, {modules.attn, within(names.attn_module_tmp, modules.attn)});
  check("mlp_module_tmp", names.mlp_module_tmp,
        {modules.mlp, modules.mlp.empty() ? modules.rewrite : "", within(names.mlp_module_tmp, modules.mlp)});
  check("rewrite_module_tmp", names.rewrite_module_tmp, {modules.rewrite});
  check("ln_f_module", names.ln_f_module, {modules.ln_f});
  check("lm_head_module", names.lm_head_module,
        {modules.lm_head, "lm_head", config.tied_head ? modules.embedding : std::string()});
}

}  // namespace emend::models
