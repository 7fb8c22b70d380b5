#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/models/control_vector.h>
#include <emend/models/family.h>
#include <emend/models/generation.h>
#include <emend/models/gguf/detail/gguf_container.h>

#include <algorithm>
#include <cctype>
#include <cmath>

namespace emend::models {
namespace {

constexpr const char* kArchitecture = "controlvector";
constexpr std::string_view kPrefix = "direction.";

[[noreturn]] void refuse_file(const std::filesystem::path& path, const std::string& got, const std::string& expected) {
  throw Error(ErrorClass::kCorruption, {path.string(), got, expected,
                                        "a control vector is what emend direct fit, repeng, EasySteer or "
                                        "llama-cvector-generator writes"});
}

// N of "direction.N", from `least` on.
int layer_of(const std::filesystem::path& path, const std::string& name, int least) {
  const int layer = number_in<int>(name.substr(std::min(name.size(), kPrefix.size()))).value_or(-1);
  constexpr int kMost = 10'000;  // no model has more blocks
  if (!name.starts_with(kPrefix) || layer < least || layer > kMost)
    refuse_file(path, "tensor \"" + name + "\"",
                "tensors direction.N with N from " + std::to_string(least) + " on, at most " + std::to_string(kMost));
  return layer;
}

// EasySteer extracts other states too, of heads and of routers, which may be as wide as the stream.
void require_stream(const std::filesystem::path& path, const std::string& about) {
  const auto told = parse_json(about, path.string() + ": controlvector.easysteer");
  const auto component = told.is_object() ? told.value("component", nlohmann::json()) : nlohmann::json();
  if (component.is_null() || component == "hidden_states") return;
  throw Error(ErrorClass::kUnsupported,
              {path.string(), "directions of " + component.dump(), "of \"hidden_states\", to which they are added",
               "extract them from the hidden states"});
}

// Programs write the type of config.json or GGUF's architecture.
bool names_kind(const std::string& hint, const FamilySpec& family) {
  const auto plain = [](std::string text) {
    std::erase_if(text, [](unsigned char c) { return std::isalnum(c) == 0; });
    return text;
  };
  const auto is_hint = [&](const std::string& name) { return plain(name) == plain(hint); };
  return is_hint(family.name) || is_hint(family.gguf.architecture) || std::ranges::any_of(family.model_types, is_hint);
}

bool names_any_kind(const std::string& hint) {
  return std::ranges::any_of(all_families(), [&](const FamilySpec& family) { return names_kind(hint, family); });
}

}  // namespace

ControlVector read_control_vector(const std::filesystem::path& path) {
  const GgufFile file(path);
  ControlVector vector;
  const auto architecture = file.text("general.architecture");
  // EasySteer's have a direction behind block 0, which llama.cpp refuses; it names its method.
  const bool easy_steer = architecture == "steervector" || file.text("controlvector.method");
  if (architecture && *architecture != kArchitecture && !easy_steer)
    refuse_file(path, "a GGUF file of the architecture \"" + *architecture + "\"", "\"controlvector\"");
  if (const auto about = file.text("controlvector.easysteer")) require_stream(path, *about);
  // EasySteer's hint is the model itself: a folder, ORG/NAME or "unknown".
  const std::string hint = file.text("controlvector.model_hint").value_or("");
  if (hint != "unknown" && hint.find('/') == hint.npos && (!easy_steer || names_any_kind(hint)))
    vector.model_hint = hint;
  int64_t width = -1;
  for (const GgufTensor& tensor : file.tensors()) {
    const int layer = layer_of(path, tensor.name, easy_steer ? 0 : 1);
    if (tensor.type != GgmlType::kF32 || tensor.shape.size() != 1)
      refuse_file(path,
                  std::to_string(tensor.shape.size()) + " dimensions of type " + std::string(to_string(tensor.type)) +
                      " in " + tensor.name,
                  "one row of F32");
    if (width < 0) width = tensor.shape[0];
    if (tensor.shape[0] != width)
      refuse_file(path, tensor.name + " of width " + std::to_string(tensor.shape[0]),
                  "one width, " + std::to_string(width));
    const auto values = at::from_blob(const_cast<std::byte*>(file.data(tensor)), tensor.shape, at::kFloat).clone();
    if (!at::isfinite(values).all().item<bool>())
      refuse_file(path, tensor.name + " with NaN or infinite values", "numbers");
    if (const auto from = file.number("controlvector.origin." + std::to_string(layer))) vector.origin[layer] = *from;
    if (!vector.layers.emplace(layer, values).second)
      refuse_file(path, "layer " + std::to_string(layer) + " twice", "once");
  }
  if (vector.layers.empty()) refuse_file(path, "no direction", "tensors direction.N with N from 1 on");
  return vector;
}

void write_control_vector(const std::filesystem::path& path, const ControlVector& vector) {
  std::vector<detail::GgufOutput> outputs;
  for (const auto& [layer, values] : vector.layers) {
    if (layer < 1) continue;
    const std::string name = std::string(kPrefix) + std::to_string(layer);
    const at::Tensor row = devices::to_host(values).to(at::kFloat).contiguous();
    outputs.push_back(
        {name, GgmlType::kF32, row.sizes().vec(), [row, name] { return detail::encode(row, GgmlType::kF32, name); }});
  }
  if (outputs.empty())
    refuse({path.string(), "no direction behind block 1 or a later one", "at least one", "take more layers"});
  GgufMetadata metadata;
  metadata.set_text("general.architecture", kArchitecture);
  metadata.set_text("controlvector.model_hint", vector.model_hint);
  metadata.set_integer("controlvector.layer_count", std::ssize(outputs));
  for (const auto& [layer, from] : vector.origin)
    if (layer > 0 && vector.layers.contains(layer))
      metadata.set_number("controlvector.origin." + std::to_string(layer), from);
  (void)detail::write_container(path, metadata, 32, outputs);
}

LayerRange LayerRange::parse(const std::string& text) {
  if (text.empty()) return {};
  const size_t dash = std::min(text.find('-'), text.size());
  const auto first = number_in<int>(text.substr(0, dash));
  const auto last = dash == text.size() ? first : number_in<int>(text.substr(dash + 1));
  if (!first || !last || *last < *first)
    refuse({setting("layers"), "\"" + text + "\"", "A-B with A from 0 on and B not below A", "such as 8-14"});
  return {*first, *last};
}

std::string other_kind(const std::string& model_hint, const Model& model) {
  const auto& own = model.family();
  const auto shares_name = [&](const FamilySpec& family) {  // GGUF has one architecture for several families
    return !family.gguf.architecture.empty() && family.gguf.architecture == own.gguf.architecture &&
           names_kind(model_hint, family);
  };
  if (model_hint.empty() || names_kind(model_hint, own) || std::ranges::any_of(all_families(), shares_name)) return "";
  return "made for a model of type \"" + model_hint + "\", this one is \"" + model.config().model_type +
         "\": a direction of another model says nothing";
}

void require_directions(const ControlVector& vector, const LayerRange& range, const std::string& where) {
  if (std::ranges::any_of(vector.layers, [&](const auto& one) { return range.contains(one.first); })) return;
  refuse({where, "no direction for the layers " + std::to_string(range.first) + "-" + std::to_string(range.last),
          "some of " + join(vector.layers, ", ", [](const auto& one) { return std::to_string(one.first); }),
          "name other layers"});
}

namespace {

// The share of the effect that each token gets, [N, 1] float32; undefined: all of it.
at::Tensor shares(int64_t decay, const at::Tensor& x) {
  const RunningPass* pass = RunningPass::now();
  if (decay == 0 || !pass || pass->batch.tokens() != x.size(0)) return {};
  std::vector<float> all;
  for (const int64_t done : pass->answered)
    all.push_back(std::max(0.0F, 1 - static_cast<float>(done) / static_cast<float>(decay)));
  return devices::route_like(at::tensor(all).unsqueeze(1), x, devices::Purpose::kDelta);
}

// What is added to states [N, D].
at::Tensor push(const at::Tensor& x, const at::Tensor& d, const SteerOptions& options, double origin) {
  if (options.by == "add") return options.strength * d.unsqueeze(0);
  const at::Tensor at_N = x.to(at::kFloat).mv(d) / d.square().sum().clamp_min(1e-30) - origin;
  at::Tensor missing = options.strength - at_N;
  if (options.by == "at-least") missing = missing.clamp_min(0);
  if (options.by == "at-most") missing = missing.clamp_max(0);
  return missing.unsqueeze(1) * d;
}

}  // namespace

void require_steering(const Model& model, const ControlVector& vector, const SteerOptions& options,
                      const std::string& where) {
  if (!std::isfinite(options.strength)) refuse({where, "a strength that is no finite number", "a number", ""});
  if (const auto& by = options.by; by != "add" && by != "clamp" && by != "at-least" && by != "at-most")
    refuse({where, "to steer by \"" + by + "\"", "add, clamp, at-least or at-most", ""});
  for (const auto& [layer, values] : vector.layers) {
    const char* const made = "use a vector that was made for this model";
    if (layer >= model.n_layers())
      refuse({where, "a direction for layer " + std::to_string(layer),
              "layers up to " + std::to_string(model.n_layers() - 1) + ", the model's last", made});
    if (values.numel() != model.hidden_size())
      refuse({where, "directions of width " + std::to_string(values.numel()),
              std::to_string(model.hidden_size()) + ", the width of the model", made});
  }
  require_directions(vector, options.layers, where);
}

std::vector<hooks::HookHandle> attach_steering(const Model& model, const ControlVector& vector,
                                               const SteerOptions& options, const std::string& where) {
  require_steering(model, vector, options, where);
  std::vector<hooks::HookHandle> handles;
  for (const auto& [layer, values] : vector.layers) {
    if (!options.layers.contains(layer)) continue;
    const auto from = vector.origin.find(layer);
    const auto home = model.placement().layers[static_cast<size_t>(layer)];
    handles.push_back(model.hooks()
                          .at({hooks::Site::kLayerOut, layer})
                          .add([d = devices::route_to(values, home, devices::Purpose::kDelta), options,
                                origin = from == vector.origin.end() ? 0 : from->second](const at::Tensor& x) {
                            at::Tensor added = push(x, d, options, origin);
                            if (const at::Tensor share = shares(options.decay, x); share.defined())
                              added = added * share;
                            return x + added.to(x.scalar_type());
                          }));
  }
  return handles;
}

}  // namespace emend::models
