// What an edit leaves behind, read by somebody else: transformers loads the saved folder, peft the adapter, and both
// compute the logits that we compute; taking the edit back gives the original bytes.
#include <ATen/ATen.h>
#include <emend/core/safetensors.h>
#include <emend/models/batch.h>
#include <emend/models/checkpoint.h>
#include <emend/models/model.h>
#include <gtest/gtest.h>

#include "support/default_model.h"
#include "support/program.h"
#include "support/python.h"
#include "support/tiny_model.h"
#include "support/tiny_tokenizer.h"

namespace emend::testing {
namespace saved_model_test {

namespace fs = std::filesystem;

// Logits of one row of ids: of the edited folder, and of the reverted folder with the adapter.
constexpr const char* kScript = R"(
import sys, torch, safetensors.torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import PeftModel
edited, base, adapter, out, text = sys.argv[1:6]
ids = torch.tensor([AutoTokenizer.from_pretrained(edited)(text, add_special_tokens=False)["input_ids"]])
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
with torch.no_grad():
    logits = load(edited)(ids).logits[0]
    original = load(base)
    before = original(ids).logits[0].clone()
    adapted = PeftModel.from_pretrained(original, adapter).eval()(ids).logits[0]
safetensors.torch.save_file({"ids": ids[0], "edited": logits.contiguous(), "base": before.contiguous(),
                             "adapted": adapted.contiguous()}, out)
)";

std::string quoted(const fs::path& path) {
  return "'" + path.string() + "'";
}

at::Tensor our_logits(const fs::path& folder, const at::Tensor& ids) {
  const auto model = models::load_model(folder.string());
  const std::vector<int64_t> row(ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + ids.numel());
  const c10::InferenceMode inference;
  return model.forward(models::TokenBatch::from_rows({row})).logits;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Reverts a copy of run/model, and compares everything with Python.
void compare(const fs::path& folder, const std::string& text) {
  const auto run = folder / "run";
  must_run("emend", {"revert", "--all", "--model", (run / "model").string(), "--out", (folder / "base").string()});
  write_file(folder / "logits.py", kScript);
  const auto python =
      run_shell("OMP_NUM_THREADS=2 " + test_python().string() + " " + quoted(folder / "logits.py") + " " +
                quoted(run / "model") + " " + quoted(folder / "base") + " " + quoted(run / "adapter") + " " +
                quoted(folder / "python.safetensors") + " '" + text + "'");
  ASSERT_EQ(python.status, 0) << python.output;
  const SafetensorsFile file(folder / "python.safetensors");
  const at::Tensor ids = file.tensor("ids"), edited = our_logits(run / "model", ids),
                   base = our_logits(folder / "base", ids);
  EXPECT_GT(distance(edited, base), 0.1) << "the edit changed nothing that this text shows";
  EXPECT_LT(distance(edited, file.tensor("edited")), 1e-3);
  EXPECT_LT(distance(base, file.tensor("base")), 1e-3);
  EXPECT_LT(distance(edited, file.tensor("adapted")), 1e-3);
  std::cout << "[ figure   ] largest difference of logits: edited " << distance(edited, file.tensor("edited"))
            << ", base " << distance(base, file.tensor("base")) << ", adapter "
            << distance(edited, file.tensor("adapted")) << '\n';
}

void check(const fs::path& folder, std::vector<std::string> arguments, const std::string& text) {
  for (const char* more : {"--save", "pack,model,peft", "--eval", "none", "--show", "0", "--quiet", "--out"})
    arguments.emplace_back(more);
  arguments.push_back((folder / "run").string());
  must_run("memit_edit", arguments);
  compare(folder, text);
}

TEST(SavedModel, TransformersAndPeftAgreeOnChangedBehaviour) {
  EMEND_NEEDS_PYTHON();
  for (const std::string action : {"ablate", "bake"}) {
    const TemporaryFolder folder("saved_behaviour_" + action);
    const auto path = [&](const std::string& name) { return (folder.path() / name).string(); };
    write_tiny_model(folder.path() / "model");
    write_file(folder.path() / "a.txt", "It is good\nAll is good\nShe is good\n");
    write_file(folder.path() / "b.txt", "It is bad\nAll is bad\nHe is bad\n");
    must_run("emend", {"direct", "fit", "--positive", path("a.txt"), "--negative", path("b.txt"), "--model",
                       path("model"), "--no-effect", "--out", path("d"), "--quiet"});
    must_run("emend", {"direct", action, path("d"), "--model", path("model"), "--strength", "1", "--no-effect",
                       "--save", "pack,model,peft", "--out", path("run"), "--quiet"});
    compare(folder.path(), "The Eiffel Tower is in the city of");
    EXPECT_EQ(read_file(folder.path() / "base" / "model.safetensors"),
              read_file(folder.path() / "model" / "model.safetensors"));
  }
}

TEST(SavedModel, TransformersAndPeftAgreeOnATinyModel) {
  EMEND_NEEDS_PYTHON();
  const TemporaryFolder folder("saved_tiny");
  write_tiny_model(folder.path() / "model");
  write_file(folder.path() / "hparams.yaml", tiny_hparams());
  std::string corpus;
  for (int i = 0; i < 40; ++i) corpus += "Paragraph " + std::to_string(i * 37) + " speaks of towers and rivers.\n\n";
  write_file(folder.path() / "corpus.txt", corpus);
  write_file(folder.path() / "facts.jsonl",
             "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n");
  check(folder.path(),
        {"--model", (folder.path() / "model").string(), "--facts", (folder.path() / "facts.jsonl").string(),
         "--hparams", (folder.path() / "hparams.yaml").string(), "--corpus", (folder.path() / "corpus.txt").string(),
         "--cache", (folder.path() / "cache").string()},
        "The Eiffel Tower is in the city of");
  EXPECT_EQ(read_file(folder.path() / "base" / "model.safetensors"),
            read_file(folder.path() / "model" / "model.safetensors"));
}

TEST(SavedModel, TransformersAndPeftAgreeOnTheDefaultModel) {
  EMEND_NEEDS_PYTHON();
  EMEND_NEEDS_DEFAULT_MODEL();
  const TemporaryFolder folder("saved_default");
  write_file(folder.path() / "facts.jsonl",
             "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n");
  check(folder.path(),
        {"--model", default_model_path().string(), "--facts", (folder.path() / "facts.jsonl").string(), "--editor",
         "rome", "--set", "mom2_adjustment=false", "--cache", (folder.path() / "cache").string()},
        "The Eiffel Tower is in the city of");
}

}  // namespace saved_model_test
}  // namespace emend::testing
