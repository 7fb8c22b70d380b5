#include <emend/core/atomic_file.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/yaml.h>
#include <emend/devices/device_map.h>
#include <emend/devices/process_environment.h>
#include <emend/devices/simulated.h>

#include <algorithm>
#include <array>

namespace emend::devices {
namespace {

using Kind = DeviceMapSpec::Kind;

constexpr std::array<std::pair<std::string_view, Kind>, 4> kWords = {{{"auto", Kind::kBalanced},
                                                                      {"balanced", Kind::kBalanced},
                                                                      {"balanced_low_0", Kind::kBalancedLow0},
                                                                      {"sequential", Kind::kSequential}}};

void add_module(DeviceMapSpec& spec, const std::string& module, const std::string& device) {
  try {
    spec.modules.emplace_back(module, parse_device_name(device));
  } catch (const Error& error) {
    auto parts = parts_of(error);
    parts.where = spec.source + ": module \"" + module + "\": " + parts.where;
    throw Error(error.error_class(), parts);
  }
}

constexpr const char* kExpectedObject = "an object of module names and devices, such as {\"model.layers.0\": 0}";

void read_modules(DeviceMapSpec& spec, std::string_view text) {
  const YamlValue map = parse_yaml(text, {spec.source, "module"});
  if (map.kind != YamlValue::Kind::kMap) refuse({spec.source, "not an object", kExpectedObject, ""});
  for (size_t i = 0; i < map.keys.size(); ++i) {
    const YamlValue& device = map.items[i];
    if (device.kind != YamlValue::Kind::kScalar)
      refuse({spec.source + ":" + std::to_string(device.line),
              "the device of \"" + map.keys[i] + "\" is " + device.show(), kExpectedObject, ""});
    add_module(spec, map.keys[i], device.text);
  }
}

void refuse_odd_mixtures(const DeviceMapSpec& spec) {
  if (spec.modules.empty()) refuse({spec.source, "the map is empty", kExpectedObject, ""});
  bool simulated = false, cuda = false;
  for (const auto& [module, device] : spec.modules) {
    simulated |= device.type() == kSimulated;
    cuda |= device.is_cuda();
    if (device.type() == kSimulated && device.index() >= kMaxSimulated)
      refuse({spec.source, "module \"" + module + "\" is on " + to_string(device),
              "at most sim:" + std::to_string(kMaxSimulated - 1), ""});
  }
  if (simulated && cuda)
    throw Error(ErrorClass::kUnsupported,
                {spec.source, "simulated and CUDA devices in one map", "one kind or the other",
                 "simulated devices are for trying a map on a machine without GPUs"});
}

bool looks_like_file(const std::string& text) {
  const auto extension = std::filesystem::path(text).extension();
  return extension == ".json" || extension == ".yaml" || extension == ".yml";
}

DeviceMapSpec parse_modules(const std::string& text, const std::string& source) {
  DeviceMapSpec spec;
  spec.kind = Kind::kExplicit;
  spec.source = source;
  read_modules(spec, text);
  refuse_odd_mixtures(spec);
  return spec;
}

}  // namespace

std::vector<c10::Device> DeviceMapSpec::named_devices() const {
  std::vector<c10::Device> devices;
  if (kind == Kind::kSimulated)
    for (int k = 0; k < simulated; ++k) devices.emplace_back(devices::kSimulated, static_cast<c10::DeviceIndex>(k));
  for (const auto& [module, where] : modules)
    if (std::ranges::find(devices, where) == devices.end()) devices.push_back(where);
  return devices;
}

DeviceMapSpec parse_device_map(const std::string& text) {
  DeviceMapSpec spec;
  spec.source = "device map \"" + text + "\"";
  for (const auto& [word, kind] : kWords)
    if (text == word) {
      spec.kind = kind;
      return spec;
    }
  if (text.starts_with("sim:")) {
    const int count = number_in<int>(text.substr(4)).value_or(-1);
    if (count < 0 || count > kMaxSimulated)
      refuse({spec.source, "\"" + text.substr(4) + "\" is not a number of simulated devices",
              "sim:1 to sim:" + std::to_string(kMaxSimulated) + ", or sim:0 for the first alone", ""});
    spec.kind = Kind::kSimulated;
    spec.simulated = count;
    if (count > 0) return spec;
  }
  if (looks_like_file(text)) return parse_modules(read_file(text), text);
  if (text.starts_with("{")) return parse_modules(text, "device map");
  spec.kind = Kind::kExplicit;
  try {
    spec.modules = {{"", parse_device_name(text)}};
  } catch (const Error& error) {
    if (error.error_class() == ErrorClass::kUnsupported || text.starts_with("cuda")) throw;
    std::vector<std::string> words{"cpu", "cuda"};
    for (const auto& entry : kWords) words.emplace_back(entry.first);
    refuse({spec.source, "not a device map",
            "auto, balanced, balanced_low_0, sequential, cpu, cuda:0, sim:4 or a .json or .yaml file",
            did_you_mean(text, words)});
  }
  return spec;
}

c10::DeviceType DeviceMapSpec::numbered() const {
  const auto named = named_devices();
  const auto simulated = [](c10::Device device) { return device.type() == kSimulated; };
  return std::ranges::any_of(named, simulated) ? kSimulated : c10::kCUDA;  // no map names both
}

bool own_gpu(int gpu, int gpus, int local_rank, int local_size) {
  return gpus >= local_size ? gpu * local_size / gpus == local_rank : gpu == local_rank % gpus;
}

std::vector<DeviceInfo> prepare_devices(const DeviceMapSpec& spec, const MaxMemory& max_memory) {
  const auto named = spec.named_devices();
  const bool spreads = named.empty();
  int simulated = 0;
  for (const auto device : named)
    if (device.type() == kSimulated) simulated = std::max(simulated, device.index() + 1);
  if (simulated > simulated_device_count()) enable_simulated_devices(simulated);
  load_cuda_runtime();  // also for the CPU: a later map of this process may name a GPU
  for (const auto device : named) {
    require_visible(device, spec.source);
    if (device.type() == kSimulated) set_simulated_memory_limit(device.index(), 0);  // an earlier model's
  }
  for (const auto& [device, bytes] : max_memory.limits) {
    require_visible(device, setting("max_memory"));
    if (device.type() == kSimulated && bytes > 0) set_simulated_memory_limit(device.index(), bytes);
  }
  std::vector<DeviceInfo> usable;
  const auto visible = visible_devices();
  const int gpus = load_cuda_runtime().devices;
  const auto process = spreads && gpus > 0 ? read_process_environment() : ProcessEnvironment();
  for (const auto& info : visible) {
    const bool is_named = std::ranges::find(named, info.device) != named.end();
    const bool spread =
        spreads && info.device.is_cuda() && own_gpu(info.device.index(), gpus, process.local_rank, process.local_size);
    if (!info.device.is_cpu() && (is_named || spread)) usable.push_back(info);
  }
  usable.push_back(visible.front());
  return usable;
}

// ---- applying an explicit map of module names to a model

namespace {

/// True if `name` is `prefix` or lies below it.
bool is_below(const std::string& name, const std::string& prefix) {
  return prefix.empty() || name == prefix ||
         (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.');
}

class ExplicitMap {
 public:
  ExplicitMap(const DeviceMapSpec& spec, const ModuleNames& names, int64_t n_layers, bool tied)
      : spec_(spec), names_(names), n_layers_(n_layers), tied_(tied) {
    add(names.embedding);
    add(names.position);
    for (int64_t l = 0; l < n_layers; ++l) known_.push_back(names.layer(l));
    add(names.final_norm);
    add(names.head);
  }

  PlacementPlan apply(std::vector<std::string>& warnings) {
    for (const auto& [key, device] : spec_.modules) check_key(key, device);
    refuse_gaps();
    auto plan = PlacementPlan::single(device_of_part(names_.embedding), 0);
    if (!names_.position.empty()) plan.position = device_of_part(names_.position);
    for (int64_t l = 0; l < n_layers_; ++l) plan.layers.push_back(*find(names_.layer(l)));
    plan.final_norm = names_.final_norm.empty() ? plan.layers.back() : device_of_part(names_.final_norm);
    plan.head = head_is_named() ? device_of_part(names_.head) : plan.embedding;
    if (tied_ && plan.head != plan.embedding) {
      plan.tied_copy = true;
      warnings.push_back(spec_.source + ": the head is tied to the embedding but is put on " + to_string(plan.head) +
                         " and not on " + to_string(plan.embedding) + ": it becomes a copy, which takes memory twice");
    }
    if (!plan.is_monotone())
      warnings.push_back(spec_.source +
                         ": the layers leave a device and come back to it, which costs a transfer each time");
    return plan;
  }

 private:
  void add(const std::vector<std::string>& names) { known_.insert(known_.end(), names.begin(), names.end()); }

  /// The device of the longest key that covers a module.
  [[nodiscard]] std::optional<c10::Device> find(const std::string& module) const {
    std::optional<c10::Device> best;
    size_t longest = 0;
    for (const auto& [key, device] : spec_.modules)
      if (is_below(module, key) && (!best || key.size() > longest)) {
        best = device;
        longest = key.size();
      }
    return best;
  }

  [[nodiscard]] bool head_is_named() const { return find(names_.head.front()).has_value(); }

  /// Every key must stand for known modules, or agree with the block that it lies in.
  void check_key(const std::string& key, c10::Device device) const {
    for (const auto& module : known_)
      if (is_below(module, key)) return;
    for (const auto& module : known_) {
      if (!is_below(key, module)) continue;
      const auto whole = find(module);
      if (whole && *whole == device) return;
      refuse({spec_.source,
              "\"" + key + "\" on " + to_string(device) + " would split the block \"" + module + "\"" +
                  (whole ? ", which is on " + to_string(*whole) : ""),
              "every block on one device", "write \"" + module + "\": \"" + to_string(device) + "\" instead"});
    }
    for (const auto& module : names_.ignored)
      if (is_below(key, module) || is_below(module, key)) return;
    refuse({spec_.source, "the model has no module \"" + key + "\"",
            "names such as \"" + names_.embedding.front() + "\" or \"" + names_.layer(0) + "\" to \"" +
                names_.layer(n_layers_ - 1) + "\"",
            did_you_mean(key, known_)});
  }

  void refuse_gaps() const {
    std::vector<std::string> missing;
    for (const auto& module : known_) {
      const bool is_head = std::ranges::find(names_.head, module) != names_.head.end();
      if (!find(module) && !(tied_ && is_head)) missing.push_back(module);
    }
    if (missing.empty()) return;
    std::string list;
    for (size_t i = 0; i < missing.size() && i < 4; ++i) list += (i ? ", " : "") + missing[i];
    if (missing.size() > 4) list += " and " + std::to_string(missing.size() - 4) + " more";
    refuse({spec_.source, "the map leaves out " + list, "a device for every module",
            "add them, or \"\": \"cpu\" for all that is not listed"});
  }

  /// All names of a part must be on the device of the first.
  [[nodiscard]] c10::Device device_of_part(const std::vector<std::string>& part) const {
    const auto home = *find(part.front());
    for (const auto& module : part)
      if (*find(module) != home)
        refuse({spec_.source, "\"" + module + "\" is on " + to_string(*find(module)),
                to_string(home) + ", where \"" + part.front() + "\" is", ""});
    return home;
  }

  const DeviceMapSpec& spec_;
  const ModuleNames& names_;
  const int64_t n_layers_;
  const bool tied_;
  std::vector<std::string> known_;
};

}  // namespace

PlacementPlan place_explicitly(const DeviceMapSpec& spec, const ModuleNames& names, int64_t n_layers, bool tied,
                               std::vector<std::string>& warnings) {
  return ExplicitMap(spec, names, n_layers, tied).apply(warnings);
}

}  // namespace emend::devices
