#include <emend/core/atomic_file.h>
#include <emend/devices/planner.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/model_shape.h"

namespace emend::devices {
namespace planner_test {

using Kind = DeviceMapSpec::Kind;

c10::Device sim(int index) {
  return {kSimulated, static_cast<c10::DeviceIndex>(index)};
}
const c10::Device kCpu(c10::kCPU);

/// Llama-2 7B in bfloat16.
ModelShape llama7b() {
  ModelShape m;
  m.n_layers = 32;
  m.hidden = 4096;
  m.mlp_width = 11008;
  m.heads = m.kv_heads = 32;
  m.head_dim = 128;
  m.vocab = 32000;
  m.weight_bytes = m.compute_bytes = 2;
  testing::derive_bytes(m);
  return m;
}

/// A batch of 32 facts edited in five layers, as MEMIT does.
WorkShape memit() {
  WorkShape w;
  w.rows = 32;
  w.tokens = 24;
  w.gradients = true;
  w.first_gradient_layer = 8;
  w.facts = 32;
  w.editing_layers = {4, 5, 6, 7, 8};
  w.statistics = w.solve = true;
  return w;
}

PlanRequest request(const std::string& map, const std::string& machine, WorkShape work = {}) {
  PlanRequest r;
  r.map = parse_device_map(map);
  r.machine = parse_machine(machine);
  r.model = llama7b();
  r.work = std::move(work);
  return r;
}

TEST(ModelShape, DerivesTheBytesOfLlama7b) {
  EXPECT_EQ(testing::total_bytes(llama7b()), 6738415616LL * 2) << "the published number of parameters";
}

TEST(Planner, FollowsAccelerate) {
  const auto recorded = nlohmann::json::parse(
      read_file(std::filesystem::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "accelerate_maps.json"));
  ASSERT_EQ(recorded["magic"], "emend accelerate maps 1");
  int same = 0, spilled = 0;
  for (const auto& row : recorded["rows"]) {
    SCOPED_TRACE(row.dump());
    PlanRequest r;
    r.map.kind = row["strategy"] == "balanced"     ? Kind::kBalanced
                 : row["strategy"] == "sequential" ? Kind::kSequential
                                                   : Kind::kBalancedLow0;
    const auto& bytes = row["bytes"];
    r.model.embedding_bytes = bytes["embedding"];
    r.model.position_bytes = bytes["position"];
    r.model.final_norm_bytes = bytes["norm"];
    r.model.head_bytes = bytes["head"];
    r.model.tied = r.model.head_bytes == 0;
    std::vector<std::string> expected;
    for (const auto& run : row["layers"])
      expected.insert(expected.end(), run[1].get<size_t>(), run[0].get<std::string>());
    r.model.n_layers = static_cast<int64_t>(expected.size());
    r.model.layer_bytes.assign(expected.size(), bytes["layer"]);
    for (int k = 0; k < row["gpus"]; ++k) r.machine.push_back({sim(k), "", "", row["limit"], row["limit"]});
    r.machine.push_back({kCpu, "", "", row["host_limit"], row["host_limit"]});
    const auto plan = make_plan(r);
    EXPECT_TRUE(plan.fits);
    const auto name = [](c10::Device device) {
      return device.is_cpu() ? std::string("cpu") : std::to_string(device.index());
    };
    std::vector<std::string> got;
    for (const auto device : plan.placement.layers) got.push_back(name(device));
    const bool uses_cpu =
        row["norm"] == "cpu" || row["head"] == "cpu" || row["embedding"] == "cpu" || expected.back() == "cpu";
    if (!uses_cpu) {
      EXPECT_EQ(got, expected);
      EXPECT_EQ(name(plan.placement.embedding), row["embedding"]);
      EXPECT_EQ(name(plan.placement.final_norm), row["norm"]);
      EXPECT_EQ(name(plan.placement.head), row["head"]);
      ++same;
    } else {
      // accelerate keeps room on the first GPU for the layers that it carries there; ours compute on the CPU.
      EXPECT_LE(std::count(got.begin(), got.end(), "cpu"), std::count(expected.begin(), expected.end(), "cpu"));
      ++spilled;
    }
  }
  EXPECT_GT(same, 50);
  EXPECT_GT(spilled, 10);
}

TEST(Planner, SimulatedDevicesAreCutEvenly) {
  for (int k = 1; k <= 8; ++k) {
    const auto plan = make_plan(request("sim:" + std::to_string(k), std::to_string(k) + "x80GiB"));
    EXPECT_EQ(plan.placement.devices().size(), static_cast<size_t>(k));
    EXPECT_TRUE(plan.placement.is_monotone());
    EXPECT_TRUE(plan.fits);
    int64_t least = INT64_MAX, most = 0;
    for (const auto& [device, figures] : plan.devices) {
      least = std::min(least, figures.weights);
      most = std::max(most, figures.weights);
    }
    EXPECT_LE(most - least, llama7b().layer_bytes[0] + llama7b().embedding_bytes) << k;
  }
}

TEST(Planner, MoreDevicesThanLayers) {
  auto r = request("sim:6", "6x1GiB");
  r.model.n_layers = 3;
  r.model.hidden = r.model.mlp_width = 8;
  testing::derive_bytes(r.model);
  auto plan = make_plan(r);
  EXPECT_EQ(plan.placement.devices().size(), 5U) << "embedding, three layers, head";
  ASSERT_EQ(plan.warnings.size(), 1U);
  EXPECT_NE(plan.warnings[0].find("only 5 of 6"), std::string::npos);
  r.model.tied = true;
  testing::derive_bytes(r.model);
  plan = make_plan(r);
  EXPECT_EQ(plan.placement.head, plan.placement.embedding);
  EXPECT_EQ(plan.placement.devices().size(), 4U);
}

TEST(Planner, UnevenLimitsGetAnUnevenCut) {
  auto r = request("sim:2", "2x80GiB");
  r.max_memory = parse_max_memory("0=4GiB,1=20GiB", kSimulated);
  const auto plan = make_plan(r);
  EXPECT_TRUE(plan.fits);
  EXPECT_LT(plan.devices[0].second.total(), 4LL << 30);
  EXPECT_EQ(plan.warnings.size(), 1U);
}

TEST(Planner, AllFiguresOfAMemitRun) {
  const auto plan = make_plan(request("sim:2", "2x24GiB", memit()));
  ASSERT_EQ(plan.devices.size(), 2U);
  const auto& first = plan.devices[0].second;
  const auto& second = plan.devices[1].second;
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(first.weights + second.weights, testing::total_bytes(llama7b()));
  EXPECT_EQ(first.statistics, 5LL * 11008 * 11008 * 8);
  EXPECT_EQ(first.solve, (2LL * 11008 * 11008 + 2LL * 11008 * 32 + 4096LL * 32) * 8);
  EXPECT_EQ(second.statistics, 0);
  EXPECT_EQ(second.solve, 0);
  EXPECT_EQ(first.optimiser, 4LL * 32 * 4096 * 4);
  EXPECT_GT(second.activations, first.activations) << "gradients start at layer 8, and the head is there";
  EXPECT_EQ(first.limit, 24LL << 30);
}

TEST(Planner, TheCopyThatComputesIsCounted) {
  auto work = memit();
  const auto plain = make_plan(request("sim:1", "1x80GiB", work)).devices[0].second;
  work.copy_bytes = 2;
  auto r = request("sim:1", "1x80GiB", work);
  r.model.weight_bytes = r.model.compute_bytes = 4;
  testing::derive_bytes(r.model);
  const auto figures = make_plan(r).devices[0].second;
  int64_t copied = r.model.head_bytes;
  for (int64_t l = work.first_gradient_layer; l < r.model.n_layers; ++l) copied += r.model.layer_bytes[l];
  EXPECT_EQ(figures.weights, testing::total_bytes(r.model) + copied / 2);
  EXPECT_LE(figures.activations, plain.activations * 2) << "what carries gradients stays two bytes wide";
  // Of the whole model, also while nothing has gradients; of a tied head and its embedding there is one.
  r.work.copies_all = true;
  for (const bool gradients : {true, false}) {
    r.work.gradients = gradients;
    const int64_t whole = testing::total_bytes(r.model);
    EXPECT_EQ(make_plan(r).devices[0].second.weights, whole + (whole - r.model.final_norm_bytes) / 2);
  }
  r.model.tied = true;
  testing::derive_bytes(r.model);
  const int64_t whole = testing::total_bytes(r.model);
  EXPECT_EQ(make_plan(r).devices[0].second.weights, whole + (whole - r.model.final_norm_bytes) / 2);
}

TEST(Planner, KvCacheAndPositionsAreCounted) {
  auto r = request("sim:1", "1x80GiB");
  r.model.positions = 1024;
  testing::derive_bytes(r.model);
  r.work.cached_tokens = 1000;
  const auto plan = make_plan(r);
  EXPECT_EQ(plan.devices[0].second.kv_cache, 32LL * 2 * 1000 * 32 * 128 * 2);
  EXPECT_EQ(plan.devices[0].second.weights, testing::total_bytes(llama7b()) + 1024LL * 4096 * 2);
}

// While targets are optimised, beginnings are kept in the layers that every step passes, as wide as it computes.
TEST(Planner, BeginningsAreKeptInTheGradientsLayers) {
  auto r = request("sim:1", "1x200GiB", memit());
  r.work.cached_tokens = 1000;
  EXPECT_EQ(make_plan(r).devices[0].second.kv_cache, 24LL * 2 * 1000 * 32 * 128 * 2);
  r.model.weight_bytes = r.model.compute_bytes = 4;
  testing::derive_bytes(r.model);
  EXPECT_EQ(make_plan(r).devices[0].second.kv_cache, 24LL * 2 * 1000 * 32 * 128 * 4);
  r.work.copy_bytes = 2;
  EXPECT_EQ(make_plan(r).devices[0].second.kv_cache, 24LL * 2 * 1000 * 32 * 128 * 2);
}

// A machine that is not here has GPUs: what a real one keeps for CUDA, theirs do too.
TEST(Planner, ImaginedDevicesAreGpus) {
  auto r = request("auto", "1x80GiB,cpu=64GiB");
  EXPECT_EQ(make_plan(r).devices[0].second.reserved, 0) << "a simulated device of this machine";
  r.imagined = true;
  const auto figures = make_plan(r).devices[0].second;
  EXPECT_EQ(figures.reserved, kCudaReserve);
  EXPECT_EQ(figures.limit, (80LL << 30) / 10 * 9) << "accelerate's margin for a single card";
  r.machine = parse_machine("2x80GiB");
  for (const auto& [device, each] : make_plan(r).devices) {
    EXPECT_EQ(each.reserved, kCudaReserve);
    EXPECT_EQ(each.limit, 80LL << 30);
  }
}

TEST(Planner, AMapOfSimulatedDevicesUsesAsManyAsItSays) {
  EXPECT_EQ(make_plan(request("sim:2", "4x24GiB")).placement.devices(), (std::vector<c10::Device>{sim(0), sim(1)}));
  auto r = request("sim:2", "4x24GiB");
  r.max_memory = parse_max_memory("0=4GiB,1=20GiB,2=20GiB,3=20GiB", kSimulated);  // an even cut does not fit
  EXPECT_EQ(make_plan(r).placement.devices(), (std::vector<c10::Device>{sim(0), sim(1)}));
}

TEST(Planner, StatisticsOnTheHost) {
  auto work = memit();
  work.statistics_on_host = true;
  const auto plan = make_plan(request("sim:2", "2x24GiB,cpu=64GiB", work));
  ASSERT_EQ(plan.devices.size(), 3U);
  EXPECT_EQ(plan.devices[0].second.statistics, 0);
  EXPECT_TRUE(plan.devices[2].first.is_cpu());
  EXPECT_EQ(plan.devices[2].second.statistics, 5LL * 11008 * 11008 * 8);
  EXPECT_GT(plan.devices[2].second.solve, 0);
}

TEST(Planner, LayersThatDoNotFitComputeOnTheCpu) {
  const auto plan = make_plan(request("auto", "1x8GiB,cpu=64GiB"));
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(plan.placement.layers.front(), sim(0));
  EXPECT_EQ(plan.placement.layers.back(), kCpu);
  ASSERT_EQ(plan.warnings.size(), 1U);
  EXPECT_NE(plan.warnings[0].find("compute on the CPU"), std::string::npos);
}

TEST(Planner, WithoutAcceleratorsEverythingIsOnTheCpu) {
  auto r = request("auto", "cpu=64GiB");
  EXPECT_TRUE(make_plan(r).placement.devices().size() == 1);
  EXPECT_TRUE(make_plan(r).warnings.empty());
}

TEST(Planner, ListedMemoryMeansOthersAreNotUsed) {
  auto r = request("auto", "4x24GiB,cpu=64GiB");
  r.max_memory = parse_max_memory("1=24GiB,2=24GiB", kSimulated);
  const auto plan = make_plan(r);
  EXPECT_EQ(plan.placement.devices(), (std::vector<c10::Device>{sim(1), sim(2)}));
}

TEST(Planner, LimitsOfDevicesThatAreNotThereAreRefused) {
  auto r = request("auto", "2x24GiB,cpu=64GiB");
  r.max_memory = parse_max_memory("5=24GiB", kSimulated);
  r.imagined = true;
  EXPECT_THROW((void)make_plan(r), Error);
}

// prepare_devices refuses those that are not here, and gives the planner those that the map uses.
TEST(Planner, LimitsOfDevicesThatAreNotUsedArePassedOver) {
  auto r = request("{\"\": \"sim:1\"}", "cpu=64GiB");
  r.machine.insert(r.machine.begin(), DeviceInfo{sim(1), "", "", 80LL << 30, 80LL << 30});
  r.max_memory = parse_max_memory("0=1GiB,1=20GiB", kSimulated);
  const auto plan = make_plan(r);
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(plan.devices[0].second.limit, 20LL << 30);
}

TEST(Planner, SuggestsWhatWouldFit) {
  auto work = memit();
  work.rows = 4096;
  auto plan = make_plan(request("sim:2", "2x24GiB,cpu=64GiB", work));
  EXPECT_FALSE(plan.fits);
  const auto has = [&plan](const std::string& part) {
    return std::any_of(plan.suggestions.begin(), plan.suggestions.end(),
                       [&](const auto& s) { return s.find(part) != std::string::npos; });
  };
  EXPECT_TRUE(has("rows fits")) << plan.to_text();
  plan = make_plan(request("sim:1", "1x10GiB", memit()));
  EXPECT_FALSE(plan.fits);
  EXPECT_TRUE(has("more device")) << plan.to_text();
  testing::expect_error(ErrorClass::kDevice, {"sim:0 needs"}, [&] { require_fit(plan); });
}

TEST(Planner, ASuggestedBatchReallyFits) {
  auto work = memit();
  work.rows = 4096;
  auto r = request("sim:2", "2x24GiB,cpu=64GiB", work);
  const auto plan = make_plan(r);
  ASSERT_FALSE(plan.suggestions.empty());
  ASSERT_EQ(std::sscanf(plan.suggestions[0].c_str(), "a batch of %ld rows fits", &r.work.rows), 1)
      << plan.suggestions[0];
  EXPECT_TRUE(make_plan(r).fits);
  r.work.rows *= 2;
  EXPECT_FALSE(make_plan(r).fits);
}

TEST(Planner, JsonHasTheContractsFields) {
  const auto json = make_plan(request("sim:2", "2x24GiB", memit())).to_json();
  for (const char* field : {"weights", "activations", "statistics", "solve", "kv_cache", "total", "limit"})
    EXPECT_TRUE(json["devices"]["sim:0"].contains(field)) << field;
  EXPECT_TRUE(json["fits"].get<bool>());
  EXPECT_EQ(json["map"]["layers.0"], "sim:0");
  EXPECT_EQ(json["map"]["head"], "sim:1");
}

TEST(Planner, RefusesNonsense) {
  auto r = request("sim:1", "1x24GiB");
  r.work.rows = -1;
  EXPECT_THROW((void)make_plan(r), Error);
  r.work.rows = 0;
  r.work.editing_layers = {32};
  EXPECT_THROW((void)make_plan(r), Error);
  r.work.editing_layers = {};
  r.model.layer_bytes.pop_back();
  EXPECT_THROW((void)make_plan(r), Error);
  EXPECT_THROW((void)make_plan(request("cuda:0", "2x24GiB")), Error) << "the machine has no cuda:0";
}

TEST(ParseMachine, ReadsGroups) {
  const auto machine = parse_machine("2x80GiB,1x24GB,cpu=64GiB");
  ASSERT_EQ(machine.size(), 4U);
  EXPECT_EQ(machine[1].free_bytes, 80LL << 30);
  EXPECT_EQ(machine[2].device, sim(2));
  EXPECT_EQ(machine[2].free_bytes, 24'000'000'000LL);
  EXPECT_TRUE(machine[3].device.is_cpu());
  EXPECT_EQ(parse_machine("16x80GiB")[15].device, c10::Device(kSimulated, 15));
  for (const char* text :
       {"", "x", "4", "4x", "0x1GiB", "-1x1GiB", "4x24Gb", "4x24", "65x1GiB", "cpu=", "4 x 24GiB", "4x24GiB,"})
    EXPECT_THROW((void)parse_machine(text), Error) << text;
}

}  // namespace planner_test
}  // namespace emend::devices
