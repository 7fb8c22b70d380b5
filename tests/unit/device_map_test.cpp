#include <emend/core/atomic_file.h>
#include <emend/devices/device_map.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend::devices {
namespace device_map_test {

using Kind = DeviceMapSpec::Kind;
using testing::expect_error;

c10::Device cuda(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
c10::Device sim(int index) {
  return {kSimulated, static_cast<c10::DeviceIndex>(index)};
}
const c10::Device kCpu(c10::kCPU);

ModuleNames llama() {
  ModuleNames names;
  names.embedding = {"model.embed_tokens"};
  names.layer = [](int64_t l) { return "model.layers." + std::to_string(l); };
  names.final_norm = {"model.norm"};
  names.head = {"lm_head"};
  names.ignored = {"model.rotary_emb"};
  return names;
}

ModuleNames opt() {
  ModuleNames names;
  names.embedding = {"model.decoder.embed_tokens", "model.decoder.project_in"};
  names.position = {"model.decoder.embed_positions"};
  names.layer = [](int64_t l) { return "model.decoder.layers." + std::to_string(l); };
  names.final_norm = {"model.decoder.final_layer_norm", "model.decoder.project_out"};
  names.head = {"lm_head"};
  return names;
}

void expect_refused(const std::string& map, const std::vector<std::string>& parts,
                    ErrorClass error_class = ErrorClass::kInvalidArgument) {
  SCOPED_TRACE(map);
  expect_error(error_class, parts, [&] { (void)parse_device_map(map); });
}

PlacementPlan placed(const std::string& map, const ModuleNames& names, int64_t layers, bool tied,
                     std::vector<std::string>& warnings) {
  return place_explicitly(parse_device_map(map), names, layers, tied, warnings);
}

void expect_misplaced(const std::string& map, const std::string& part, const ModuleNames& names = llama(),
                      int64_t layers = 4) {
  std::vector<std::string> warnings;
  expect_error(ErrorClass::kInvalidArgument, {part}, [&] { (void)placed(map, names, layers, false, warnings); });
}

TEST(DeviceMap, ReadsWordsAndDevices) {
  EXPECT_EQ(parse_device_map("auto").kind, Kind::kBalanced);
  EXPECT_EQ(parse_device_map("balanced").kind, Kind::kBalanced);
  EXPECT_EQ(parse_device_map("balanced_low_0").kind, Kind::kBalancedLow0);
  EXPECT_EQ(parse_device_map("sequential").kind, Kind::kSequential);
  using Modules = decltype(DeviceMapSpec::modules);
  EXPECT_EQ(parse_device_map("cpu").modules, (Modules{{"", kCpu}}));
  EXPECT_EQ(parse_device_map("cuda:1").modules, (Modules{{"", cuda(1)}}));
  EXPECT_EQ(parse_device_map("1").modules, (Modules{{"", cuda(1)}}));
  const auto four = parse_device_map("sim:4");
  EXPECT_EQ(four.kind, Kind::kSimulated);
  EXPECT_EQ(four.named_devices().size(), 4U);
  const auto first = parse_device_map("sim:0");
  EXPECT_EQ(first.kind, Kind::kExplicit);
  EXPECT_EQ(first.named_devices(), std::vector<c10::Device>{sim(0)});
}

TEST(DeviceMap, RefusesOtherWords) {
  expect_refused("balance", {"did you mean \"balanced\"?"});
  expect_refused("cuda:0,1", {"max_memory"});
  expect_refused("disk", {}, ErrorClass::kUnsupported);
  expect_refused("/no/such/map.json", {}, ErrorClass::kNotFound);
  for (const char* text :
       {"", "sim:", "sim:9", "sim:-1", "sim:x", "gpu", "{", "{}", "[]", "{\"a\": 1.5}", "{\"a\": null}"})
    expect_refused(text, {});
  expect_refused(R"({"a": 0, "a": 1})", {"given twice"});
  expect_refused(R"({"a": "sim:9"})", {"sim:7"});
  expect_refused(R"({"a": "sim:0", "b": 0})", {}, ErrorClass::kUnsupported);
  expect_refused(R"({"a": "disk"})", {}, ErrorClass::kUnsupported);
}

TEST(DeviceMap, ReadsFiles) {
  const auto folder = std::filesystem::path(::testing::TempDir());
  write_file(folder / "map_test.json", R"({"model": 0, "lm_head": "cpu"})");
  write_file(folder / "map_test.yaml", "model: 0\nlm_head: cpu\n");
  for (const char* name : {"map_test.json", "map_test.yaml"}) {
    const auto spec = parse_device_map((folder / name).string());
    ASSERT_EQ(spec.modules.size(), 2U) << name;
    EXPECT_EQ(spec.kind, Kind::kExplicit);
    const auto named = spec.named_devices();
    EXPECT_NE(std::find(named.begin(), named.end(), cuda(0)), named.end());
    std::filesystem::remove(folder / name);
  }
  for (const char* text : {"- a\n- b\n", "a: [1]\n", "a: 0\na: 1\n", "a: {b: 0}\n", "a: b: c\n", "", "\t"}) {
    write_file(folder / "map_test.yml", text);
    SCOPED_TRACE(text);
    expect_refused((folder / "map_test.yml").string(), {"map_test.yml"});
  }
  std::filesystem::remove(folder / "map_test.yml");
}

TEST(ExplicitMap, LongestPrefixWins) {
  std::vector<std::string> warnings;
  const auto plan =
      placed(R"({"": 0, "model.layers": 1, "model.layers.3": 2, "lm_head": 2})", llama(), 4, false, warnings);
  EXPECT_EQ(plan.embedding, cuda(0));
  EXPECT_EQ(plan.layers, (std::vector<c10::Device>{cuda(1), cuda(1), cuda(1), cuda(2)}));
  EXPECT_EQ(plan.final_norm, cuda(0));
  EXPECT_EQ(plan.head, cuda(2));
  EXPECT_EQ(warnings.size(), 1U) << "the norm on cuda:0 after layers on cuda:2";
}

TEST(ExplicitMap, ReadsWhatTransformersWrites) {
  std::vector<std::string> warnings;
  const auto plan = placed(R"({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1,
                           "model.layers.3": 1, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1})",
                           llama(), 4, false, warnings);
  EXPECT_TRUE(warnings.empty());
  EXPECT_TRUE(plan.is_monotone());
  EXPECT_EQ(placed(plan.to_json(llama()).dump(), llama(), 4, false, warnings), plan) << "its own dump is accepted back";
}

TEST(ExplicitMap, NumbersMeanWhatTheMapNames) {
  EXPECT_EQ(parse_device_map("sim:2").numbered(), kSimulated);
  EXPECT_EQ(parse_device_map(R"({"": "sim:0", "lm_head": "sim:1"})").numbered(), kSimulated);
  EXPECT_EQ(parse_device_map(R"({"": "cpu", "lm_head": "sim:1"})").numbered(), kSimulated);
  for (const char* map : {"auto", "cpu", "cuda:0", R"({"": "cpu", "lm_head": "cuda:1"})"})
    EXPECT_EQ(parse_device_map(map).numbered(), c10::kCUDA) << map;
}

TEST(ExplicitMap, LayerOneIsNotLayerTen) {
  std::vector<std::string> warnings;
  const auto plan = placed(R"({"": 0, "model.layers.1": 1})", llama(), 12, false, warnings);
  EXPECT_EQ(plan.layers[1], cuda(1));
  EXPECT_EQ(plan.layers[10], cuda(0));
}

TEST(ExplicitMap, RefusesGapsByName) {
  expect_misplaced(R"({"model.embed_tokens": 0, "model.layers.0": 0, "model.norm": 0, "lm_head": 0})",
                   "leaves out model.layers.1, model.layers.2, model.layers.3");
  expect_misplaced(R"({"model.layers": 0})", "leaves out model.embed_tokens, model.norm, lm_head", llama(), 40);
}

TEST(ExplicitMap, RefusesUnknownNames) {
  expect_misplaced(R"({"": 0, "model.layer.3": 1})", "no module \"model.layer.3\"");
  expect_misplaced(R"({"": 0, "model.layer.3": 1})", "did you mean \"model.layers.3\"?");
  expect_misplaced(R"({"": 0, "model.layers.4": 1})", "to \"model.layers.3\"");
  expect_misplaced(R"({"": 0, "transformer.h.0": 1})", "no module");
}

TEST(ExplicitMap, RefusesToSplitABlock) {
  expect_misplaced(R"({"": 0, "model.layers.2.mlp": 1})", "would split the block \"model.layers.2\"");
  expect_misplaced(R"({"model.embed_tokens": 0, "model.layers.0.mlp": 0})", "split the block");
  std::vector<std::string> warnings;
  EXPECT_NO_THROW((void)placed(R"({"": 0, "model.layers.2.mlp": 0})", llama(), 4, false, warnings));
}

TEST(ExplicitMap, TiedHeadGoesWithTheEmbeddingOrBecomesACopy) {
  std::vector<std::string> warnings;
  const auto together =
      placed(R"({"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1})", llama(), 4, true, warnings);
  EXPECT_EQ(together.head, cuda(0));
  EXPECT_FALSE(together.tied_copy);
  EXPECT_TRUE(warnings.empty());
  const auto apart = placed(R"({"model": 0, "lm_head": 1})", llama(), 4, true, warnings);
  EXPECT_TRUE(apart.tied_copy);
  ASSERT_EQ(warnings.size(), 1U);
  testing::expect_parts(warnings[0], {"copy"});
}

TEST(ExplicitMap, PartsOfAPartStayTogether) {
  expect_misplaced(R"({"": 0, "model.decoder.project_in": 1})", "model.decoder.project_in", opt());
  std::vector<std::string> warnings;
  const auto plan = placed(R"({"": 0, "model.decoder.embed_positions": "cpu"})", opt(), 4, false, warnings);
  EXPECT_EQ(plan.position, kCpu);
  EXPECT_EQ(plan.embedding, cuda(0));
}

TEST(ExplicitMap, AllowsLayersThatComeBackWithAWarning) {
  std::vector<std::string> warnings;
  const auto plan = placed(R"({"": "sim:0", "model.layers.1": "sim:1"})", llama(), 4, false, warnings);
  EXPECT_FALSE(plan.is_monotone());
  ASSERT_EQ(warnings.size(), 1U);
  testing::expect_parts(warnings[0], {"come back"});
}

TEST(PrepareDevices, AbsentGpuIsAnErrorThatSaysWhatIsThere) {
  for (const auto& run : std::vector<std::function<void()>>{
           [] { (void)prepare_devices(parse_device_map("cuda:62")); },
           [] { (void)prepare_devices(parse_device_map(R"({"": 62})")); },
           [] { (void)prepare_devices(parse_device_map("auto"), parse_max_memory("62=1GiB")); }})
    expect_error(ErrorClass::kDevice, {"cuda:62 is not visible", "cpu"}, run);
}

TEST(PrepareDevices, CpuNeedsNothing) {
  const auto devices = prepare_devices(parse_device_map("cpu"));
  ASSERT_EQ(devices.size(), 1U);
  EXPECT_TRUE(devices[0].device.is_cpu());
}

}  // namespace device_map_test
}  // namespace emend::devices
