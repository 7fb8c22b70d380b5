// What `emend export` and `--save gguf` write, run by llama.cpp: the edited GGUF file, and the unedited one with the
// adapter, continue prompts as emend does; in a quantised file every tensor that was not edited keeps its bytes.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/models/control_vector.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "support/default_model.h"
#include "support/gguf_builder.h"
#include "support/program_fixture.h"
#include "support/python.h"

namespace emend::testing {
namespace llama_cpp_test {

namespace fs = std::filesystem;
using nlohmann::json;

// Greedy continuations of rows of ids; keys and values are cached in float32, as emend does.
constexpr const char* kScript = R"(
import json, sys
import numpy as np
from llama_cpp import Llama
model, lora, rows, n = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]), int(sys.argv[4])
llm = Llama(model_path=model, lora_path=lora, n_ctx=256, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0,
            flash_attn=False)
out = []
for row in rows:
    llm.reset()
    ids = list(row)
    llm.eval(ids)
    for _ in range(n):
        ids.append(int(np.argmax(llm.scores[llm.n_tokens - 1])))
        llm.eval(ids[-1:])
    out.append(ids[len(row):])
print("ids " + json.dumps(out))
)";

// The Python of the tests may lack llama-cpp-python, which is built from source.
bool has_llama_cpp() {
  static const bool there =
      !test_python().empty() && run_shell("'" + test_python().string() + "' -c 'import llama_cpp'").status == 0;
  return there;
}
#define EMEND_NEEDS_LLAMA_CPP() \
  if (!has_llama_cpp()) GTEST_SKIP() << "needs llama-cpp-python in the Python of EMEND_TEST_PYTHON or .venv-tests"

class LlamaCpp : public ProgramTest {
 protected:
  json llama_cpp(const std::string& model, const std::string& lora, const json& rows, int n) {
    return python(kScript, "'" + model + "' '" + lora + "' '" + rows.dump() + "' " + std::to_string(n));
  }

  json python(const std::string& script, const std::string& arguments) {
    write_file(folder_ / "script.py", script);
    const auto result = run_shell("'" + test_python().string() + "' '" + path("script.py") + "' " + arguments);
    const size_t at = result.output.rfind("ids ");
    if (result.status != 0 || at == std::string::npos) {
      ADD_FAILURE() << result.output;
      return {};
    }
    return json::parse(result.output.substr(at + 4));
  }

  // The same by emend.
  json emend(const std::string& model, const std::vector<std::string>& packs, const json& rows, int n) {
    std::vector<std::string> arguments = {"generate",        "--model",      model,    "--max-new-tokens",
                                          std::to_string(n), "--ignore-eos", "--json", "--quiet"};
    for (const auto& pack : packs) arguments.insert(arguments.end(), {"--pack", pack});
    for (const auto& row : rows) {
      std::string list;
      for (const auto& id : row) list += (list.empty() ? "" : ",") + id.dump();
      arguments.insert(arguments.end(), {"--ids", list});
    }
    const auto result = must_run("emend", arguments);
    json ids = json::array();
    for (const auto& row : json::parse(result.out)) ids.push_back(row["ids"]);
    return ids;
  }

  void run(const std::string& program, const std::vector<std::string>& arguments) { must_run(program, arguments); }

  // base.gguf, and a direction of it in the folder d.
  void fit_direction() {
    run("emend", {"convert", path("model"), path("base.gguf"), "--type", "F32", "--quiet"});
    write_file(folder_ / "a.txt", "It is good\nAll is good\nShe is good\n");
    write_file(folder_ / "b.txt", "It is bad\nAll is bad\nHe is bad\n");
    run("emend", {"direct", "fit", "--positive", path("a.txt"), "--negative", path("b.txt"), "--model",
                  path("base.gguf"), "--no-effect", "--out", path("d"), "--quiet"});
  }

  // Bytes of the file as ids of the byte-level tokenizer.
  static json bytes_of(const std::string& text) {
    json row = json::array();
    for (const unsigned char c : text) row.push_back(c);
    return row;
  }
};

// Logits of the last token of each row with a control vector in force. The file is read here by the rules of
// llama.cpp's common_control_vector_load, which the Python package lacks: direction.N stands at n_embd * (N - 1).
constexpr const char* kSteeredScript = R"(
import json, struct, sys
import numpy as np, llama_cpp
model, path, strength, first, last, rows = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), json.loads(sys.argv[6])
raw, at = open(path, "rb").read(), 24
def take(form):
    global at
    value = struct.unpack_from("<" + form, raw, at)
    at += struct.calcsize("<" + form)
    return value[0]
def text():
    global at
    size = take("Q")
    at += size
    return raw[at - size:at].decode()
keys, tensors = {}, {}
for _ in range(struct.unpack_from("<Q", raw, 16)[0]):
    key, kind = text(), take("I")
    keys[key] = text() if kind == 8 else take({4: "I", 10: "Q", 11: "q"}[kind])
for _ in range(struct.unpack_from("<Q", raw, 8)[0]):
    name, dims = text(), take("I")
    shape, kind, offset = [take("Q") for _ in range(dims)], take("I"), take("Q")
    assert dims == 1 and kind == 0, name
    tensors[int(name.split(".")[1])] = (shape[0], offset)
assert keys["general.architecture"] == "controlvector" and keys["controlvector.layer_count"] == len(tensors), keys
base, width = -(-at // 32) * 32, next(iter(tensors.values()))[0]
data = np.zeros(width * max(tensors), np.float32)
for n, (size, offset) in tensors.items():
    data[width * (n - 1):width * n] += strength * np.frombuffer(raw, np.float32, size, base + offset)
llm = llama_cpp.Llama(model_path=model, n_ctx=256, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0, flash_attn=False)
pointer = data.ctypes.data_as(llama_cpp.ctypes.POINTER(llama_cpp.ctypes.c_float))
apply = getattr(llama_cpp, "llama_set_adapter_cvec", None) or llama_cpp.llama_apply_adapter_cvec
assert apply(llm._ctx.ctx, pointer, data.size, width, first, last) == 0
out = []
for row in rows:
    llm.reset()
    llm.eval(row)
    out.append([float(x) for x in llm.scores[llm.n_tokens - 1]])
print("ids " + json.dumps(out))
)";

// Logits of the last token of each row.
constexpr const char* kLogitsScript = R"(
import json, sys
import llama_cpp
model, lora, rows = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3])
llm = llama_cpp.Llama(model_path=model, lora_path=lora, n_ctx=256, n_threads=1, verbose=False, logits_all=True, type_k=0,
                      type_v=0, flash_attn=False)
out = []
for row in rows:
    llm.reset()
    llm.eval(row)
    out.append([float(x) for x in llm.scores[llm.n_tokens - 1]])
print("ids " + json.dumps(out))
)";

// Names of the tensors whose type or bytes differ.
std::vector<std::string> changed_tensors(const fs::path& a, const fs::path& b) {
  const models::GgufFile before(a), after(b);
  std::vector<std::string> changed;
  EXPECT_EQ(before.tensors().size(), after.tensors().size());
  for (const auto& tensor : before.tensors()) {
    const auto* other = after.find_tensor(tensor.name);
    if (!other || other->type != tensor.type || other->bytes != tensor.bytes ||
        std::memcmp(before.data(tensor), after.data(*other), tensor.bytes) != 0)
      changed.push_back(tensor.name);
  }
  return changed;
}

TEST_F(LlamaCpp, AnEditedFileAndAnAdapterContinueAlike) {
  EMEND_NEEDS_LLAMA_CPP();
  run("emend", {"convert", path("model"), path("base.gguf"), "--type", "F32", "--quiet"});
  run("memit_edit", edit({"--model", path("base.gguf"), "--eval", "none", "--save", "pack,gguf", "--quiet"}));
  const std::string pack = path("run/edit.safetensors");
  run("emend", {"export", pack, "--model", path("base.gguf"), "--to", "lora", "--out", path("lora.gguf"), "--quiet"});
  const json rows = {bytes_of("The Eiffel Tower is in the city of"), bytes_of("The capital of France is"),
                     bytes_of("Paragraph 37 speaks of towers")};
  const json expected = emend(path("base.gguf"), {pack}, rows, 16), unedited = emend(path("base.gguf"), {}, rows, 16);
  ASSERT_NE(expected, unedited) << "the edit shows in none of the texts";
  EXPECT_EQ(emend(path("run/model.gguf"), {}, rows, 16), expected);
  EXPECT_EQ(llama_cpp(path("base.gguf"), "", rows, 16), unedited);
  EXPECT_EQ(llama_cpp(path("run/model.gguf"), "", rows, 16), expected);
  EXPECT_EQ(llama_cpp(path("base.gguf"), path("lora.gguf"), rows, 16), expected);
}

TEST_F(LlamaCpp, ChangedBehaviourGivesItsLogits) {
  EMEND_NEEDS_LLAMA_CPP();
  fit_direction();
  const at::NoGradGuard no_grad;
  const json rows = {bytes_of("The Eiffel Tower is in the city of"), bytes_of("Paragraph 37")};
  const auto logits = [&](const std::string& file, size_t row) {
    const models::Model model = models::load_model(models::open_gguf_checkpoint(path(file)));
    return model.forward(models::TokenBatch::from_rows({rows[row].get<std::vector<int64_t>>()})).logits[-1].clone();
  };
  for (const std::string action : {"ablate", "bake"}) {
    run("emend", {"direct", action, path("d"), "--model", path("base.gguf"), "--strength", "1", "--no-effect", "--save",
                  "pack,lora,gguf", "--out", path(action), "--quiet"});
    const std::string merged = action + "/model.gguf";
    const json whole = python(kLogitsScript, "'" + path(merged) + "' '' '" + rows.dump() + "'");
    const json adapted = python(
        kLogitsScript, "'" + path("base.gguf") + "' '" + path(action + "/lora.gguf") + "' '" + rows.dump() + "'");
    ASSERT_EQ(whole.size(), rows.size());
    for (size_t r = 0; r < rows.size(); ++r) {
      const at::Tensor ours = logits(merged, r);
      EXPECT_GT((ours - logits("base.gguf", r)).abs().max().item<double>(), 0.01) << action << " changes nothing";
      for (const json* theirs : {&whole, &adapted})
        EXPECT_LE((ours - at::tensor((*theirs)[r].get<std::vector<double>>()).narrow(0, 0, ours.size(0)))
                      .abs()
                      .max()
                      .item<double>(),
                  1e-3)
            << action;
    }
  }
}

TEST_F(LlamaCpp, AControlVectorGivesItsLogits) {
  EMEND_NEEDS_LLAMA_CPP();
  fit_direction();
  // As repeng writes them: other keys' order, layers from the last to the first, some left out.
  models::GgufMetadata keys;
  keys.set_text("general.architecture", "controlvector");
  keys.set_text("controlvector.model_hint", "mistral");
  keys.set_integer("controlvector.layer_count", 2);
  at::manual_seed(4);
  write_gguf_file(path("repeng.gguf"), keys, {{"direction.3", at::randn({32})}, {"direction.1", at::randn({32})}});

  const at::NoGradGuard no_grad;
  const models::Model model = models::load_model(models::open_gguf_checkpoint(path("base.gguf")));
  const json rows = {bytes_of("The Eiffel Tower is in the city of"), bytes_of("Paragraph 37")};
  std::set<std::string> seen;
  for (const std::string file : {"d/direction.gguf", "repeng.gguf"})
    for (const auto& [first, last] : std::vector<std::pair<int, int>>{{1, 3}, {2, 3}, {1, 1}}) {
      const json theirs =
          python(kSteeredScript, "'" + path("base.gguf") + "' '" + path(file) + "' 1.5 " + std::to_string(first) + " " +
                                     std::to_string(last) + " '" + rows.dump() + "'");
      ASSERT_EQ(theirs.size(), rows.size());
      const auto steering = models::attach_steering(model, models::read_control_vector(path(file)),
                                                    {.strength = 1.5, .layers = {first, last}});
      for (size_t r = 0; r < rows.size(); ++r) {
        const auto ours =
            model.forward(models::TokenBatch::from_rows({rows[r].get<std::vector<int64_t>>()})).logits[-1];
        const at::Tensor want = at::tensor(theirs[r].get<std::vector<double>>()).narrow(0, 0, ours.size(0));
        EXPECT_LE((ours - want).abs().max().item<double>(), 1e-3) << file << " " << first << "-" << last;
        EXPECT_TRUE(seen.insert(theirs[r].dump()).second) << "the range makes no difference";
      }
    }
}

TEST_F(LlamaCpp, AQuantisedFileKeepsWhatWasNotEdited) {
  run("emend", {"convert", path("model"), path("base.gguf"), "--type", "Q8_0", "--quiet"});
  run("memit_edit", edit({"--model", path("base.gguf"), "--eval", "none", "--save", "pack,gguf", "--quiet"}));
  run("emend", {"export", path("run/edit.safetensors"), "--model", path("base.gguf"), "--to", "gguf", "--out",
                path("exported.gguf"), "--quiet"});
  const std::vector<std::string> edited = {"blk.1.ffn_down.weight", "blk.2.ffn_down.weight"};
  for (const char* file : {"run/model.gguf", "exported.gguf"}) {
    auto changed = changed_tensors(path("base.gguf"), path(file));
    std::sort(changed.begin(), changed.end());
    EXPECT_EQ(changed, edited) << file;
    // Rows of 48 are no whole blocks of 32, so these two are in F16 in a file that is in Q8_0.
    const models::GgufFile written(path(file));
    for (const auto& name : edited) EXPECT_EQ(written.find_tensor(name)->type, models::GgmlType::kF16) << name;
    EXPECT_EQ(written.find_tensor("blk.1.ffn_up.weight")->type, models::GgmlType::kQ8_0);
  }
}

// A file in four bits: only what was edited is written anew, and the edit survives.
TEST_F(LlamaCpp, TheDefaultModelInFourBits) {
  EMEND_NEEDS_DEFAULT_MODEL();
  const std::string model = default_model_path().string();
  write_file(folder_ / "one.jsonl",
             "{\"prompt\": \"{} is in the city of\", \"subject\": \"The Eiffel Tower\", \"target_new\": \"Rome\"}\n");
  run("memit_edit",
      {"--model", model, "--facts", path("one.jsonl"), "--editor", "rome", "--set", "mom2_adjustment=false", "--eval",
       "none", "--show", "0", "--save", "pack,gguf", "--out", path("run"), "--cache", path("cache"), "--quiet"});
  const auto changed = changed_tensors(model, path("run/model.gguf"));
  ASSERT_EQ(changed.size(), 1U);
  EXPECT_NE(changed[0].find("ffn_down"), std::string::npos);
  const std::string pack = path("run/edit.safetensors");
  run("emend", {"export", pack, "--to", "gguf", "--out", path("exported.gguf"), "--model", model, "--quiet"});
  EXPECT_EQ(changed_tensors(path("run/model.gguf"), path("exported.gguf")), std::vector<std::string>());
  EMEND_NEEDS_LLAMA_CPP();
  run("emend", {"export", pack, "--to", "lora", "--out", path("lora.gguf"), "--model", model, "--quiet"});
  write_file(folder_ / "texts.json", json{"The Eiffel Tower is in the city of"}.dump());
  const auto tokens = must_run("emend", {"tokenize", "--model", model, "--file", path("texts.json"), "--json"});
  const json rows = json::parse(tokens.out);
  // llama.cpp rounds activations to eight bits in products with quantised weights, so far-off tokens may differ.
  constexpr int kTokens = 4;
  const json expected = emend(model, {pack}, rows, kTokens);
  EXPECT_EQ(llama_cpp(path("run/model.gguf"), "", rows, kTokens), expected);
  EXPECT_EQ(llama_cpp(model, path("lora.gguf"), rows, kTokens), expected);
}

}  // namespace llama_cpp_test
}  // namespace emend::testing
