// docs/adding-a-family.md shows a family; this compiles it and puts it through the conformance suite.
#include <emend/core/atomic_file.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

#include "support/family_suite.h"
#include "support/gguf_builder.h"

namespace emend::models {

FamilySpec toy_family();

namespace adding_a_family_test {

class ToyFamily : public ::testing::Test {
 protected:
  FamilySpec family_ = toy_family();
  nlohmann::json config_ = nlohmann::json::parse(family_.debug.front().config);

  std::shared_ptr<const Checkpoint> checkpoint() { return random_checkpoint(config_, 3, &family_); }
  Model load(std::shared_ptr<const Checkpoint> from) { return load_model(std::move(from), {.family = &family_}); }
  testing::FamilySuite suite() { return testing::FamilySuite(load(checkpoint())); }
};

TEST_F(ToyFamily, TheGuideShowsThisVeryFile) {
  const std::filesystem::path root(EMEND_SOURCE_DIR);
  const std::string guide = read_file(root / "docs" / "adding-a-family.md"),
                    source = read_file(root / "tests" / "unit" / "toy_family.cpp");
  EXPECT_NE(guide.find("```cpp\n" + source + "```"), std::string::npos)
      << "copy tests/unit/toy_family.cpp into the guide";
  EXPECT_LT(std::count(source.begin(), source.end(), '\n'), 80);
}

TEST_F(ToyFamily, ConformsLikeTheOthers) {
  suite().every_site_fires();
  suite().every_site_can_be_edited();
  suite().packing_changes_nothing(2e-5);
  suite().restart_equals_whole(2e-5);
  suite().cache_equals_whole(2e-5);
  suite().edit_site_is_oriented(2e-5);
}

TEST_F(ToyFamily, SaysWhatItCannotDo) {
  config_["use_memory"] = true;
  EXPECT_THROW((void)parse_config(config_, "config.json", family_), Error);
  EXPECT_THROW((void)parse_config(config_, "config.json"), Error);  // not in families.def
}

// To GGUF and back with nothing but the family's own file, once by the kept configuration and once by metadata alone.
TEST_F(ToyFamily, IsWrittenToAndReadFromGguf) {
  const testing::TemporaryFolder folder("toy_gguf");
  const auto original = checkpoint();
  for (const bool keep : {true, false}) {
    const auto path = folder / (keep ? "kept.gguf" : "bare.gguf");
    const auto report = write_gguf(*original, path, {.type = GgmlType::kF32, .keep_config = keep, .family = &family_});
    EXPECT_EQ(report.notes.back(), "llama.cpp does not know this family");
    const GgufFile file(path);
    EXPECT_EQ(file.text("general.architecture"), "toy");
    EXPECT_TRUE(file.find_tensor("blk.1.block_norm.weight"));
    EXPECT_TRUE(file.find_tensor("blk.1.attn_qkv.weight"));
    EXPECT_THROW((void)open_gguf_checkpoint(path), Error);  // not in families.def
    const auto back = open_gguf_checkpoint(path, &family_);
    EXPECT_EQ(back->config().value("ffn_size", 0), keep ? 0 : 128);
    EXPECT_EQ(arithmetic(parse_config(back->config(), "gguf", family_)),
              arithmetic(parse_config(config_, "config.json", family_)));
    ASSERT_EQ(back->tensors().size(), original->tensors().size());
    for (const auto& info : original->tensors())
      EXPECT_TRUE(at::equal(back->read(info.name), original->read(info.name))) << info.name;
    EXPECT_EQ(load(back).weight_names().size(), load(original).weight_names().size());
  }
}

TEST_F(ToyFamily, AnEditedModelIsWrittenOverItsGgufFile) {
  const testing::TemporaryFolder folder("toy_gguf_edited");
  (void)write_gguf(*checkpoint(), folder / "a.gguf", {.type = GgmlType::kF32, .family = &family_});
  const Model model = load(open_gguf_checkpoint(folder / "a.gguf", &family_));
  const std::string name = "model.blocks.1.mlp.down.weight";
  model.weight(name).mul_(2);
  const auto report = write_gguf(model, folder / "b.gguf");
  EXPECT_EQ(std::count_if(report.tensors.begin(), report.tensors.end(), [](const auto& t) { return t.changed; }), 1);
  EXPECT_TRUE(at::equal(open_gguf_checkpoint(folder / "b.gguf", &family_)->read(name), model.weight(name)));
}

TEST_F(ToyFamily, BringsItsPreTokenizer) {
  GgufVocabulary vocabulary;
  vocabulary.source = "toy.gguf";
  vocabulary.model = "gpt2";
  vocabulary.pre = "toy-bpe";
  vocabulary.tokens = {"a", "b"};
  EXPECT_EQ(tokenizer_from_gguf(vocabulary, &family_.gguf.pre)->encode_ids("a b"), (std::vector<int64_t>{0, 1}));
  EXPECT_THROW((void)tokenizer_from_gguf(vocabulary), Error);
}

}  // namespace adding_a_family_test
}  // namespace emend::models
