// The planner: decides, before anything is loaded, which device holds which part, and says whether it fits.
//
// `auto`, `balanced`, `balanced_low_0` and `sequential` follow accelerate's rules, with two differences: the
// memory that the work takes counts too (accelerate counts weights alone), and layers that end up on the CPU
// compute there instead of being carried to a GPU for every pass.
#pragma once

#include <emend/devices/device_map.h>
#include <emend/devices/memory_model.h>

namespace emend::devices {

struct PlanRequest {
  DeviceMapSpec map;
  MaxMemory max_memory;
  ModelShape model;
  WorkShape work;
  ModuleNames names;
  std::vector<DeviceInfo> machine;  ///< prepare_devices(map, max_memory), or parse_machine("4x24GiB")
  bool imagined = false;            ///< a machine that is not here: its simulated devices stand for GPUs
};

struct Plan {
  PlacementPlan placement;
  std::vector<std::pair<c10::Device, Figures>> devices;  ///< in the order of the forward pass
  bool fits = true;
  std::vector<std::string> warnings;
  std::vector<std::string> suggestions;  ///< what would fit, each tried; empty if the plan fits

  /// {"devices": {"sim:0": {"weights": …, "total": …, "limit": …}}, "map": {…}, "fits": true, "warnings": [],
  ///  "suggestions": []}
  [[nodiscard]] nlohmann::ordered_json to_json(const ModuleNames& names = {}) const;
  /// A table for people.
  [[nodiscard]] std::string to_text() const;
};

/// Places the model and counts. A plan that does not fit is a result, not an error.
/// Throws Error(kInvalidArgument) for an explicit map that place_explicitly refuses and for shapes that
/// MemoryModel refuses, Error(kDevice) if the map names a device that the machine lacks, or a limit one that an
/// imagined machine lacks. Limits of devices that are here and not used are passed over.
[[nodiscard]] Plan make_plan(const PlanRequest& request);

/// Throws Error(kDevice) with the shortage and the suggestions unless the plan fits.
void require_fit(const Plan& plan);

/// A machine that one does not have: "4x24GiB", "2x80GiB,2x40GiB,cpu=64GiB", as simulated devices. Without "cpu="
/// nothing can be put on the CPU. Throws Error(kInvalidArgument).
[[nodiscard]] std::vector<DeviceInfo> parse_machine(const std::string& text);

}  // namespace emend::devices
