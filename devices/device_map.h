// Device maps: what the user asks for, before it meets a model. Words of accelerate, one device, or an
// explicit map of Hugging Face module names.
//
// Goals: every map that accelerate writes is read; a map that would split a block, leave something out or
// name something that is not there is refused with the name. Non-goal: offloading to disk.
#pragma once

#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>

namespace emend::devices {

/// A device map as it was asked for.
struct DeviceMapSpec {
  enum class Kind {
    kBalanced,      ///< spread over the visible GPUs, then the CPU
    kBalancedLow0,  ///< the same, with as little as possible on the first GPU
    kSequential,    ///< fill the first GPU, then the next, then the CPU
    kSimulated,     ///< evenly over `simulated` simulated devices
    kExplicit,      ///< `modules`; one device for all is that of the prefix ""
  };
  Kind kind = Kind::kBalanced;
  int simulated = 0;
  std::vector<std::pair<std::string, c10::Device>> modules;  ///< module name (or prefix, or "") → device
  std::string source = "auto";                               ///< the option's text, for messages

  /// The devices that the spec names itself (kSimulated, kExplicit).
  [[nodiscard]] std::vector<c10::Device> named_devices() const;
  /// What bare numbers beside it mean (--max-memory 0=10GiB): simulated devices if it names some, else GPUs.
  [[nodiscard]] c10::DeviceType numbered() const;
};

/// auto (as balanced) | balanced | balanced_low_0 | sequential | cpu | cuda:0 | 0 | sim:K (K ≥ 1: K simulated devices,
/// evenly; sim:0: the first alone) | FILE.json | FILE.yaml | an inline JSON object. Throws
/// Error(kInvalidArgument), Error(kNotFound) for a missing file, Error(kUnsupported) for "disk" and for maps
/// that mix simulated and CUDA devices. Asks nothing about the machine.
[[nodiscard]] DeviceMapSpec parse_device_map(const std::string& text);

/// Whether a map that spreads over the GPUs may use this one: processes that a launcher started together on one machine
/// share them out in runs; where there are fewer GPUs than processes, several share one.
[[nodiscard]] bool own_gpu(int gpu, int gpus, int local_rank, int local_size);

/// Makes ready what the spec needs: opens the CUDA runtime where there is a driver, switches simulated devices on and
/// gives those in `max_memory` that limit. Returns the devices that may be used, accelerators first, then the CPU.
/// Throws Error(kDevice) naming the device for one that the spec or `max_memory` names and this process cannot see.
[[nodiscard]] std::vector<DeviceInfo> prepare_devices(const DeviceMapSpec& spec, const MaxMemory& max_memory = {});

/// An explicit map applied to a model. The longest matching prefix wins; "" stands for the whole model.
/// Everything must be covered (a tied head may be left out: it goes with the embedding). Warnings (a copy of
/// tied weights, a device that is left and entered again) are appended to `warnings`. Throws
/// Error(kInvalidArgument) for a module without a device, an unknown name, and a map that splits a block.
[[nodiscard]] PlacementPlan place_explicitly(const DeviceMapSpec& spec, const ModuleNames& names, int64_t n_layers,
                                             bool tied, std::vector<std::string>& warnings);

}  // namespace emend::devices
