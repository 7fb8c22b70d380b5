// `emend tune` as a user meets it: what it writes, on one device and on several, and that peft reads the adapter.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "support/program_fixture.h"
#include "support/python.h"

namespace emend::testing {
namespace tune_program_test {

using nlohmann::json;

class TuneProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    write_file(folder_ / "rows.json", R"([{"instruction": "Name a river.", "input": "", "output": "The Elbe."},
 {"instruction": "Name a town.", "input": "in Kenya", "output": "Nakuru."},
 {"instruction": "Count to three.", "output": "One, two, three."}])");
  }
  [[nodiscard]] std::vector<std::string> tune(const std::string& out, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"tune",    "--model", path("model"), "--data", path("rows.json"), "--out",
                                          path(out), "--lr",    "5e-3",        "--json", "--quiet"};
    for (const char* fixed : {"--steps", "50", "--batch-size", "3", "--rank", "4"}) arguments.emplace_back(fixed);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
};

TEST_F(TuneProgramTest, FiftyStepsOnTwoDevicesEqualOne) {
  const auto one = run_program("emend", tune("one")),
             two = run_program("emend", tune("two", {"--device-map", "sim:2"}));
  ASSERT_EQ(one.status, 0) << one.err;
  ASSERT_EQ(two.status, 0) << two.err;
  const json a = json::parse(one.out), b = json::parse(two.out);
  ASSERT_EQ(a["steps"].size(), 50U);
  EXPECT_LT(a["steps"][49]["loss"].get<double>(), 0.5 * a["steps"][0]["loss"].get<double>());
  EXPECT_NE(a["device_map"], b["device_map"]);
  for (size_t i = 0; i < 50; ++i)
    EXPECT_NEAR(a["steps"][i]["loss"].get<double>(), b["steps"][i]["loss"].get<double>(), 1e-4) << "step " << i;
  const SafetensorsFile first(folder_ / "one" / "adapter" / "adapter_model.safetensors"),
      second(folder_ / "two" / "adapter" / "adapter_model.safetensors");
  ASSERT_EQ(first.tensors().size(), 16U);
  for (const auto& [name, info] : first.tensors())
    EXPECT_LT((first.tensor(name) - second.tensor(name)).abs().max().item<double>(), 1e-4) << name;
  for (const char* file : {"results.json", "report.html", "adapter/adapter_config.json"})
    EXPECT_TRUE(std::filesystem::exists(folder_ / "one" / file)) << file;
  no_temporaries();
}

TEST_F(TuneProgramTest, PeftReadsTheAdapter) {
  EMEND_NEEDS_PYTHON();
  must_run("emend", tune("run", {"--merge"}));
  write_file(folder_ / "check.py", R"(
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
ids = torch.tensor([[72, 101, 108, 108, 111, 32, 119, 111]])
with torch.no_grad():
    base = load(sys.argv[1])
    before = base(ids).logits.clone()
    adapted, merged = PeftModel.from_pretrained(base, sys.argv[2]).eval()(ids).logits, load(sys.argv[3])(ids).logits
assert (adapted - merged).abs().max() < 1e-4, (adapted - merged).abs().max()
assert (adapted - before).abs().max() > 1e-2, "the adapter changes nothing"
)");
  const std::string command = "OMP_NUM_THREADS=1 " + test_python().string() + " '" + path("check.py") + "' '" +
                              path("model") + "' '" + path("run/adapter") + "' '" + path("run/model") + "'";
  EXPECT_EQ(std::system(command.c_str()), 0);
}

// The merge is of the file's weights, whatever was computed in, and can be taken back.
TEST_F(TuneProgramTest, AMergeKeepsWhatWasLearntAndTheLedger) {
  must_run("emend", tune("run", {"--merge", "--dtype", "bfloat16"}));
  const SafetensorsFile adapter(folder_ / "run" / "adapter" / "adapter_model.safetensors");
  const auto base = models::open_checkpoint(path("model")), merged = models::open_checkpoint(path("run/model"));
  int changed = 0;
  for (const auto& info : base->tensors()) {
    const std::string stem = "base_model.model." + info.name.substr(0, info.name.rfind(".weight")) + ".lora_";
    at::Tensor learnt = at::zeros({});
    if (adapter.contains(stem + "A.weight")) {
      learnt = adapter.tensor(stem + "B.weight").mm(adapter.tensor(stem + "A.weight"));
      ++changed;
    }
    const at::Tensor expected = base->read(info.name) + learnt;
    EXPECT_LE((merged->read(info.name) - expected).abs().max().item<double>(),
              1e-6 * expected.abs().max().item<double>())
        << info.name;
  }
  EXPECT_EQ(changed, 8);
  must_run("emend", {"revert", "--all", "--model", path("run/model"), "--quiet"});
  EXPECT_TRUE(model_bytes("run/model") == model_bytes());
}

TEST_F(TuneProgramTest, RefusesBadRowsAndOptions) {
  write_file(folder_ / "bad.json", "[{\"instruction\": \"a\"}]");
  auto result =
      run_program("emend", {"tune", "--model", path("model"), "--data", path("bad.json"), "--out", path("r")});
  EXPECT_EQ(result.status, 3) << result.err;
  EXPECT_NE(result.err.find("bad.json:1"), std::string::npos) << result.err;
  result = run_program("emend", tune("r2", {"--target-modules", "q_prj"}));
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_NE(result.err.find("q_proj"), std::string::npos) << result.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "r2" / "adapter"));
}

}  // namespace tune_program_test
}  // namespace emend::testing
