//   D output width · F input width · N facts · R rank
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/npz.h>
#include <emend/core/regex.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/import_deltas.h>
#include <emend/editors/packs/pack.h>
#include <emend/models/family.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace emend::editors {
namespace {

using nlohmann::json;

// "X.key_mat" → "X" and "key_mat" for the endings given; an empty ending for every other name.
std::pair<std::string, std::string> split(const std::string& name, const std::vector<std::string>& endings) {
  for (const auto& ending : endings)
    if (name.ends_with("." + ending)) return {name.substr(0, name.size() - ending.size() - 1), ending};
  return {name, ""};
}

class Importer {
 public:
  Importer(const std::filesystem::path& source, const models::Model& model, const std::string& weight)
      : source_(source), model_(model), weight_(weight) {}

  std::vector<WeightDelta> run() {
    std::filesystem::is_directory(source_) ? read_adapter() : add_file();
    if (deltas_.empty()) refuse(ErrorClass::kCorruption, "no change", "at least one");
    for (const auto& delta : deltas_) {
      if (!delta.finite())
        refuse(ErrorClass::kCorruption, "a change of " + delta.weight + " with NaN or infinite entries",
               "finite numbers");
      if (!std::isfinite(delta.norm()))
        refuse(ErrorClass::kCorruption, "a change of " + delta.weight + " whose norm is beyond all numbers",
               "a change that can be written");
    }
    return std::move(deltas_);
  }

 private:
  using Parts = std::map<std::string, std::map<std::string, at::Tensor>>;  // weight or module → part → tensor

  [[noreturn]] void refuse(ErrorClass error_class, const std::string& got, const std::string& expected) const {
    throw Error(error_class, {source_.string(), got, expected,
                              "docs/ledger.md says how to save deltas of other programs for emend"});
  }

  // Where the source names the weights that it changes.
  void refuse_weight() const {
    if (!weight_.empty())
      refuse(ErrorClass::kInvalidArgument, setting("weight", weight_) + ", and a source that names its weights",
             setting("weight") + " with a file of nameless vectors only");
  }

  // The name that the model has for a weight: with or without the prefix of its family, or behind another.
  std::string weight_named(const std::string& name) const {
    const auto wanted = models::table_spellings(model_.family(), name);
    for (const auto& weight : model_.weight_names())
      for (const auto& spelling : models::table_spellings(model_.family(), weight))
        if (std::ranges::count(wanted, spelling) > 0) return weight;
    const std::string close = closest_name(name, model_.weight_names());
    throw Error(ErrorClass::kNotFound,
                {source_.string(), "a change of \"" + name + "\", which the model does not have",
                 "weights of the model", close.empty() ? "" : "the closest is \"" + close + "\""});
  }

  int layer_of(const std::string& weight) const {
    const auto& family = model_.family();
    const std::string slot = family.modules.layer.substr(0, family.modules.layer.find("{}"));  // "model.layers."
    for (const auto& name : models::table_spellings(family, weight))
      for (int layer = 0; layer < model_.n_layers(); ++layer)
        if (name.starts_with(slot + std::to_string(layer) + ".")) return layer;
    return -1;
  }

  void add_factors(const std::string& name, const at::Tensor& left_DR, const at::Tensor& right_FR) {
    WeightDelta delta{weight_named(name),       0, model_.family().orientation, left_DR.to(at::kDouble),
                      right_FR.to(at::kDouble), {}};
    delta.layer = layer_of(delta.weight);
    auto shape = model_.weight(delta.weight).sizes().vec();
    if (delta.orientation == models::Orientation::kInOut && shape.size() == 2) std::swap(shape[0], shape[1]);
    if (left_DR.dim() != 2 || right_FR.dim() != 2 || left_DR.size(1) != right_FR.size(1) || shape != delta.shape())
      refuse(ErrorClass::kInvalidArgument, "factors of " + delta.weight + " that do not fit it",
             "[outputs, rank] and [inputs, rank]");
    deltas_.push_back(std::move(delta));
  }

  void add_dense(const std::string& name, const at::Tensor& change) {
    const std::string weight = weight_named(name);
    if (change.sizes() != model_.weight(weight).sizes())
      refuse(ErrorClass::kInvalidArgument, "a change of " + weight + " of another shape", "the shape of the weight");
    const at::Tensor own = devices::to_host(model_.weight(weight)).to(at::kDouble), given = change.to(at::kDouble);
    if (const double norm = own.norm().item<double>(); norm > 0 && (given - own).norm().item<double>() < norm / 2)
      refuse(ErrorClass::kInvalidArgument, weight + " itself, as the model has it or an edit left it",
             "what is to be added to it (edited less unedited)");
    deltas_.push_back(
        WeightDelta::as_stored(weight, layer_of(weight), change.to(at::kDouble).clone(), model_.family().orientation));
  }

  const at::Tensor& part(const Parts::value_type& entry, const std::string& name) const {
    const auto found = entry.second.find(name);
    if (found == entry.second.end())
      refuse(ErrorClass::kCorruption, entry.first + " without " + name, "both of a pair");
    if (!found->second.is_floating_point())
      refuse(ErrorClass::kCorruption, entry.first + " of type " + c10::toString(found->second.scalar_type()),
             "floating-point numbers");
    return found->second;
  }

  void add_file() {
    if (source_.extension() == ".npz") {
      const NpzFile file(source_);
      return add_named(file.names(), [&](const std::string& name) { return file.read(name); });
    }
    const SafetensorsFile file(source_);
    if (is_pack(file))
      refuse(ErrorClass::kInvalidArgument, "an edit pack", "a change that another program wrote; packs need no import");
    add_named(mapped(file.tensors(), key_of), [&](const std::string& name) { return file.tensor(name); });
  }

  void add_named(const std::vector<std::string>& names, const std::function<at::Tensor(const std::string&)>& read) {
    static const std::vector<std::string> kEndings = {"key_mat", "val_mat", "left_vector", "right_vector"};
    Parts parts;
    bool used = false;
    for (const auto& given : names) {
      const bool nameless = std::ranges::count(kEndings, given) > 0;
      if (nameless && weight_.empty())
        refuse(ErrorClass::kInvalidArgument, "\"" + given + "\" without the weight that it changes",
               "names such as W." + given + ", or " + setting("weight", "W"));
      used = used || nameless;
      const auto [weight, ending] = split(nameless ? weight_ + "." + given : given, kEndings);
      parts[weight][ending] = read(given);
    }
    if (!used) refuse_weight();
    for (const auto& entry : parts) {
      const bool memit = entry.second.contains("key_mat") || entry.second.contains("val_mat");
      const bool rome = entry.second.contains("left_vector") || entry.second.contains("right_vector");
      if (entry.second.size() > 2 || (memit && rome) || (entry.second.contains("") && (memit || rome)))
        refuse(ErrorClass::kCorruption, "several changes of " + entry.first, "one change a weight");
      if (memit)
        add_factors(entry.first, part(entry, "val_mat"), part(entry, "key_mat"));
      else if (rome)
        add_factors(entry.first, part(entry, "right_vector").reshape({-1, 1}),
                    part(entry, "left_vector").reshape({-1, 1}));
      else
        add_dense(entry.first, part(entry, ""));
    }
  }

  void read_adapter() {
    refuse_weight();
    const auto config = read_json(source_ / "adapter_config.json");
    if (!config.is_object() || config.value("peft_type", json()) != "LORA")
      refuse(ErrorClass::kUnsupported, "an adapter of another kind", "peft_type LORA");
    if (config.value("use_dora", json(false)) == true || config.value("bias", json("none")) != "none")
      refuse(ErrorClass::kUnsupported, "DoRA, or trained biases", "a plain LoRA adapter");
    refuse_other_bases(config);
    for (const char* key : {"use_rslora", "fan_in_fan_out"})
      if (const json flag = config.value(key, json(false)); !flag.is_boolean() && !flag.is_null())
        refuse(ErrorClass::kCorruption, std::string(key) + ": " + flag.dump(), "true or false");
    const auto ordered = nlohmann::ordered_json::parse(read_file(source_ / "adapter_config.json"));
    const SafetensorsFile file(source_ / "adapter_model.safetensors");
    Parts parts;
    for (const auto& [name, info] : file.tensors()) {
      const auto [module, ending] = split(name, {"lora_A.weight", "lora_B.weight"});
      const std::string prefix = "base_model.model.";
      if (ending.empty() || !module.starts_with(prefix))
        refuse(ErrorClass::kUnsupported, "tensor \"" + name + "\"", "lora_A and lora_B of linear modules only");
      parts[module.substr(prefix.size())][ending] = file.tensor(name);
    }
    for (const auto& entry : parts) {
      const at::Tensor a_RF = part(entry, "lora_A.weight"), b_DR = part(entry, "lora_B.weight");
      if (a_RF.dim() != 2) refuse(ErrorClass::kCorruption, entry.first + ": lora_A is no matrix", "[rank, inputs]");
      add_factors(entry.first + ".weight", b_DR.to(at::kDouble) * scale(ordered, entry.first, a_RF.size(0)), a_RF.t());
    }
  }

  // Adapters whose base is not the model as it is, or whose change is not B A alone.
  void refuse_other_bases(const json& config) const {
    const json initial = config.value("init_lora_weights", json());
    for (const char* kind : {"pissa", "olora", "corda", "loftq"})
      if (initial.is_string() && initial.get<std::string>().starts_with(kind))
        refuse(ErrorClass::kUnsupported, "an adapter of a base changed by " + initial.get<std::string>(),
               "a plain LoRA adapter");
    for (const char* key : {"layer_replication", "target_parameters", "trainable_token_indices", "megatron_config",
                            "use_qalora", "alora_invocation_tokens", "arrow_config"}) {
      const json value = config.value(key, json());
      if (!value.is_null() && value != false && !(value.is_structured() && value.empty()))
        refuse(ErrorClass::kUnsupported, std::string("an adapter with ") + key, "a plain LoRA adapter");
    }
  }

  // The value for a module. PEFT takes the first pattern that fits, in the order of the file; its keys are regular
  // expressions of the end of a module's name.
  json value_for(const nlohmann::ordered_json& config, const char* key, const char* patterns,
                 const std::string& module) const {
    const auto by_name = config.value(patterns, nlohmann::ordered_json());
    const std::string where = source_.string() + ", " + patterns;
    size_t begin = 0, end = 0;
    if (by_name.is_object())
      for (const auto& [name, value] : by_name.items())
        if (Regex("^(?:.*\\.)?(?:" + name + ")$", where).match(module, 0, begin, end)) return value;
    return config.value(key, nlohmann::ordered_json());
  }

  // lora_alpha / r, or / √r.
  double scale(const nlohmann::ordered_json& config, const std::string& module, int64_t rank) const {
    const json alpha = value_for(config, "lora_alpha", "alpha_pattern", module);
    if (!alpha.is_number() || rank < 1) refuse(ErrorClass::kCorruption, "no lora_alpha for " + module, "a number");
    if (const json said = value_for(config, "r", "rank_pattern", module); !said.is_null() && said != rank)
      refuse(ErrorClass::kCorruption, "factors of rank " + std::to_string(rank) + " for " + module,
             "rank " + said.dump() + ", as adapter_config.json says");
    const auto r = static_cast<double>(rank);
    return alpha.get<double>() / (config.value("use_rslora", json(false)) == true ? std::sqrt(r) : r);
  }

  std::filesystem::path source_;
  const models::Model& model_;
  std::string weight_;
  std::vector<WeightDelta> deltas_;
};

}  // namespace

std::vector<WeightDelta> import_deltas(const std::filesystem::path& source, const models::Model& model,
                                       const std::string& weight) {
  return Importer(source, model, weight).run();
}

}  // namespace emend::editors
