// The programs with a model split over simulated devices: the same results as on one device, what it costs, and what
// happens when a device is too small.
#include <ATen/Context.h>
#include <dlfcn.h>
#include <emend/core/safetensors.h>
#include <sys/resource.h>

#include <iostream>
#include <map>
#include <set>

#include "support/program_fixture.h"

namespace emend::testing {
namespace split_program_test {

class SplitProgram : public ProgramTest {
 protected:
  /// As ProgramTest::edit, in a run folder of its own.
  [[nodiscard]] std::vector<std::string> edit_on(const std::string& map, const std::string& out,
                                                 std::vector<std::string> more = {}) const {
    more.insert(more.end(), {"--out", path(out), "--device-map", map});
    return edit(more);
  }
  /// Largest relative difference of the tensors of two runs' packs; 0 if they are equal in every byte.
  [[nodiscard]] double pack_difference(const std::string& one, const std::string& other) const {
    const SafetensorsFile a(folder_ / one / "edit.safetensors"), b(folder_ / other / "edit.safetensors");
    double most = 0;
    EXPECT_EQ(a.tensors().size(), b.tensors().size());
    for (const auto& [name, info] : a.tensors()) {
      const at::Tensor x = a.tensor(name).to(at::kDouble), y = b.tensor(name).to(at::kDouble);
      most = std::max(most, (x - y).norm().item<double>() / x.norm().item<double>());
    }
    std::cout << other << " against " << one << ": packs differ by " << most << " of their norm\n";
    return most;
  }
  /// Bytes of all files below a folder, by relative path.
  [[nodiscard]] std::map<std::string, std::string> files(const std::string& folder,
                                                         const std::string& extension) const {
    std::map<std::string, std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / folder))
      if (entry.is_regular_file() && entry.path().extension() == extension)
        found[entry.path().lexically_relative(folder_ / folder)] = read_file(entry.path());
    return found;
  }
};

TEST_F(SplitProgram, EditedOnThreeDevicesThePackIsTheSame) {
  for (const std::string editor : {"memit", "rome"}) {
    const std::string hparams = path(editor == "rome" ? "rome.yaml" : "hparams.yaml");
    for (const std::string map : {"cpu", "sim:3"})
      must_run("memit_edit",
               edit_on(map, editor + map,
                       {"--editor", editor, "--hparams", hparams, "--cache", path("cache-" + editor + map)}));
    EXPECT_LE(pack_difference(editor + "cpu", editor + "sim:3"), 1e-6) << editor;
    auto one = results(editor + "cpu"), three = results(editor + "sim:3");
    for (const char* key : {"neighborhood_kl", "neutral_kl"}) {  // numbers of float32, not counts
      auto &a = one["metrics"]["free"]["post"], &b = three["metrics"]["free"]["post"];
      EXPECT_NEAR(a.at(key).get<double>(), b.at(key).get<double>(), 1e-5 * a.at(key).get<double>());
      for (auto* figures : {&a, &b}) {
        figures->erase(key);
        for (const char* more : {"ci95", "std"}) figures->at(more).erase(key);
      }
    }
    EXPECT_EQ(three["metrics"], one["metrics"]);
    std::set<std::string> devices;
    for (const auto& [module, device] : three["device_map"].items()) devices.insert(device);
    EXPECT_EQ(devices, (std::set<std::string>{"sim:0", "sim:1", "sim:2"}));
    for (const auto& device : devices) EXPECT_GT(three["peak_bytes"][device], 0) << device;
    // What is sampled or scored comes to the host a row at a time; weights never travel.
    for (const auto& row : three["transfers"]) EXPECT_NE(row["purpose"], "weight") << row;
  }
  EXPECT_EQ(files("cache-memitsim:3/statistics", ".safetensors"), files("cache-memitcpu/statistics", ".safetensors"))
      << "the statistics that the run collected";
}

TEST_F(SplitProgram, EveryOtherProgramGivesTheSame) {
  must_run("memit_edit", edit_on("cpu", "run"));
  const std::string pack = path("run/edit.safetensors");
  const std::vector<std::vector<std::string>> commands = {
      {"generate", "--prompt", "The Eiffel Tower", "--max-new-tokens", "40"},
      {"generate", "--prompt", "France", "--pack", pack, "--temperature", "0.8", "--seed", "5"},
      {"eval", "--facts", path("facts.jsonl"), "--pack", pack, "--json", "--cache", path("evaluations")},
  };
  for (auto command : commands) {
    std::map<std::string, std::string> out;
    for (const std::string map : {"cpu", "sim:3", "sim:2"}) {
      auto arguments = command;
      arguments.insert(arguments.end(), {"--model", path("model"), "--device-map", map});
      if (command[0] == "eval") arguments[7] = path("evaluations-" + map);  // nothing from a cache
      out[map] = must_run("emend", arguments).out;
      EXPECT_FALSE(out[map].empty());
    }
    EXPECT_EQ(out["sim:3"], out["cpu"]) << command[0];
    EXPECT_EQ(out["sim:2"], out["cpu"]) << command[0];
  }
  std::map<std::string, std::string> talk;
  for (const std::string map : {"cpu", "sim:3"}) {
    must_run("emend", {"stats", "--model", path("model"), "--corpus", path("corpus.txt"), "--layers", "0,1,2,3",
                       "--cache", path("cache-" + map), "--device-map", map});
    talk[map] = must_run("/bin/sh", {"-c", "printf 'Hello there\\nAnd again\\n' | '" + program_path("emend").string() +
                                               "' chat --quiet --model '" + path("model") + "' --device-map " + map +
                                               " --chat-format instruction --max-new-tokens 24"})
                    .out;
  }
  EXPECT_EQ(talk["sim:3"], talk["cpu"]);
  EXPECT_FALSE(talk["cpu"].empty());
  const auto statistics = files("cache-sim:3", ".safetensors");
  EXPECT_EQ(statistics.size(), 4U) << "one file a layer";
  EXPECT_EQ(statistics, files("cache-cpu", ".safetensors"));
  const auto doctor = nlohmann::json::parse(
      must_run("emend", {"doctor", "--model", path("model"), "--device-map", "sim:3", "--json"}).out);
  EXPECT_EQ(doctor["well"], true);
  int pairs = 0;
  for (const auto& check : doctor["checks"])
    pairs += check["name"].get<std::string>().find(" -> ") != std::string::npos;
  EXPECT_EQ(pairs, 12) << "every ordered pair of three devices and the host";
}

// Loading refuses them before any work; the doctor names all of them.
TEST_F(SplitProgram, WeightsThatAreNotFiniteAreNamed) {
  std::filesystem::copy(path("model"), path("sick"), std::filesystem::copy_options::recursive);
  const SafetensorsFile whole(folder_ / "model" / "model.safetensors");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, info] : whole.tensors()) tensors.emplace_back(name, whole.tensor(name).clone());
  for (const size_t i : {1, 3}) tensors[i].second.view(-1)[0] = i == 1 ? NAN : INFINITY;
  write_safetensors(folder_ / "sick" / "model.safetensors", tensors, {{"format", "pt"}});
  const auto sick = run_program("emend", {"doctor", "--model", path("sick"), "--device-map", "cpu"});
  EXPECT_EQ(sick.status, 3) << sick.err;  // the model, not the machine
  EXPECT_NE(sick.out.find("failed  weights: 2 tensors hold values that are not finite: " + tensors[1].first + ", " +
                          tensors[3].first),
            std::string::npos)
      << sick.out;
  const auto well = must_run("emend", {"doctor", "--model", path("model"), "--device-map", "cpu"});
  EXPECT_NE(well.out.find(std::to_string(tensors.size()) + " tensors, all finite"), std::string::npos) << well.out;
  auto arguments = edit_on("cpu", "run");
  std::ranges::replace(arguments, path("model"), path("sick"));
  expect_error(arguments, 3, {"holds values that are not finite", "model.safetensors"});
}

// What a stranger runs first on a new machine: no model. One device has little memory left; the rest is told all the
// same.
TEST_F(SplitProgram, TheWholeMachineIsChecked) {
  const auto text = must_run("emend", {"doctor", "--full", "--device-map", "sim:3", "--quiet", "--max-memory",
                                       "sim:0=1GiB,sim:1=1GiB,sim:2=7MiB"})
                        .out;
  expect_parts(text, {"ok  copies: 12 of 12 arrive whole", "ok  edits on the CPU: 9 of 9", "on one device: 27 of 27",
                      "on two devices: 27 of 27", "on the CPU and a device: 27 of 27", "on all devices: 9 of 9",
                      "all is well", "GFLOP/s", "skipped  time: attention, float32: ", "out of memory on sim:2"});
  const auto document =
      nlohmann::json::parse(must_run("emend", {"doctor", "--full", "--device-map", "sim:2", "--json", "--quiet"}).out);
  EXPECT_EQ(document["ok"], true);
  EXPECT_EQ(document["devices"].size(), 3U);
  EXPECT_GT(document["timings"].size(), 20U);
  int split = 0, copies = 0;
  for (const auto& check : document["checks"]) {
    for (const char* key : {"name", "device", "status", "value", "limit", "reason"})
      ASSERT_TRUE(check.contains(key)) << check;
    EXPECT_NE(check["status"], "failed") << check;
    if (check["name"].get<std::string>().starts_with("edit ")) {
      EXPECT_LE(check["value"], check["limit"]) << check;
    }
    split += check["device"] == "sim:0+sim:1";
    copies += check["device"] == "sim:0 -> sim:1";
  }
  EXPECT_EQ(split, 9) << "three editors in three dtypes";
  EXPECT_EQ(copies, 1);
}

// A driver that shows a GPU which LibTorch cannot use is something wrong; a machine without a driver is not.
TEST_F(SplitProgram, AGpuThatCannotBeUsedIsSomethingWrong) {
  ProgramOptions options;
  options.environment = {{"LD_LIBRARY_PATH", EMEND_BINARY_DIR "/tests/fake_driver"}, {"CUDA_VISIBLE_DEVICES", ""}};
  const auto result = run_program("emend", {"doctor", "--full", "--json", "--quiet"}, options);
  EXPECT_EQ(result.status, 5) << result.err;
  const auto document = nlohmann::json::parse(result.out);
  EXPECT_EQ(document["ok"], false);
  EXPECT_EQ(document["checks"][0]["status"], "failed");
  EXPECT_GT(document["checks"][0]["reason"].get<std::string>().size(), 20U);
  const auto alone = run_program("emend", {"doctor", "--full", "--json", "--quiet", "--device-map", "cpu"});
  EXPECT_EQ(alone.status, 0) << alone.out;
}

// The kit for machines with GPUs runs here on the CPU.
TEST_F(SplitProgram, TheProofKitIsSmallAndRuns) {
  const auto kit = path("kit.tar.xz"), out = path("proof");
  Dl_info info{};
  ASSERT_NE(dladdr(reinterpret_cast<const void*>(&at::globalContext), &info), 0);
  const auto libtorch = std::filesystem::path(info.dli_fname).parent_path().parent_path().string();
  must_run("/usr/bin/env", {"python3", EMEND_SOURCE_DIR "/tools/gpu-proof", "pack", kit, "--build", EMEND_BINARY_DIR});
  EXPECT_LT(std::filesystem::file_size(kit), 60U << 20);
  must_run("/usr/bin/env", {"python3", "-m", "tarfile", "-e", kit, path(".")});
  must_run("/usr/bin/env", {"python3", path("emend-proof/run-proof"), "--small", "--out", out, "--libtorch", libtorch});
  const auto proof = nlohmann::json::parse(read_file(out + "/proof.json"));
  EXPECT_EQ(proof["ok"], true);
  EXPECT_EQ(proof["complete"], true);
  std::set<std::string> steps;
  for (const auto& step : proof["steps"]) steps.insert(step["name"]);
  for (const char* step :
       {"doctor", "rome-same", "memit-same", "bench-smollm2-135m", "edit-smollm2-135m", "long-smollm2-135m"})
    EXPECT_TRUE(steps.contains(step)) << step;
  const auto page = read_file(out + "/proof.html");
  EXPECT_NE(page.find("memit on two devices, relative difference"), std::string::npos);
  EXPECT_EQ(page.find("://"), std::string::npos) << "nothing from elsewhere";
}

// Its devices are GPUs, as many as the map says, by the names that a real machine's have.
TEST_F(SplitProgram, AMachineThatIsNotHereIsPlanned) {
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--model", path("model"), "--simulate", "4x24GiB", "--json", "--quiet"});
    return nlohmann::json::parse(must_run("emend", more).out);
  };
  const auto two = plan({"--device-map", "sim:2", "--layers", "2,0"});
  EXPECT_EQ(two["devices"].size(), 2U) << two;
  int64_t cached = 0;
  for (const auto& [device, figures] : two["devices"].items()) {
    EXPECT_EQ(figures["reserved"], 512 << 20) << device;
    cached += figures["kv_cache"].get<int64_t>();
  }
  EXPECT_EQ(cached, 2 * 112 * 32 * 2 * 8 * 4) << "keys and values of layer 3, behind the last that is edited";
  write_file(folder_ / "map.json", R"({"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": 0})");
  const auto mapped = plan({"--device-map", path("map.json"), "--max-memory", "0=20GiB,cuda:1=1GiB"});
  EXPECT_EQ(mapped["devices"]["sim:1"]["limit"], 1 << 30) << mapped;
}

TEST_F(SplitProgram, ADeviceTooSmallForTheWeightsIsRefusedBeforeLoading) {
  expect_error(edit_on("sim:2", "run", {"--max-memory", "sim:0=40KiB,sim:1=40KiB"}), 5,
               {"sim:0 needs", "sim:1 needs", "and has 40.0 KiB", "--max-memory sim:0="});
  // What is suggested is taken, until weights and work fit.
  std::string limits = "sim:0=40KiB,sim:1=40KiB", err;
  std::vector<std::string> more = {"--dry-run"};
  for (int tries = 0; tries < 5 && err.find("loaded llama") == std::string::npos; ++tries) {
    more.insert(more.end(), {"--max-memory", limits});
    err = run_program("memit_edit", edit_on("sim:2", "run", more)).err;
    if (err.find("--batch-size 1 fits") != std::string::npos) more.insert(more.end(), {"--batch-size", "1"});
    const auto begin = err.find("--max-memory sim:0=");
    if (begin != std::string::npos) limits = err.substr(begin + 13, err.find(" fits", begin) - begin - 13);
  }
  EXPECT_NE(err.find("loaded llama"), std::string::npos) << limits << "\n" << err;
}

TEST_F(SplitProgram, WorkThatDoesNotFitIsRefusedBeforeLoading) {
  for (const std::string editor : {"memit", "rome"})
    expect_error(
        edit_on("sim:2", "run",
                {"--editor", editor, "--hparams", path("rome.yaml"), "--max-memory", "sim:0=200KiB,sim:1=200KiB"}),
        5,
        {"targets of one fact", "sim:0 needs", "weights 62.4 KiB, activations", "has 200.0 KiB",
         "--max-memory sim:0="});
  expect_error(edit_on("sim:2", "run", {"--max-memory", "sim:0=660KiB,sim:1=660KiB"}), 5,
               {"keys and solve of 2 facts", "--batch-size 1 fits"});
  // Second moments may be cached, so that a shortage is a warning. Here they are not.
  expect_error(edit_on("sim:2", "run", {"--max-memory", "sim:0=1050KiB,sim:1=1050KiB"}), 5,
               {"second moments: sim:0 needs", "unless they are cached", "out of memory on sim:", "planned",
                "of 1.0 MiB for the model", "left for the work", "at most", "smaller batches", "emend plan"});
  // What looks at the model after every batch needs room as well.
  write_file(folder_ / "ike.yaml", "k: 2\n");
  expect_error(
      edit_on("sim:1", "run", {"--editor", "ike", "--hparams", path("ike.yaml"), "--max-memory", "sim:0=1000KiB"}), 5,
      {"plan: the collapse guard's probe prompts: sim:0 needs", "--max-memory sim:0="});
  // With room, the same run goes through, and the weights are those of one device.
  must_run("memit_edit", edit_on("sim:2", "wide", {"--max-memory", "sim:0=20MiB,sim:1=20MiB"}));
  must_run("memit_edit", edit_on("cpu", "one"));
  EXPECT_LE(pack_difference("one", "wide"), 1e-6);
}

TEST_F(SplitProgram, LayersInHostMemoryComputeThere) {
  write_file(folder_ / "half.json", R"({"model.embed_tokens": "sim:0", "model.layers.0": "sim:0",
 "model.layers.1": "cpu", "model.layers.2": "cpu", "model.layers.3": "sim:0", "model.norm": "sim:0", "lm_head": "sim:0"})");
  must_run("memit_edit", edit_on("cpu", "one", {"--cache", path("cache-one")}));
  must_run("memit_edit", edit_on("sim:1", "whole", {"--cache", path("cache-whole")}));
  must_run("memit_edit", edit_on(path("half.json"), "half", {"--cache", path("cache-half")}));
  EXPECT_EQ(pack_difference("one", "half"), 0);
  const auto whole = results("whole"), half = results("half");
  EXPECT_EQ(half["metrics"], results("one")["metrics"]);
  EXPECT_EQ(half["device_map"]["model.layers.1"], "cpu");
  EXPECT_LT(half["peak_bytes"]["sim:0"], whole["peak_bytes"]["sim:0"]);
  int64_t hidden = 0;
  for (const auto& row : half["transfers"]) {
    EXPECT_NE(row["purpose"], "weight") << "layers stay where they are: " << row;
    if (row["purpose"] == "hidden") hidden += row["bytes"].get<int64_t>();
  }
  EXPECT_GT(hidden, 0) << "hidden states go to the host and back";
  std::cout << "half of the layers in host memory: " << hidden << " bytes of hidden states moved, "
            << half["peak_bytes"]["sim:0"] << " bytes at most on the device, " << whole["peak_bytes"]["sim:0"]
            << " with all layers there\n";
  for (const std::string map : {"cpu", "half.json"}) {
    const auto text = must_run("emend", {"generate", "--model", path("model"), "--prompt", "The tower", "--device-map",
                                         map == "cpu" ? map : path(map), "--max-new-tokens", "64", "--ignore-eos"});
    if (map == "cpu") write_file(folder_ / "text", text.out);
    EXPECT_EQ(text.out, read_file(folder_ / "text"));
  }
}

double seconds_of_children() {
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  const auto of = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

TEST_F(SplitProgram, SplittingCostsLessThanTwiceTheTime) {
  // Large enough that the work outweighs the program's start, which is taken off.
  write_tiny_model(folder_ / "model", 3, {{"hidden_size", 128}, {"intermediate_size", 384}, {"num_hidden_layers", 6}});
  const auto cost = [&](const std::string& map, const std::string& out, std::vector<std::string> more) {
    const double before = seconds_of_children();
    more.insert(more.end(), {"--cache", path("cache-" + out)});
    must_run("memit_edit", edit_on(map, out, more));
    return seconds_of_children() - before;
  };
  double one = 1e9, three = 1e9;
  for (const std::string turn : {"a", "b"}) {
    const double start = cost("cpu", "start" + turn, {"--dry-run"});
    one = std::min(one, cost("cpu", "one" + turn, {}) - start);
    three = std::min(three, cost("sim:3", "three" + turn, {}) - cost("sim:3", "start3" + turn, {"--dry-run"}));
  }
  std::cout << "a run of memit_edit: " << one << " s of processor time on one device, " << three
            << " s on three simulated ones, " << three / one << " times\n";
  EXPECT_LT(three / one, 2.0);
}

}  // namespace split_program_test
}  // namespace emend::testing
