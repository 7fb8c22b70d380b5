#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>

#include <algorithm>

namespace emend::devices {
namespace {

constexpr int kMaxIndex = 63;

[[noreturn]] void bad_name(std::string_view text, const std::string& advice) {
  refuse({"device \"" + std::string(text) + "\"", "this is not the name of a device",
          "cpu, cuda:<number> or sim:<number>", advice});
}

void append_new(std::vector<c10::Device>& devices, c10::Device device) {
  if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
}

}  // namespace

c10::Device parse_device_name(std::string_view text) {
  if (text == "cpu") return c10::Device(c10::kCPU);
  if (text == "cuda") return c10::Device(c10::kCUDA, 0);
  if (text == "disk")
    throw Error(ErrorClass::kUnsupported,
                {"device \"disk\"", "weights are not offloaded to disk", "", "use cpu: its layers compute on the CPU"});
  auto type = c10::kCUDA;
  std::string_view digits = text;
  if (text.starts_with("cuda:")) {
    digits.remove_prefix(5);
  } else if (text.starts_with("sim:")) {
    digits.remove_prefix(4);
    type = kSimulated;
  }
  if (digits.find(',') != std::string_view::npos)
    bad_name(text, "for several devices use " + setting("device_map", "auto") + " and, to limit them, " +
                       setting("max_memory", "0=10GiB,1=10GiB"));
  const int index = number_in<int>(digits).value_or(-1);
  if (index < 0) bad_name(text, digits.size() == text.size() ? "" : "the number must be 0 or more");
  if (index > kMaxIndex) bad_name(text, "the number must be at most " + std::to_string(kMaxIndex));
  return c10::Device(type, static_cast<c10::DeviceIndex>(index));
}

std::string to_string(c10::Device device) {
  std::string name = device.is_cpu() ? "cpu" : device.is_cuda() ? "cuda" : device.type() == kSimulated ? "sim" : "";
  if (name.empty()) return device.str();
  if (!device.is_cpu() && device.has_index()) name += ":" + std::to_string(device.index());
  return name;
}

void require_visible(c10::Device device, const std::string& where) {
  if (device.is_cpu()) return;
  std::string reason;
  if (device.is_cuda()) reason = load_cuda_runtime().reason;
  std::string names;
  for (const auto& info : visible_devices()) {
    if (info.device == device) return;
    append_item(names, to_string(info.device));
  }
  if (device.is_cuda() && reason.empty()) reason = "CUDA_VISIBLE_DEVICES renumbers the devices from cuda:0";
  if (device.type() == kSimulated) reason = "ask for simulated devices with " + setting("device_map", "sim:<count>");
  throw Error(ErrorClass::kDevice,
              {where, to_string(device) + " is not visible to this process", "one of " + names, reason});
}

PlacementPlan PlacementPlan::single(c10::Device device, int64_t n_layers) {
  PlacementPlan plan;
  plan.embedding = plan.position = plan.final_norm = plan.head = device;
  plan.layers.assign(static_cast<size_t>(n_layers), device);
  return plan;
}

std::vector<c10::Device> PlacementPlan::devices() const {
  std::vector<c10::Device> found;
  append_new(found, embedding);
  append_new(found, position);
  for (const auto device : layers) append_new(found, device);
  append_new(found, final_norm);
  append_new(found, head);
  return found;
}

bool PlacementPlan::is_monotone() const {
  std::vector<c10::Device> path{embedding};
  const auto enter = [&path](c10::Device device) {
    if (path.back() == device) return true;
    const bool is_new = std::ranges::find(path, device) == path.end();
    path.push_back(device);
    return is_new;
  };
  for (const auto device : layers)
    if (!enter(device)) return false;
  if (!enter(final_norm)) return false;
  return head == embedding || enter(head);
}

nlohmann::ordered_json PlacementPlan::to_json(const ModuleNames& names) const {
  nlohmann::ordered_json map;
  const auto put = [&map](const std::vector<std::string>& modules, c10::Device device) {
    for (const auto& name : modules) map[name] = to_string(device);
  };
  put(names.embedding, embedding);
  put(names.position, position);
  for (size_t l = 0; l < layers.size(); ++l) map[names.layer(static_cast<int64_t>(l))] = to_string(layers[l]);
  put(names.final_norm, final_norm);
  put(names.head, head);
  return map;
}

}  // namespace emend::devices
