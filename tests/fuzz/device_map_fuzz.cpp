// Device maps, memory limits and machines as people write them.
#include <emend/devices/device_map.h>
#include <emend/devices/planner.h>
#include <emend/devices/units.h>

#include "fuzz.h"

namespace emend::fuzz {

EMEND_FUZZ_TARGET(device_map) {
  const std::string text(input);
  expect_error_or_success([&] {
    const auto spec = devices::parse_device_map(text);
    std::vector<std::string> warnings;
    if (spec.kind == devices::DeviceMapSpec::Kind::kExplicit) {
      devices::ModuleNames names;
      names.embedding = {"model.embed_tokens"};
      names.layer = [](int64_t l) { return "model.layers." + std::to_string(l); };
      names.final_norm = {"model.norm"};
      names.head = {"lm_head"};
      const auto plan = devices::place_explicitly(spec, names, 2, false, warnings);
      (void)plan.to_json(names).dump();
    }
  });
  expect_error_or_success([&] { (void)devices::parse_max_memory(text); });
  expect_error_or_success([&] { (void)devices::parse_machine(text); });
  expect_error_or_success([&] { (void)devices::to_string(devices::parse_device_name(text)); });
}

}  // namespace emend::fuzz
