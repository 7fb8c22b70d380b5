#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/models/control_vector.h>
#include <emend/models/gguf/detail/gguf_container.h>

#include <charconv>

namespace emend::models {
namespace {

constexpr const char* kArchitecture = "controlvector";
constexpr std::string_view kPrefix = "direction.";

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& got, const std::string& expected) {
  throw Error(ErrorClass::kCorruption, {path.string(), got, expected,
                                        "a control vector is what emend direct fit, repeng or llama-cvector-generator "
                                        "writes"});
}

// N of "direction.N".
int layer_of(const std::filesystem::path& path, const std::string& name) {
  int layer = -1;
  const char* end = name.data() + name.size();
  const auto digits = name.data() + std::min(name.size(), kPrefix.size());
  const auto parsed = std::from_chars(digits, end, layer);
  constexpr int kMost = 10'000;  // no model has more blocks
  if (!name.starts_with(kPrefix) || parsed.ec != std::errc() || parsed.ptr != end || layer < 1 || layer > kMost)
    refuse(path, "tensor \"" + name + "\"", "tensors direction.N with N from 1 on, at most " + std::to_string(kMost));
  return layer;
}

}  // namespace

ControlVector read_control_vector(const std::filesystem::path& path) {
  const GgufFile file(path);
  ControlVector vector;
  const auto architecture = file.text("general.architecture");
  if (architecture && *architecture != kArchitecture)
    refuse(path, "a GGUF file of the architecture \"" + *architecture + "\"", "\"controlvector\"");
  vector.model_hint = file.text("controlvector.model_hint").value_or("");
  int64_t width = -1;
  for (const GgufTensor& tensor : file.tensors()) {
    const int layer = layer_of(path, tensor.name);
    if (tensor.type != GgmlType::kF32 || tensor.shape.size() != 1)
      refuse(path, tensor.name + " of type " + std::string(to_string(tensor.type)), "one row of F32");
    if (width < 0) width = tensor.shape[0];
    if (tensor.shape[0] != width)
      refuse(path, tensor.name + " of width " + std::to_string(tensor.shape[0]), "one width, " + std::to_string(width));
    const auto values = at::from_blob(const_cast<std::byte*>(file.data(tensor)), tensor.shape, at::kFloat).clone();
    if (!at::isfinite(values).all().item<bool>()) refuse(path, tensor.name + " with NaN or infinite values", "numbers");
    if (!vector.layers.emplace(layer, values).second) refuse(path, "layer " + std::to_string(layer) + " twice", "once");
  }
  if (vector.layers.empty()) refuse(path, "no direction", "tensors direction.N with N from 1 on");
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
    throw Error(ErrorClass::kInvalidArgument,
                {path.string(), "no direction behind block 1 or a later one", "at least one", "take more layers"});
  GgufMetadata metadata;
  metadata.set_text("general.architecture", kArchitecture);
  metadata.set_text("controlvector.model_hint", vector.model_hint);
  metadata.set_integer("controlvector.layer_count", static_cast<int64_t>(outputs.size()));
  (void)detail::write_container(path, metadata, 32, outputs);
}

Steering::Steering(const Model& model, const ControlVector& vector, double strength, LayerRange layers,
                   const std::string& where)
    : session_(model.hooks()) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw Error(ErrorClass::kInvalidArgument, {where, got, expected, "use a vector that was made for this model"});
  };
  int steered = 0;
  for (const auto& [layer, values] : vector.layers) {
    if (layer >= model.n_layers())
      refuse("a direction for layer " + std::to_string(layer),
             "layers up to " + std::to_string(model.n_layers() - 1) + ", the model's last");
    if (values.numel() != model.hidden_size())
      refuse("directions of width " + std::to_string(values.numel()),
             std::to_string(model.hidden_size()) + ", the width of the model");
    if (!layers.contains(layer)) continue;
    ++steered;
    session_.edit({hooks::Site::kLayerOut, layer}, [added = values * strength](const at::Tensor& x) mutable {
      added = devices::route_like(added, x, devices::Purpose::kDelta, devices::Dtype::kMatch);
      return x + added;
    });
  }
  if (steered == 0) refuse("no direction in the layers asked for", "at least one");
  session_.attach();
}

}  // namespace emend::models
