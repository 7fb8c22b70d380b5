// Where each part of a model lives: names of devices, and the plan that maps parts to them.
//
// A plan is computed and validated before anything is loaded (devices/device_map.h, devices/planner.h). One
// device is just the trivial plan. Non-goal: parts of a block on two devices; a block is the smallest unit.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace emend::devices {

/// The c10 device type behind the devices called "sim:0", "sim:1", … (devices/simulated.h).
inline constexpr c10::DeviceType kSimulated = c10::DeviceType::PrivateUse1;
/// Whether the processor can read what lies on such a device: the CPU's own memory, or a simulated device's.
[[nodiscard]] inline bool in_host_memory(c10::Device device) noexcept {
  return device.is_cpu() || device.type() == kSimulated;
}

/// A device by its name: "cpu", "cuda:1", "cuda" (= cuda:0), "sim:3", or a bare number (a CUDA device).
/// Throws Error(kInvalidArgument) for anything else. Does not ask whether the device exists.
[[nodiscard]] c10::Device parse_device_name(std::string_view text);
/// "cpu", "cuda:1", "sim:3".
[[nodiscard]] std::string to_string(c10::Device device);

/// Throws Error(kDevice) naming `where`, the device and what is visible, unless this process can use the device.
void require_visible(c10::Device device, const std::string& where);

/// Hugging Face module names of a model's parts, as they appear in device maps. Each list's first name is the
/// one written; the others are accepted and must follow it (an embedding's layer norm, OPT's project_in).
struct ModuleNames {
  std::vector<std::string> embedding{"embedding"};
  std::vector<std::string> position;  ///< empty where the model has no learned positions
  std::function<std::string(int64_t)> layer = [](int64_t l) { return "layers." + std::to_string(l); };
  std::vector<std::string> final_norm{"final_norm"};
  std::vector<std::string> head{"head"};
  /// Accepted in maps and passed over: rotary tables and the like, which every device builds for itself.
  std::vector<std::string> ignored;
};

/// Device of every part of a decoder.
struct PlacementPlan {
  c10::Device embedding{c10::kCPU};
  c10::Device position{c10::kCPU};  ///< learned position embedding, if the model has one
  std::vector<c10::Device> layers;
  c10::Device final_norm{c10::kCPU};
  c10::Device head{c10::kCPU};
  /// The head is tied to the embedding but lives elsewhere: the loader makes a copy, and an edit of one must
  /// be written to both. Never set unless the two devices differ.
  bool tied_copy = false;

  /// Everything on one device.
  [[nodiscard]] static PlacementPlan single(c10::Device device, int64_t n_layers);
  /// Every device in use, in the order in which a forward pass meets them.
  [[nodiscard]] std::vector<c10::Device> devices() const;
  /// True if no device is left and entered again between embedding and head (not counting a tied head that is with it).
  [[nodiscard]] bool is_monotone() const;
  /// {"model.embed_tokens": "cuda:0", "model.layers.0": "cuda:0", …, "lm_head": "cuda:1"}: what Hugging Face
  /// calls hf_device_map. Accepted back by parse_device_map.
  [[nodiscard]] nlohmann::ordered_json to_json(const ModuleNames& names = {}) const;

  friend bool operator==(const PlacementPlan& a, const PlacementPlan& b) = default;
};

}  // namespace emend::devices
