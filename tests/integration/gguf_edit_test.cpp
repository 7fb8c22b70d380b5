// Writing edited models, conversion both ways, and vocabularies.
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/spare_neurons.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <fstream>

#include "support/debug_models.h"
#include "support/error_of.h"
#include "support/gguf_builder.h"
#include "support/shared.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace gguf_edit_test {

using testing::TemporaryFolder;

// A Llama whose rows are whole blocks of 256.
nlohmann::json wide_llama() {
  return {{"model_type", "llama"},      {"hidden_size", 256},
          {"num_hidden_layers", 2},     {"num_attention_heads", 4},
          {"num_key_value_heads", 2},   {"intermediate_size", 512},
          {"vocab_size", 300},          {"max_position_embeddings", 64},
          {"tie_word_embeddings", true}};
}

class GgufEdit : public ::testing::Test {
 protected:
  TemporaryFolder folder_{"gguf_edit"};
  std::filesystem::path original_ = folder_ / "original.gguf", edited_ = folder_ / "edited.gguf";
  const std::string name_ = "model.layers.1.mlp.down_proj.weight";

  static const GgufWrittenTensor& written(const GgufWriteReport& report, const std::string& name) {
    for (const auto& tensor : report.tensors)
      if (tensor.name == name) return tensor;
    throw std::out_of_range(name);
  }
  // A rank-one change of 1 % of the weight's size.
  at::Tensor edit(Model& model) const {
    at::manual_seed(3);
    const at::Tensor weight = model.weight(name_);
    const at::Tensor change = at::outer(at::randn({weight.size(0)}), at::randn({weight.size(1)}));
    const at::Tensor scaled = change * (0.01 * weight.norm() / change.norm());
    model.set_weight(name_, weight + scaled);
    return scaled;
  }
};

TEST_F(GgufEdit, OnlyTheEditedTensorDiffers) {
  (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = GgmlType::kQ4_K});
  Model model = load_model(open_gguf_checkpoint(original_));
  (void)edit(model);
  const auto report = write_gguf(model, edited_);
  const GgufFile before(original_), after(edited_);
  ASSERT_EQ(before.keys(), after.keys());
  for (const auto& key : before.keys()) EXPECT_EQ(before.find(key)->payload, after.find(key)->payload) << key;
  ASSERT_EQ(before.tensors().size(), after.tensors().size());
  for (size_t i = 0; i < before.tensors().size(); ++i) {
    const GgufTensor &a = before.tensors()[i], &b = after.tensors()[i];
    EXPECT_EQ(a.name, b.name);
    if (a.name == "blk.1.ffn_down.weight") {
      EXPECT_EQ(a.type, GgmlType::kQ4_K);
      EXPECT_EQ(b.type, GgmlType::kQ8_0) << "an edit does not survive four bits";
      continue;
    }
    ASSERT_EQ(a.type, b.type) << a.name;
    EXPECT_EQ(std::memcmp(before.data(a), after.data(b), a.bytes), 0) << a.name;
  }
  const auto& changed = written(report, "blk.1.ffn_down.weight");
  EXPECT_TRUE(changed.changed);
  // The loaded file holds the edit up to the rounding that the report states.
  const at::Tensor got = open_gguf_checkpoint(edited_)->read(name_), wanted = model.weight(name_);
  const double error = ((got - wanted).norm() / wanted.norm()).item<double>();
  EXPECT_NEAR(changed.error_of_change / error, 100, 5);  // the change is 1 % of the weight
}

// A column of numbers a hundred times as large, as a neuron of LATCH has: those in the same blocks stay what they were.
TEST_F(GgufEdit, LargeNumbersDoNotRoundTheirNeighboursAway) {
  (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = GgmlType::kQ4_K});
  Model model = load_model(open_gguf_checkpoint(original_));
  const at::Tensor before = model.weight(name_).clone();
  at::Tensor now = before.clone();
  now.select(1, 5).mul_(100);
  model.set_weight(name_, now);
  const auto lost = [&](const at::Tensor& got) {
    return ((got - before).narrow(1, 6, 26).norm() / before.narrow(1, 6, 26).norm()).item<double>();
  };
  (void)write_gguf(model, edited_, {.changed_type = GgmlType::kQ8_0});
  EXPECT_GT(lost(open_gguf_checkpoint(edited_)->read(name_)), 0.1);
  const auto report = write_gguf(model, edited_);
  EXPECT_EQ(written(report, "blk.1.ffn_down.weight").type, GgmlType::kF16);
  EXPECT_LT(lost(open_gguf_checkpoint(edited_)->read(name_)), 1e-3);
}

// As transactions do: the weight's own bytes change. The checkpoint and other models of it must not.
TEST_F(GgufEdit, EditsInPlaceReachTheFileAndNothingElse) {
  for (const GgmlType type : {GgmlType::kF32, GgmlType::kBF16, GgmlType::kF16, GgmlType::kQ8_0}) {
    (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = type});
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const LoadOptions options{.dtype = dtype};
      const auto checkpoint = open_gguf_checkpoint(original_);
      Model model = load_model(checkpoint, options);
      const Model other = load_model(checkpoint, options);
      const at::Tensor before = model.weight(name_).clone();
      {
        const at::NoGradGuard no_grad;
        model.weight(name_).add_(0.5);
      }
      EXPECT_TRUE(at::equal(other.weight(name_), before)) << to_string(type);
      EXPECT_TRUE(at::equal(checkpoint->read(name_).to(dtype), before)) << to_string(type);
      const auto report = write_gguf(model, edited_);
      EXPECT_TRUE(written(report, "blk.1.ffn_down.weight").changed) << to_string(type) << " " << c10::toString(dtype);
      EXPECT_LT((open_gguf_checkpoint(edited_)->read(name_) - model.weight(name_)).abs().max().item<double>(), 0.02);
      EXPECT_EQ(load_model(open_gguf_checkpoint(original_), options).fingerprint(), model.fingerprint());
    }
  }
}

TEST_F(GgufEdit, TheTypeOfChangedTensorsCanBeChosen) {
  (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = GgmlType::kQ4_K});
  Model model = load_model(open_gguf_checkpoint(original_));
  (void)edit(model);
  double last = 1e9;
  for (const GgmlType type : {GgmlType::kQ4_K, GgmlType::kQ8_0, GgmlType::kF16, GgmlType::kF32}) {
    const auto report = write_gguf(model, edited_, {.changed_type = type});
    const auto& changed = written(report, "blk.1.ffn_down.weight");
    EXPECT_EQ(changed.type, type);
    EXPECT_LT(changed.error_of_change, last) << to_string(type);
    last = changed.error_of_change;
  }
  EXPECT_EQ(last, 0);
}

TEST_F(GgufEdit, AnUnchangedModelGivesTheSameFile) {
  (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = GgmlType::kQ6_K});
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Model model = load_model(open_gguf_checkpoint(original_), {.dtype = dtype});
    (void)write_gguf(model, edited_);
    EXPECT_EQ(read_file(edited_), read_file(original_)) << c10::toString(dtype);
  }
  const Model model = load_model(open_gguf_checkpoint(original_));
  EXPECT_THROW((void)write_gguf(model, original_), Error) << "over the file that it was read from";
  EXPECT_EQ(read_file(edited_), read_file(original_));
}

TEST_F(GgufEdit, ABaseServesAModelFromAFolder) {
  const auto checkpoint = random_checkpoint(wide_llama(), 1);
  (void)write_gguf(*checkpoint, original_, {.type = GgmlType::kQ4_K});
  Model model = load_model(checkpoint);
  const auto whole = write_gguf(model, edited_, {.base = original_});
  EXPECT_EQ(read_file(edited_), read_file(original_));
  (void)edit(model);
  const auto report = write_gguf(model, edited_, {.base = original_});
  const GgufFile before(original_), after(edited_);
  int64_t copied = 0;
  for (const auto& a : before.tensors())
    if (const auto* b = after.find_tensor(a.name); b && b->type == a.type)
      copied += std::memcmp(before.data(a), after.data(*b), a.bytes) == 0;
  EXPECT_EQ(copied + 1, static_cast<int64_t>(report.tensors.size()));
  EXPECT_EQ(whole.tensors.size(), report.tensors.size());
}

// As Qwen2.5's published files do.
TEST_F(GgufEdit, ABaseMayStoreATiedHeadTwice) {
  const auto checkpoint = random_checkpoint(wide_llama(), 1);
  (void)write_gguf(*checkpoint, original_, {.type = GgmlType::kF32, .keep_config = false});
  auto [metadata, tensors] = testing::gguf_contents(original_);
  const auto embedding = std::ranges::find(tensors, "token_embd.weight", &testing::NamedTensor::name);
  ASSERT_NE(embedding, tensors.end());
  tensors.push_back({"output.weight", embedding->values});
  const auto twice = folder_ / "twice.gguf";
  testing::write_gguf_file(twice, metadata, tensors);
  Model model = load_model(checkpoint);
  (void)edit(model);
  auto report = write_gguf(model, edited_, {.base = twice});
  EXPECT_EQ(report.tensors.size(), tensors.size());
  EXPECT_FALSE(written(report, "output.weight").changed);
  const std::string name = "model.embed_tokens.weight";
  model.set_weight(name, model.weight(name) * 2);
  report = write_gguf(model, edited_, {.base = twice});
  EXPECT_TRUE(written(report, "output.weight").changed);
  const auto both = open_gguf_checkpoint(edited_);
  for (const auto& stored : {name, std::string("lm_head.weight")})
    EXPECT_TRUE(at::equal(both->read(stored), model.weight(name))) << stored;
  tensors.back().values = -tensors.back().values;  // a head of its own
  testing::write_gguf_file(twice, metadata, tensors);
  EXPECT_THROW((void)write_gguf(load_model(checkpoint), edited_, {.base = twice}), Error);
}

TEST_F(GgufEdit, ABaseOfAnotherModelIsRefused) {
  (void)write_gguf(*random_checkpoint(wide_llama(), 1), original_, {.type = GgmlType::kF16});
  const Model other = load_model(random_checkpoint(testing::debug_config("llama"), 1));
  EXPECT_THROW((void)write_gguf(other, edited_, {.base = original_}), Error);
  const Model alike = load_model(random_checkpoint(wide_llama(), 2));  // of the same shape
  EXPECT_THROW((void)write_gguf(alike, edited_, {.base = original_}), Error);
  EXPECT_FALSE(std::filesystem::exists(edited_));
}

TEST_F(GgufEdit, TiedAndPlainHeadsGetWiderTypes) {
  nlohmann::json config = wide_llama();
  const auto tied = write_gguf(*random_checkpoint(config, 1), original_, {.type = GgmlType::kQ4_K});
  EXPECT_EQ(written(tied, "token_embd.weight").type, GgmlType::kQ6_K);
  EXPECT_EQ(written(tied, "blk.0.attn_norm.weight").type, GgmlType::kF32);
  config["tie_word_embeddings"] = false;
  const auto plain = write_gguf(*random_checkpoint(config, 1), original_, {.type = GgmlType::kQ4_K});
  EXPECT_EQ(written(plain, "token_embd.weight").type, GgmlType::kQ4_K);
  EXPECT_EQ(written(plain, "output.weight").type, GgmlType::kQ6_K);
}

TEST_F(GgufEdit, ValuesThatAreNotFiniteLeaveNoFile) {
  Model model = load_model(random_checkpoint(wide_llama(), 1));
  at::Tensor weight = model.weight(name_).clone();
  weight[0][0] = std::numeric_limits<float>::infinity();
  model.set_weight(name_, weight);
  const std::string message =
      testing::error_of([&] { (void)write_gguf(model, edited_, {.type = GgmlType::kQ8_0}); }, ErrorClass::kNumeric);
  EXPECT_NE(message.find("blk.1.ffn_down.weight"), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// ---- conversion

// A folder with a tokenizer, as a checkpoint would be.
std::filesystem::path make_folder(const TemporaryFolder& folder, const nlohmann::json& config) {
  const auto path = folder / "hf";
  write_folder(*random_checkpoint(config, 4), path);
  write_file(path / "tokenizer.json", testing::byte_level_json({{"t", "h"}, {"th", "e"}}).dump());
  return path;
}

TEST_F(GgufEdit, FolderToGgufAndBack) {
  const auto hf = make_folder(folder_, wide_llama());
  const auto there = convert_model(hf.string(), original_, {.type = "f32"});
  EXPECT_EQ(there.format, ModelFormat::kGguf);
  const auto target = folder_ / "back";
  int steps = 0;
  const auto back = convert_model(original_.string(), target,
                                  {.shard_bytes = 1 << 20, .progress = [&](const ProgressUpdate&) { ++steps; }});
  EXPECT_EQ(back.format, ModelFormat::kHuggingFace);
  EXPECT_EQ(steps, back.tensors);
  EXPECT_TRUE(std::filesystem::exists(target / "model.safetensors.index.json"));
  const auto before = open_checkpoint(hf.string()), after = open_checkpoint(target.string());
  ASSERT_EQ(after->tensors().size(), before->tensors().size());
  for (const auto& info : before->tensors())
    EXPECT_TRUE(at::equal(before->read(info.name), after->read(info.name))) << info.name;
  const auto one = before->load_tokenizer(), two = after->load_tokenizer();
  for (const char* text : {"the then", "naïve  42", "\n\t"})
    EXPECT_EQ(one->encode_ids(text), two->encode_ids(text)) << text;
  // A file that keeps none of the tokenizer's own.
  const auto foreign = folder_ / "foreign.gguf";
  (void)write_gguf(*before, foreign, {.keep_config = false});
  (void)convert_model(foreign.string(), folder_ / "foreign");
  const auto config = nlohmann::json::parse(read_file(folder_ / "foreign" / "tokenizer_config.json"));
  EXPECT_EQ(config["model_input_names"], (nlohmann::json{"input_ids", "attention_mask"})) << "what generate() takes";
  for (const auto& file : back.files) EXPECT_TRUE(std::filesystem::exists(file)) << file;
  EXPECT_THROW((void)convert_model(original_.string(), target), Error) << "the folder holds a model already";
  EXPECT_THROW((void)convert_model(original_.string(), original_), Error);
  EXPECT_THROW((void)convert_model(original_.string(), folder_ / "q", {.type = "Q8_0"}), Error);
  EXPECT_THROW((void)convert_model(original_.string(), folder_ / "q.gguf", {.type = "Q9"}), Error);
}

TEST_F(GgufEdit, FolderTypesAreKept) {
  const auto hf = make_folder(folder_, wide_llama());
  for (const auto& [type, dtype, size] :
       {std::tuple{"F16", at::kHalf, 2}, {"BF16", at::kBFloat16, 2}, {"F32", at::kFloat, 4}}) {
    const auto target = folder_ / type;
    (void)convert_model(hf.string(), target, {.type = type});
    const auto folder = open_checkpoint(target.string());
    for (const auto& info : folder->tensors()) EXPECT_EQ(info.dtype, dtype) << info.name;
    const auto gguf = folder_ / (std::string(type) + ".gguf");
    (void)convert_model(target.string(), gguf);  // matrices keep their type, vectors are F32
    const auto again = open_checkpoint(gguf.string());
    for (const auto& info : again->tensors())
      EXPECT_EQ(info.dtype, info.shape.size() == 2 ? dtype : at::kFloat) << info.name;
  }
}

TEST_F(GgufEdit, AFlagThatWasSetLaterCounts) {
  const auto hf = make_folder(folder_, wide_llama());
  write_file(hf / "tokenizer.json", testing::metaspace_json("ab").dump());
  write_file(hf / "tokenizer_config.json", R"({"bos_token": "<s>"})");
  (void)convert_model(hf.string(), original_, {.type = "F32"});
  EXPECT_TRUE(open_checkpoint(original_.string())->load_tokenizer()->adds_bos());
  auto [metadata, tensors] = testing::gguf_contents(original_);
  metadata.set_flag("tokenizer.ggml.add_bos_token", false);
  testing::write_gguf_file(edited_, metadata, tensors);
  const auto tokenizer = open_checkpoint(edited_.string())->load_tokenizer();
  EXPECT_FALSE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->encode_ids("ab", true), load_tokenizer(hf)->encode_ids("ab"));
}

// Neurons of zeros add nothing, whatever the family calls its MLP.
TEST_F(GgufEdit, SpareNeuronsChangeNothing) {
  const at::NoGradGuard no_grad;
  int widened = 0, refused = 0;
  ConvertOptions wider;
  wider.spare_neurons = 8;
  std::vector<std::pair<std::string, nlohmann::json>> configs;
  for (const FamilySpec& family : all_families())
    for (const DebugFlavour& flavour : family.debug) {
      const auto config = nlohmann::json::parse(flavour.config);
      configs.emplace_back(family.name + "-" + flavour.name, config);
      if (family.name == "gemma3")  // as the language model of one that sees
        configs.emplace_back("gemma3-multimodal", nlohmann::json{{"model_type", "gemma3"}, {"text_config", config}});
    }
  for (const auto& [name, config] : configs) {
    SCOPED_TRACE(name);
    const auto hf = make_folder(folder_, config);
    const auto target = folder_ / ("wide-" + name);
    const Model before = load_model(hf.string(), {.tokenizer = false});
    try {
      (void)convert_model(hf.string(), target, wider);
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kUnsupported) << error.what();
      EXPECT_NE(std::string(error.what()).find("mixture of experts"), std::string::npos) << error.what();
      ++refused;
      continue;
    }
    const Model after = load_model(target.string(), {.tokenizer = false});
    EXPECT_EQ(after.config().mlp_width, before.config().mlp_width + 8);
    const auto batch = TokenBatch::from_rows({{3, 14, 15, 9, 26, 5}, {35, 8, 9}});
    const at::Tensor was = before.forward(batch).logits, is = after.forward(batch).logits;
    EXPECT_TRUE(at::allclose(is, was, 1e-5, 1e-6)) << (is - was).abs().max();
    const auto read_wider = with_spare_neurons(open_checkpoint(hf.string()), 8);
    EXPECT_EQ(model_fingerprint(*read_wider), after.fingerprint());
    EXPECT_TRUE(at::equal(load_model(read_wider, {.tokenizer = false}).forward(batch).logits, is));
    EXPECT_EQ(idle_neurons(*read_wider, 0), idle_neurons(before.checkpoint(), 0) + 8);
    ++widened;
  }
  EXPECT_GE(widened, 20);
  EXPECT_GE(refused, 1);
  EXPECT_THROW((void)convert_model((folder_ / "hf").string(), folder_ / "x.gguf", {.spare_neurons = 8}), Error);
}

// ---- vocabularies

class GgufVocabularyTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufVocabularyTest, GivesTheRecordedIds) {
  EMEND_NEEDS_SHARED();
  const auto folder = emend::testing::shared_dir() / "fixtures" / "tokenizers" / GetParam();
  const auto tokenizer = load_tokenizer(folder);
  auto [vocabulary, notes] = detail::hf_vocabulary(folder, *tokenizer, tokenizer->vocab_size() + 3);
  vocabulary.name = GetParam() == "phi3" ? "phi-3" : "";
  const TemporaryFolder scratch("gguf_vocabulary_" + GetParam());
  GgufMetadata metadata;
  metadata.set_text("general.name", vocabulary.name);
  metadata.append(detail::vocabulary_metadata(vocabulary));
  testing::write_gguf_file(scratch / "v.gguf", metadata, {});
  const auto read = detail::read_gguf_vocabulary(GgufFile(scratch / "v.gguf"));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(static_cast<int64_t>(read->tokens.size()), tokenizer->vocab_size() + 3);
  const auto again = tokenizer_from_gguf(*read);
  std::ifstream in(folder / "cases.json");
  int cases = 0, different = 0;
  for (const auto& entry : nlohmann::json::parse(in)) {
    const auto text = entry["text"].get<std::string>();
    const auto ids = again->encode_ids(text);
    ++cases;
    if (ids == entry["ids"].get<std::vector<int64_t>>()) continue;
    ++different;
    if (notes.empty() && GetParam() != "chatglm3") ADD_FAILURE() << GetParam() << ": " << text.substr(0, 60);
  }
  EXPECT_GT(cases, 200);
  EXPECT_LE(different, cases / 10);
  EXPECT_EQ(again->bos_id(), tokenizer->bos_id());
  EXPECT_EQ(again->eos_id(), tokenizer->eos_id());
  std::cout << "[ figure   ] " << GetParam() << ": " << different << " of " << cases << " texts differ, "
            << notes.size() << " notes\n";
  for (const auto& note : notes) std::cout << "             " << note << "\n";
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, GgufVocabularyTest,
                         ::testing::Values("gpt2", "llama3", "llama2", "phi3", "qwen2", "qwen_v1", "gpt_neox", "falcon",
                                           "smollm2", "chatglm3"),
                         [](const auto& info) { return info.param; });

TEST_F(GgufEdit, APreTokenizerWithoutANameIsRefused) {
  const auto hf = make_folder(folder_, wide_llama());
  nlohmann::json tokenizer = testing::byte_level_json();
  tokenizer["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "x|y"}}}, {"behavior", "Isolated"}, {"invert", false}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  write_file(hf / "tokenizer.json", tokenizer.dump());
  EXPECT_THROW((void)convert_model(hf.string(), original_), Error);
  EXPECT_FALSE(std::filesystem::exists(original_));
  EXPECT_NO_THROW((void)convert_model(hf.string(), original_, {.vocabulary = false}));
  EXPECT_EQ(open_checkpoint(original_.string())->load_tokenizer(), nullptr);
}

}  // namespace gguf_edit_test
}  // namespace emend::models
