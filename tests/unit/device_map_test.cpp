#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/devices/device_map.h>
#include <gtest/gtest.h>

namespace emend::devices {
namespace device_map_test {

using Kind = DeviceMapSpec::Kind;

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

Error error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return {ErrorClass::kIo, ""};
}

std::string explicit_error(const std::string& json, const ModuleNames& names = llama(), int64_t layers = 4,
                           bool tied = false) {
  std::vector<std::string> warnings;
  const auto error = error_of([&] { (void)place_explicitly(parse_device_map(json), names, layers, tied, warnings); });
  EXPECT_EQ(error.error_class(), ErrorClass::kInvalidArgument);
  return error.what();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(DeviceMap, ReadsWordsAndDevices) {
  EXPECT_EQ(parse_device_map("auto").kind, Kind::kAuto);
  EXPECT_EQ(parse_device_map("balanced").kind, Kind::kBalanced);
  EXPECT_EQ(parse_device_map("balanced_low_0").kind, Kind::kBalancedLow0);
  EXPECT_EQ(parse_device_map("sequential").kind, Kind::kSequential);
  EXPECT_EQ(parse_device_map("cpu").device, kCpu);
  EXPECT_EQ(parse_device_map("cuda:1").device, cuda(1));
  EXPECT_EQ(parse_device_map("1").device, cuda(1));
  const auto four = parse_device_map("sim:4");
  EXPECT_EQ(four.kind, Kind::kSimulated);
  EXPECT_EQ(four.named_devices().size(), 4U);
  const auto first = parse_device_map("sim:0");
  EXPECT_EQ(first.kind, Kind::kSingle);
  EXPECT_EQ(first.named_devices(), std::vector<c10::Device>{sim(0)});
}

TEST(DeviceMap, RefusesOtherWords) {
  EXPECT_TRUE(has(error_of([] { (void)parse_device_map("balance"); }).what(), "did you mean \"balanced\"?"));
  EXPECT_TRUE(has(error_of([] { (void)parse_device_map("cuda:0,1"); }).what(), "max_memory"));
  EXPECT_EQ(error_of([] { (void)parse_device_map("disk"); }).error_class(), ErrorClass::kUnsupported);
  EXPECT_EQ(error_of([] { (void)parse_device_map("/no/such/map.json"); }).error_class(), ErrorClass::kNotFound);
  for (const char* text :
       {"", "sim:", "sim:9", "sim:-1", "sim:x", "gpu", "{", "{}", "[]", "{\"a\": 1.5}", "{\"a\": null}"})
    EXPECT_EQ(error_of([&] { (void)parse_device_map(text); }).error_class(), ErrorClass::kInvalidArgument) << text;
  EXPECT_TRUE(has(error_of([] { (void)parse_device_map(R"({"a": 0, "a": 1})"); }).what(), "given twice"));
  EXPECT_TRUE(has(error_of([] { (void)parse_device_map(R"({"a": "sim:9"})"); }).what(), "sim:7"));
  EXPECT_EQ(error_of([] { (void)parse_device_map(R"({"a": "sim:0", "b": 0})"); }).error_class(),
            ErrorClass::kUnsupported);
  EXPECT_EQ(error_of([] { (void)parse_device_map(R"({"a": "disk"})"); }).error_class(), ErrorClass::kUnsupported);
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
    const auto error = error_of([&] { (void)parse_device_map((folder / "map_test.yml").string()); });
    EXPECT_EQ(error.error_class(), ErrorClass::kInvalidArgument) << text;
    EXPECT_TRUE(has(error.what(), "map_test.yml")) << error.what();
  }
  std::filesystem::remove(folder / "map_test.yml");
}

TEST(ExplicitMap, LongestPrefixWins) {
  std::vector<std::string> warnings;
  const auto plan =
      place_explicitly(parse_device_map(R"({"": 0, "model.layers": 1, "model.layers.3": 2, "lm_head": 2})"), llama(), 4,
                       false, warnings);
  EXPECT_EQ(plan.embedding, cuda(0));
  EXPECT_EQ(plan.layers, (std::vector<c10::Device>{cuda(1), cuda(1), cuda(1), cuda(2)}));
  EXPECT_EQ(plan.final_norm, cuda(0));
  EXPECT_EQ(plan.head, cuda(2));
  EXPECT_EQ(warnings.size(), 1U) << "the norm on cuda:0 after layers on cuda:2";
}

TEST(ExplicitMap, ReadsWhatTransformersWrites) {
  std::vector<std::string> warnings;
  const auto plan = place_explicitly(
      parse_device_map(R"({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1,
                           "model.layers.3": 1, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1})"),
      llama(), 4, false, warnings);
  EXPECT_TRUE(warnings.empty());
  EXPECT_TRUE(plan.is_monotone());
  auto again = parse_device_map(plan.to_json(llama()).dump());
  EXPECT_EQ(place_explicitly(again, llama(), 4, false, warnings), plan) << "its own dump is accepted back";
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
  const auto plan = place_explicitly(parse_device_map(R"({"": 0, "model.layers.1": 1})"), llama(), 12, false, warnings);
  EXPECT_EQ(plan.layers[1], cuda(1));
  EXPECT_EQ(plan.layers[10], cuda(0));
}

TEST(ExplicitMap, RefusesGapsByName) {
  const auto text = explicit_error(R"({"model.embed_tokens": 0, "model.layers.0": 0, "model.norm": 0, "lm_head": 0})");
  EXPECT_TRUE(has(text, "leaves out model.layers.1, model.layers.2, model.layers.3")) << text;
  EXPECT_TRUE(
      has(explicit_error(R"({"model.layers": 0})", llama(), 40), "leaves out model.embed_tokens, model.norm, lm_head"));
}

TEST(ExplicitMap, RefusesUnknownNames) {
  EXPECT_TRUE(has(explicit_error(R"({"": 0, "model.layer.3": 1})"), "no module \"model.layer.3\""));
  EXPECT_TRUE(has(explicit_error(R"({"": 0, "model.layer.3": 1})"), "did you mean \"model.layers.3\"?"));
  EXPECT_TRUE(has(explicit_error(R"({"": 0, "model.layers.4": 1})"), "to \"model.layers.3\""));
  EXPECT_TRUE(has(explicit_error(R"({"": 0, "transformer.h.0": 1})"), "no module"));
}

TEST(ExplicitMap, RefusesToSplitABlock) {
  const auto text = explicit_error(R"({"": 0, "model.layers.2.mlp": 1})");
  EXPECT_TRUE(has(text, "would split the block \"model.layers.2\"")) << text;
  EXPECT_TRUE(has(explicit_error(R"({"model.embed_tokens": 0, "model.layers.0.mlp": 0})"), "split the block"));
  std::vector<std::string> warnings;
  EXPECT_NO_THROW(
      (void)place_explicitly(parse_device_map(R"({"": 0, "model.layers.2.mlp": 0})"), llama(), 4, false, warnings));
}

TEST(ExplicitMap, TiedHeadGoesWithTheEmbeddingOrBecomesACopy) {
  std::vector<std::string> warnings;
  const auto together = place_explicitly(
      parse_device_map(R"({"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1})"), llama(), 4, true, warnings);
  EXPECT_EQ(together.head, cuda(0));
  EXPECT_FALSE(together.tied_copy);
  EXPECT_TRUE(warnings.empty());
  const auto apart = place_explicitly(parse_device_map(R"({"model": 0, "lm_head": 1})"), llama(), 4, true, warnings);
  EXPECT_TRUE(apart.tied_copy);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_TRUE(has(warnings[0], "copy"));
}

TEST(ExplicitMap, PartsOfAPartStayTogether) {
  EXPECT_TRUE(has(explicit_error(R"({"": 0, "model.decoder.project_in": 1})", opt()), "model.decoder.project_in"));
  std::vector<std::string> warnings;
  const auto plan = place_explicitly(parse_device_map(R"({"": 0, "model.decoder.embed_positions": "cpu"})"), opt(), 4,
                                     false, warnings);
  EXPECT_EQ(plan.position, kCpu);
  EXPECT_EQ(plan.embedding, cuda(0));
}

TEST(ExplicitMap, AllowsLayersThatComeBackWithAWarning) {
  std::vector<std::string> warnings;
  const auto plan =
      place_explicitly(parse_device_map(R"({"": "sim:0", "model.layers.1": "sim:1"})"), llama(), 4, false, warnings);
  EXPECT_FALSE(plan.is_monotone());
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_TRUE(has(warnings[0], "come back"));
}

TEST(PrepareDevices, AbsentGpuIsAnErrorThatSaysWhatIsThere) {
  for (const auto& run : std::vector<std::function<void()>>{
           [] { (void)prepare_devices(parse_device_map("cuda:62")); },
           [] { (void)prepare_devices(parse_device_map(R"({"": 62})")); },
           [] { (void)prepare_devices(parse_device_map("auto"), parse_max_memory("62=1GiB")); }}) {
    const auto error = error_of(run);
    EXPECT_EQ(error.error_class(), ErrorClass::kDevice);
    EXPECT_TRUE(has(error.what(), "cuda:62 is not visible")) << error.what();
    EXPECT_TRUE(has(error.what(), "cpu")) << error.what();
  }
}

TEST(PrepareDevices, CpuNeedsNothing) {
  const auto devices = prepare_devices(parse_device_map("cpu"));
  ASSERT_EQ(devices.size(), 1U);
  EXPECT_TRUE(devices[0].device.is_cpu());
}

}  // namespace device_map_test
}  // namespace emend::devices
