// Random device maps and random machines: what must hold for all of them.
#include <emend/core/atomic_file.h>
#include <emend/devices/planner.h>
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "support/error_of.h"
#include "support/model_shape.h"

namespace emend::devices {
namespace device_map_property_test {

using Kind = DeviceMapSpec::Kind;

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  c10::Device device(int64_t n) { return {kSimulated, static_cast<c10::DeviceIndex>(below(n))}; }

 private:
  std::mt19937_64 engine_;
};

ModuleNames gpt2() {
  ModuleNames names;
  names.embedding = {"transformer.wte"};
  names.position = {"transformer.wpe"};
  names.layer = [](int64_t l) { return "transformer.h." + std::to_string(l); };
  names.final_norm = {"transformer.ln_f"};
  names.head = {"lm_head"};
  return names;
}

PlacementPlan random_plan(Random& random, int64_t n_layers, int64_t n_devices) {
  auto plan = PlacementPlan::single(random.device(n_devices), n_layers);
  if (random.chance(50)) plan.position = random.device(n_devices);
  for (auto& device : plan.layers) device = random.device(n_devices);
  plan.final_norm = random.device(n_devices);
  plan.head = random.device(n_devices);
  return plan;
}

/// The same map written shorter, with prefixes: every key that a shorter one covers alike may be dropped.
DeviceMapSpec shorter(Random& random, const PlacementPlan& plan) {
  DeviceMapSpec spec;
  spec.kind = Kind::kExplicit;
  std::map<std::string, c10::Device> map;
  const auto dump = plan.to_json(gpt2());
  for (const auto& [module, device] : dump.items()) map.emplace(module, parse_device_name(device.get<std::string>()));
  for (const char* prefix : {"transformer.h", "transformer", ""}) {
    if (!random.chance(70)) continue;
    const auto device = random.device(4);
    map.emplace(prefix, device);
    for (auto it = map.begin(); it != map.end();) {
      const bool below = it->first != prefix && it->first.starts_with(prefix) && it->first != "transformer.h";
      // Only keys whose nearest prefix is this one may go.
      bool nearer = false;
      for (const auto& [other, unused] : map)
        nearer |= other.size() > std::string(prefix).size() && other != it->first && it->first.starts_with(other + ".");
      it = below && !nearer && it->second == device && random.chance(80) ? map.erase(it) : std::next(it);
    }
  }
  spec.modules.assign(map.begin(), map.end());
  for (size_t i = spec.modules.size(); i > 1; --i)
    std::swap(spec.modules[i - 1], spec.modules[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  return spec;
}

TEST(RandomMaps, ComeBackFromTheirDump) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const auto plan = random_plan(random, 1 + random.below(20), 4);
    std::vector<std::string> warnings;
    const auto n_layers = static_cast<int64_t>(plan.layers.size());
    const auto again =
        place_explicitly(parse_device_map(plan.to_json(gpt2()).dump()), gpt2(), n_layers, false, warnings);
    EXPECT_EQ(again, plan);
    EXPECT_EQ(warnings.empty(), plan.is_monotone());
  }
}

TEST(RandomMaps, PrefixesMeanTheSameInAnyOrder) {
  Random random(2);
  for (int round = 0; round < 300; ++round) {
    const auto plan = random_plan(random, 1 + random.below(12), 4);
    std::vector<std::string> warnings;
    const auto spec = shorter(random, plan);
    EXPECT_EQ(place_explicitly(spec, gpt2(), static_cast<int64_t>(plan.layers.size()), false, warnings), plan);
  }
}

TEST(RandomMaps, AMissingModuleOrASplitBlockIsAlwaysRefused) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    const auto plan = random_plan(random, 1 + random.below(12), 4);
    DeviceMapSpec spec;
    spec.kind = Kind::kExplicit;
    const auto dump = plan.to_json(gpt2());
    for (const auto& [module, device] : dump.items())
      spec.modules.emplace_back(module, parse_device_name(device.get<std::string>()));
    std::vector<std::string> warnings;
    const auto n_layers = static_cast<int64_t>(plan.layers.size());
    const auto refused = [&](const DeviceMapSpec& bad, const std::string& named) {
      testing::expect_error(ErrorClass::kInvalidArgument, {named},
                            [&] { (void)place_explicitly(bad, gpt2(), n_layers, false, warnings); });
    };
    auto gap = spec;
    const auto victim = static_cast<size_t>(random.below(static_cast<int64_t>(gap.modules.size())));
    const auto name = gap.modules[victim].first;
    gap.modules.erase(gap.modules.begin() + static_cast<long>(victim));
    refused(gap, name);
    auto split = spec;
    const auto l = random.below(n_layers);
    const auto home = plan.layers[static_cast<size_t>(l)];
    split.modules.emplace_back(gpt2().layer(l) + ".mlp",
                               c10::Device(kSimulated, static_cast<c10::DeviceIndex>((home.index() + 1) % 4)));
    refused(split, "split the block \"" + gpt2().layer(l) + "\"");
  }
}

TEST(RandomText, OnlyErrorsComeOut) {
  Random random(5);
  const std::vector<std::string> seeds = {R"({"": 0, "model.layers.3": "sim:1", "x": 1e999})",
                                          "sim:4",
                                          "cuda:0",
                                          "balanced_low_0",
                                          "0=10GiB,1=20GiB,cpu=30GiB",
                                          "4x24GiB,cpu=64GiB",
                                          "a: 0\nb: [1, {c: d}]\n"};
  int accepted = 0, refused = 0;
  const auto path = (std::filesystem::path(::testing::TempDir()) / "device_map_fuzz.yaml").string();
  for (int round = 0; round < 5000; ++round) {
    std::string text = seeds[static_cast<size_t>(random.below(static_cast<int64_t>(seeds.size())))];
    for (int64_t edits = random.below(4); edits > 0 && !text.empty(); --edits) {
      const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(text.size())));
      switch (random.below(3)) {
        case 0:
          text[at] = static_cast<char>(random.below(256));
          break;
        case 1:
          text.erase(at, 1);
          break;
        default:
          text.insert(at, text.substr(0, static_cast<size_t>(random.below(8))));
          break;
      }
    }
    for (int reader = 0; reader < 4; ++reader) try {
        if (reader == 0 && !text.ends_with(".json") && !text.ends_with(".yaml")) (void)parse_device_map(text);
        if (reader == 1) (void)parse_max_memory(text);
        if (reader == 2) (void)parse_machine(text);
        if (reader == 3 && round % 100 == 0) {
          write_file(path, text);
          (void)parse_device_map(path);
        }
        ++accepted;
      } catch (const Error&) {
        ++refused;
      }
  }
  std::filesystem::remove(path);
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(RandomMachines, EveryPlanIsCompleteAndHonest) {
  Random random(4);
  int fitted = 0, did_not_fit = 0;
  for (int round = 0; round < 1000; ++round) {
    PlanRequest r;
    r.names = gpt2();
    r.model.n_layers = 1 + random.below(16);
    r.model.hidden = 64 * (1 + random.below(8));
    r.model.mlp_width = 4 * r.model.hidden;
    r.model.heads = r.model.kv_heads = 4;
    r.model.head_dim = r.model.hidden / 4;
    r.model.vocab = 100 + random.below(20000);
    r.model.tied = random.chance(50);
    r.model.positions = random.chance(50) ? 512 : 0;
    testing::derive_bytes(r.model);
    if (random.chance(70)) {
      r.work.rows = 1 + random.below(16);
      r.work.tokens = 1 + random.below(64);
      r.work.gradients = random.chance(50);
      r.work.facts = random.below(32);
      r.work.statistics = r.work.solve = random.chance(50);
      r.work.editing_layers = {random.below(r.model.n_layers)};
      r.work.statistics_on_host = random.chance(20);
      r.work.cached_tokens = random.below(500);
    }
    const auto n_devices = static_cast<int>(1 + random.below(6));
    for (int k = 0; k < n_devices; ++k) {
      const int64_t bytes = (1 + random.below(64)) << 20;
      r.machine.push_back({c10::Device(kSimulated, static_cast<c10::DeviceIndex>(k)), "", "", bytes, bytes});
    }
    const int64_t host = random.chance(50) ? 4LL << 30 : 0;
    r.machine.push_back({c10::Device(c10::kCPU), "", "", host, host});
    constexpr std::array kKinds = {Kind::kBalanced, Kind::kBalancedLow0, Kind::kSequential, Kind::kSimulated};
    r.map.kind = kKinds[static_cast<size_t>(random.below(static_cast<int64_t>(kKinds.size())))];
    r.map.simulated = n_devices;
    const auto plan = make_plan(r);
    SCOPED_TRACE(plan.to_text());

    ASSERT_EQ(plan.placement.layers.size(), static_cast<size_t>(r.model.n_layers));
    EXPECT_TRUE(plan.placement.is_monotone()) << "no strategy leaves a device and comes back";
    EXPECT_FALSE(plan.placement.tied_copy);
    EXPECT_TRUE(!r.model.tied || plan.placement.head == plan.placement.embedding);
    int64_t weights = 0;
    bool within = true;
    for (const auto& [device, figures] : plan.devices) {
      weights += figures.weights;
      within = within && figures.total() <= figures.limit;
      EXPECT_TRUE(
          std::any_of(r.machine.begin(), r.machine.end(), [d = device](const auto& m) { return m.device == d; }));
    }
    EXPECT_EQ(weights, testing::total_bytes(r.model)) << "nothing is lost, nothing is there twice";
    EXPECT_EQ(plan.fits, within);
    EXPECT_TRUE(!plan.fits || plan.suggestions.empty());
    for (const auto device : plan.placement.devices()) {
      const bool counted = std::any_of(plan.devices.begin(), plan.devices.end(),
                                       [d = device](const auto& row) { return row.first == d; });
      EXPECT_TRUE(counted || r.model.positions == 0);
    }
    // The map can be fed back, and takes the same bytes.
    PlanRequest again = r;
    again.map = parse_device_map(plan.to_json(r.names)["map"].dump());
    again.names = r.names;
    const auto replanned = make_plan(again);
    EXPECT_EQ(replanned.placement, plan.placement);
    EXPECT_EQ(replanned.fits, plan.fits);
    ++(plan.fits ? fitted : did_not_fit);
  }
  EXPECT_GT(fitted, 100);
  EXPECT_GT(did_not_fit, 100);
}

}  // namespace device_map_property_test
}  // namespace emend::devices
