// The published settings, typed here a second time: every (editor, model) of the published tables has a preset that is
// found by the model's name and holds these figures. Columns that a table leaves open are -1 or empty.
#include <emend/hparams/preset.h>
#include <gtest/gtest.h>

#include <cmath>

namespace emend::hparams {
namespace hparams_published_test {

using More = std::vector<std::pair<const char*, const char*>>;

struct Row {
  const char *editor, *model;  // as people name the model; "=name" is a preset that is found by its own name only
  std::vector<int> layers;
  int steps = -1;
  double lr = -1;
  int loss_layer = -1;
  double weight_decay = -1, clamp = -1;
  More more = {};  // other keys, as numbers or words
};

const char* const kYes = "true";
const char* const kNo = "false";

More lambda(const char* value) {
  return {{"mom2_update_weight", value}};
}

std::vector<Row> rome_rows(const char* editor) {
  return {
      {editor, "gpt2-medium", {8}, 20, 0.5, 23, 0.5, 3, {{"mom2_adjustment", kYes}}},
      {editor, "gpt2-large", {12}, 20, 0.5, 35, 0.5, 4, {{"mom2_adjustment", kYes}}},
      {editor, "openai-community/gpt2-xl", {17}, 20, 0.5, 47, 0.5, 4, {{"mom2_adjustment", kYes}}},
      {editor, "=gpt2-xl-easyedit", {17}, 20, 0.5, 47, 0.5, 4, {{"mom2_adjustment", kNo}}},
      {editor, "EleutherAI/gpt-j-6B", {5}, 20, 0.5, 27, 0.5, 4, {{"mom2_adjustment", kYes}}},
      {editor, "=gpt-j-6b-easyedit", {5}, 20, 0.5, 27, 0.5, 4, {{"mom2_adjustment", kNo}}},
      {editor, "EleutherAI/gpt-neox-20b", {15}, 20, 0.5, 43, 0.5, 4, {{"mom2_adjustment", kYes}}},
      {editor, "llama-7b", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "meta-llama/Llama-2-7b-hf", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "baichuan-inc/Baichuan-7B", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "internlm/internlm-7b", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "mistralai/Mistral-7B-v0.1", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "meta-llama/Meta-Llama-3-8B", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "meta-llama/Llama-3.2-3B", {5}, 25, 0.5, 27, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "Qwen/Qwen2-7B", {5}, 25, 0.5, 27, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "Qwen/Qwen2.5-7B", {5}, 25, 0.5, 27, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "qwen3.5-9b", {5}, 25, 0.5, 27, 1e-3, 4, {{"mom2_adjustment", kNo}}},
      {editor, "Qwen/Qwen-7B", {5}, 20, 0.5, 31, 0.5, 4, {{"mom2_adjustment", kNo}}},
      {editor, "THUDM/chatglm2-6b", {5}, 20, 0.5, 27, 0.5, 4, {{"mom2_adjustment", kNo}}},
      {editor, "chatglm4-9b", {5}, 25, 0.5, 31, 1e-3, 4, {{"mom2_adjustment", kNo}}},
  };
}

std::vector<Row> memit_rows() {
  const std::vector<int> low = {4, 5, 6, 7, 8}, high = {13, 14, 15, 16, 17}, neox = {6, 7, 8, 9, 10};
  return {
      {"memit", "gpt2-xl", high, 20, 0.5, 47, 0.5, 0.75, lambda("20000")},
      {"memit", "gpt-j-6B", {3, 4, 5, 6, 7, 8}, 25, 0.5, 27, 0.5, 0.75, lambda("15000")},
      {"memit", "gpt-neox-20b", neox, 20, 0.5, 43, 0.5, 0.3, lambda("20000")},
      {"memit", "=gpt-neox-20b-pmet", neox, 20, 0.5, 43, 0.5, 0.8, lambda("6000")},
      {"memit", "llama3-8b", low, 25, 0.1, 31, 0.5, 0.75, lambda("15000")},
      {"memit", "llama-7b", low, 25, 0.5, 31, 1e-3, 4, lambda("15000")},
      {"memit", "baichuan-7b", low, 25, 0.5, 31, 1e-3, 4, lambda("15000")},
      {"memit", "internlm-7b", low, 25, 0.5, 31, 1e-3, 4, lambda("15000")},
      {"memit", "mistral-7b", low, 25, 0.5, 31, 1e-3, 4, lambda("15000")},
      {"memit", "llama3.2-3b", low, 25, 0.5, 27, 1e-3, 4, lambda("15000")},
      {"memit", "qwen2-7b", low, 25, 0.5, 27, 1e-3, 4, lambda("15000")},
      {"memit", "qwen2.5-7b", low, 25, 0.5, 27, 1e-3, 4, lambda("15000")},
      {"memit", "qwen-7b", low, 25, 0.5, 31, 0.5, 0.75, lambda("15000")},
      {"memit", "chatglm2-6b", high, 25, 0.5, 27, 1e-3, 4, lambda("15000")},
      {"memit", "=llama-7b-ume", {5}, 25, 0.5, 31, 1e-3, 4, lambda("1")},
  };
}

std::vector<Row> other_locate_rows() {
  const auto pmet = [](const char* kl, const char* weight) {
    return More{{"kl_factor", kl}, {"mom2_update_weight", weight}};
  };
  const More sphere = {{"L2", "1"}, {"cumulative_ratio", "0.5"}, {"suppression_strength", "0.5"}};
  const std::vector<int> low = {4, 5, 6, 7, 8}, high = {13, 14, 15, 16, 17}, gptj = {3, 4, 5, 6, 7, 8};
  return {
      {"emmet", "gpt2-xl", {17}, 20, 0.5, 47, 0.5, 0.75, lambda("1000")},
      {"emmet", "=gpt2-xl-easyedit", {17}, 20, 0.5, 47, 0.5, 0.75, lambda("10000")},
      {"emmet", "gpt-j-6b", {5}, 25, 0.5, 27, 0.5, 0.75, lambda("1")},
      {"emmet", "=gpt-j-6b-easyedit", {5}, 25, 0.5, 27, 0.5, 0.75, lambda("100000")},
      {"emmet", "llama-2-7b", {5}, 25, 0.5, 31, 1e-3, 4, lambda("1")},
      {"emmet", "=llama-7b-easyedit", {5}, 25, 0.5, 31, 1e-3, 4, lambda("100000")},
      {"emmet", "llama3.2-3b", {5}, 25, 0.5, 27, 1e-3, 4, lambda("100000")},
      {"pmet", "gpt-j-6b", gptj, 30, 0.2, -1, 0.5, 0.75, pmet("1", "6000")},
      {"pmet", "=gpt-j-6b-easyedit", gptj, 30, 0.2, -1, 0.5, 0.75, pmet("1", "15000")},
      {"pmet", "gpt-neox-20b", {6, 7, 8, 9, 10}, 30, 0.5, -1, -1, 0.8, pmet("0.8", "15000")},
      {"pmet", "llama-7b", low, 20, 0.5, -1, -1, 1, pmet("0.0625", "15000")},
      {"pmet", "llama3.2-3b", low, 25, -1, 27, -1, 1},
      {"alphaedit", "gpt2-xl", high, 20, 0.5, -1, 0.5, 0.75, {{"L2", "10"}, {"nullspace_threshold", "0.02"}}},
      {"alphaedit", "gpt-j-6b", gptj, 25, 0.5, -1, -1, 0.75, {{"L2", "10"}, {"nullspace_threshold", "0.02"}}},
      {"alphaedit", "llama3-8b", low, 25, 0.1, -1, 0.5, 0.75, {{"L2", "10"}, {"nullspace_threshold", "0.02"}}},
      {"alphaedit", "=llama3-8b-easyedit", low, 25, 0.1, -1, 0.5, 0.75, {{"L2", "1"}}},
      {"alphaedit", "llama3.1-8b", low, 25, 0.1, -1, 0.5, 0.75, {{"L2", "10"}}},
      {"alphaedit", "qwen2.5-7b", low, 25, 0.5, 27, 1e-3, 4, {{"L2", "1"}}},
      {"alphaedit", "qwen3.5-9b", low, 25, 0.5, 27, 1e-3, 4, {{"L2", "1"}}},
      {"nse", "gpt2-xl", high, -1, -1, -1, -1, -1, lambda("10000")},
      {"nse", "gpt-j-6b", gptj},
      {"nse", "llama3-8b", low},
      {"sphere", "llama3-8b", low, 25, 0.1, -1, 0.5, 0.75, sphere},
      {"encore", "gpt2-xl", high, 20, 0.5},
      {"encore", "llama-2-7b", low, 25, 0.5, -1, -1, 0.75, lambda("15000")},
      {"encore", "llama3-8b", low, 25, 0.5, -1, -1, 0.75, lambda("15000")},
      {"memit-seq", "gpt2-xl", high, 20, 0.5, 47, 0.5, 0.75},
      {"memit-seq", "gpt-j-6b", gptj, 25, 0.5, 27, 0.5, 0.75},
      {"memit-seq", "llama3-8b", low, 25, 0.1, 31, 0.5, 0.75},
      {"rlsedit", "gpt2-xl", high, 20, 0.5, 47, 0.5, 0.75, {{"mom2_update_weight", "20000"}, {"mu_reg", "1"}}},
      {"rlsedit", "llama3-8b", low, 25, 0.1, 31, 0.5, 0.75, {{"mom2_update_weight", "15000"}, {"lambda_reg", "0"}}},
      {"memit-fe", "llama3-8b", low, 25, 0.1, 31, 0.5, 4, lambda("15000")},
      {"lyaplock", "gpt2-xl", high, 20, 0.5, 47, 0.5, 0.75, {{"mom2_update_weight", "1000"}, {"alpha", "60"}}},
      {"lyaplock", "gpt-j-6b", {3, 4, 5, 6, 7}, 25, 0.5, 27, 0.5, 0.75, lambda("1000")},
      {"lyaplock", "llama3-8b", low, 25, 0.1, 31, 0.5, 0.75, lambda("1000")},
      {"eamet", "qwen2.5-7b", low, 25, 0.5, 27, 1e-3, 4, {{"cs_factor", "1"}, {"mse_factor", "1"}, {"tau", "0.07"}}},
  };
}

// Fine-tuning: `steps` is num_steps; `lr` 5e-4 unless said.
std::vector<Row> tuning_rows() {
  const auto epsilon = [](const char* value) { return More{{"norm_constraint", value}}; };
  std::vector<Row> rows = {
      {"ft", "gpt2-xl", {1}, 25, 5e-4, -1, 0},
      {"ft", "gpt-j-6b", {21}, 25, 5e-4, -1, 0},
      {"ft-w", "gpt-j-6b", {21}, 25, 5e-4},
      {"ft-l", "gpt2-xl", {0}, 25, 5e-4, -1, 0, -1, epsilon("5e-4")},
      {"ft-l", "=gpt2-xl-attn", {33}, 25, 1e-3, -1, -1, -1, epsilon("1e-3")},
      {"ft-l", "gpt2-large", {0}, 25, 5e-4, -1, -1, -1, epsilon("1e-3")},
      {"ft-l", "gpt2-medium", {0}, 25, 5e-4, -1, -1, -1, epsilon("2e-3")},
      {"ft-l", "gpt-j-6b", {0}, 25, 5e-4, -1, -1, -1, epsilon("5e-5")},
      {"ft-l", "=gpt-j-6b-easyedit", {21}, 25, 5e-4, -1, -1, -1, epsilon("false")},
      {"ft-l", "mistral-7b", {21}, 25, 5e-4, -1, -1, -1, epsilon("5e-5")},
      {"ft-l", "qwen-7b", {31}, 25, 5e-4, -1, -1, -1, epsilon("5e-5")},
      {"ft-l", "chatglm2-6b", {27}, 40, 5e-4},
      {"ft-l", "chatglm4-9b", {27}, 40, 5e-4},
      {"ft-l", "internlm-7b", {0, 31}, 40, 5e-4},
  };
  for (const char* model : {"llama-7b", "llama3-8b", "llama3.2-3b", "baichuan-7b"})
    rows.push_back({"ft-l", model, {21}, 25, 5e-4, -1, -1, -1, epsilon("false")});
  for (const char* model : {"qwen2-7b", "qwen2.5-7b", "qwen3.5-9b"}) rows.push_back({"ft-l", model, {27}, 25, 5e-4});
  const More crisp = {{"energy_threshold", "0.8"}};
  for (const char* model : {"llama3-8b", "mistral-7b"})
    rows.push_back({"crispedit", model, {19, 20, 21, 22, 23}, 25, 5e-4, -1, 0, -1, crisp});
  rows.push_back({"crispedit", "qwen2.5-7b", {15, 16, 17, 18, 19}, 25, 5e-4, -1, 0, -1, crisp});
  return rows;
}

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (const auto& part : {rome_rows("rome"), rome_rows("r-rome"), memit_rows(), other_locate_rows(), tuning_rows()})
    rows.insert(rows.end(), part.begin(), part.end());
  return rows;
}

class Published : public ::testing::TestWithParam<Row> {};

// The value of a key as text; "" if the preset does not set it.
std::string value_of(const RawHparams& raw, const char* key) {
  const RawEntry* entry = raw.find(key);
  return entry ? entry->value.text : "";
}

void expect_number(const RawHparams& raw, const std::vector<const char*>& keys, double expected) {
  if (expected < 0) return;
  for (const char* key : keys)
    if (const std::string text = value_of(raw, key); !text.empty()) {
      EXPECT_NEAR(std::strtod(text.c_str(), nullptr), expected, 1e-12 + 1e-9 * expected) << key;
      return;
    }
  ADD_FAILURE() << "no " << keys.front();
}

TEST_P(Published, HasAPresetWithTheseFigures) {
  const Row& row = GetParam();
  const Preset* preset = row.model[0] == '=' ? find_preset_by_name(row.editor, row.model + 1)
                                             : find_preset(row.editor, {{row.model}, "", 0, 0, 0});
  ASSERT_NE(preset, nullptr) << row.editor << " " << row.model;
  const RawHparams raw = preset->values;
  SCOPED_TRACE(preset->path);
  const RawEntry* layers = raw.find("layers");
  ASSERT_NE(layers, nullptr);
  std::vector<int> got;
  for (const auto& item : layers->value.items) got.push_back(std::atoi(item.text.c_str()));
  EXPECT_EQ(got, row.layers);
  expect_number(raw, {"v_num_grad_steps", "num_steps"}, row.steps);
  expect_number(raw, {"v_lr", "lr"}, row.lr);
  expect_number(raw, {"v_loss_layer"}, row.loss_layer);
  expect_number(raw, {"v_weight_decay", "weight_decay"}, row.weight_decay);
  expect_number(raw, {"clamp_norm_factor"}, row.clamp);
  for (const auto& [key, wanted] : row.more) {
    char* end = nullptr;
    const double number = std::strtod(wanted, &end);
    if (*end == '\0')
      expect_number(raw, {key}, number);
    else
      EXPECT_EQ(value_of(raw, key), wanted) << key;
  }
}

std::string row_name(const ::testing::TestParamInfo<Row>& info) {
  std::string name = std::string(info.param.editor) + "_" + info.param.model;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(Tables, Published, ::testing::ValuesIn(all_rows()), row_name);

}  // namespace hparams_published_test
}  // namespace emend::hparams
