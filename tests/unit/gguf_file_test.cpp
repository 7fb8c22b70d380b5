// The container: what we write, ggml reads; what ggml writes, we read; every kind of value; messages.
#include <emend/core/error.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/gguf/gguf_file.h>
#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/gguf_builder.h"

namespace emend::models {
namespace gguf_file_test {

using testing::error_of;
using testing::expect_error;
using testing::NamedTensor;
using testing::TemporaryFolder;
using testing::TinyGguf;

class GgufFileTest : public ::testing::Test {
 protected:
  TemporaryFolder folder_{"gguf_file"};
  std::filesystem::path path_ = folder_ / "x.gguf";
};

GgufMetadata every_kind() {
  GgufMetadata metadata;
  metadata.set_integer("n.small", 7);
  metadata.set_integer("n.large", int64_t{1} << 40);
  metadata.set_integer("n.negative", -3);
  metadata.set_number("x", 1e-5);
  metadata.set_flag("yes", true);
  metadata.set_text("text", "größer \xE2\x96\x81");
  metadata.set_text("empty", "");
  metadata.set_texts("texts", {"a", "", "bcd"});
  metadata.set_integers("ints", {1, -2, 3});
  metadata.set_numbers("floats", {0.5F, 1e-5F});
  metadata.set_flags("flags", {true, false});
  return metadata;
}

TEST_F(GgufFileTest, EveryKindOfValueComesBack) {
  GgufMetadata metadata = every_kind();
  metadata.set_integer("n.small", 8);  // replaces in place
  testing::write_gguf_file(path_, metadata, {});
  const GgufFile file(path_);
  EXPECT_EQ(file.keys().size(), 11u);
  EXPECT_EQ(file.keys().front(), "n.small");
  EXPECT_EQ(file.integer("n.small"), 8);
  EXPECT_EQ(file.integer("n.large"), int64_t{1} << 40);
  EXPECT_EQ(file.integer("n.negative"), -3);
  EXPECT_EQ(file.number("x"), 1e-5);  // not 9.99999974e-06: the shortest decimal form
  EXPECT_EQ(file.number("n.small"), 8.0);
  EXPECT_EQ(file.flag("yes"), true);
  EXPECT_EQ(file.text("text"), "größer \xE2\x96\x81");
  EXPECT_EQ(file.text("empty"), "");
  EXPECT_EQ(file.texts("texts"), (std::vector<std::string>{"a", "", "bcd"}));
  EXPECT_EQ(file.integers("ints"), (std::vector<int64_t>{1, -2, 3}));
  EXPECT_EQ(file.numbers("floats"), (std::vector<double>{0.5, 1e-5}));
  EXPECT_EQ(file.integers("flags"), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(file.integer("absent"), std::nullopt);
  EXPECT_TRUE(file.texts("absent").empty());
}

TEST_F(GgufFileTest, CopiedValuesAreTheSameBytes) {
  testing::write_gguf_file(path_, every_kind(), {});
  const GgufFile file(path_);
  GgufMetadata copy;
  for (const auto& key : file.keys()) copy.copy(key, *file.find(key));
  EXPECT_EQ(copy.encoded(), every_kind().encoded());
}

TEST_F(GgufFileTest, IllTypedAndMissingKeysNameFileAndKey) {
  testing::write_gguf_file(path_, every_kind(), {});
  const GgufFile file(path_);
  for (const auto& text : {error_of([&] { (void)file.integer("text"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.integer("yes"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.number("texts"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.text("x"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.flag("n.small"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.texts("ints"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.integers("texts"); }, ErrorClass::kCorruption),
                           error_of([&] { (void)file.required_integer("absent"); }, ErrorClass::kCorruption)})
    EXPECT_NE(text.find(path_.string() + ": key "), std::string::npos) << text;
  expect_error(ErrorClass::kCorruption, {"key a.b: missing; expected a string"},
               [&] { (void)file.required_text("a.b"); });
}

TEST_F(GgufFileTest, GgmlReadsWhatWeWrite) {
  const at::Tensor matrix = at::rand({3, 64}) - 0.5;
  testing::write_gguf_file(
      path_, every_kind(),
      {{"m", matrix, GgmlType::kQ8_0}, {"v", at::arange(5, at::kFloat)}, {"h", matrix, GgmlType::kF16}});
  ggml_context* data = nullptr;
  gguf_context* file = gguf_init_from_file(path_.c_str(), {/*no_alloc=*/false, &data});
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(gguf_get_n_kv(file), 11);
  EXPECT_EQ(gguf_get_val_u32(file, gguf_find_key(file, "n.small")), 7u);
  EXPECT_STREQ(gguf_get_arr_str(file, gguf_find_key(file, "texts"), 2), "bcd");
  const ggml_tensor* m = ggml_get_tensor(data, "m");
  ASSERT_NE(m, nullptr);
  EXPECT_EQ(m->ne[0], 64);
  EXPECT_EQ(m->ne[1], 3);
  EXPECT_EQ(m->type, GGML_TYPE_Q8_0);
  at::Tensor values = at::empty({3, 64});
  ggml_get_type_traits(m->type)->to_float(m->data, values.mutable_data_ptr<float>(), 192);
  EXPECT_LT((values - matrix).abs().max().item<double>(), 0.5 / 127);
  const ggml_tensor* v = ggml_get_tensor(data, "v");
  EXPECT_EQ(static_cast<const float*>(v->data)[4], 4.0F);
  gguf_free(file);
  ggml_free(data);
}

TEST_F(GgufFileTest, WeReadWhatGgmlWrites) {
  ggml_context* context = ggml_init({1 << 20, nullptr, false});
  ggml_tensor* tensor = ggml_new_tensor_3d(context, GGML_TYPE_F32, 4, 3, 2);
  ggml_set_name(tensor, "cube");
  for (int i = 0; i < 24; ++i) static_cast<float*>(tensor->data)[i] = static_cast<float>(i);
  gguf_context* file = gguf_init_empty();
  gguf_set_val_u16(file, "u16", 65535);
  gguf_set_val_i64(file, "i64", -5);
  gguf_set_val_f64(file, "f64", 0.1);
  gguf_set_val_u64(file, "u64", ~uint64_t{0});
  gguf_add_tensor(file, tensor);
  ASSERT_TRUE(gguf_write_to_file(file, path_.c_str(), false));
  gguf_free(file);
  ggml_free(context);

  const GgufFile read(path_);
  EXPECT_EQ(read.integer("u16"), 65535);
  EXPECT_EQ(read.integer("i64"), -5);
  EXPECT_EQ(read.number("f64"), 0.1);
  error_of([&] { (void)read.integer("u64"); }, ErrorClass::kCorruption);  // does not fit
  const GgufTensor* cube = read.find_tensor("cube");
  ASSERT_NE(cube, nullptr);
  EXPECT_EQ(cube->shape, (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(reinterpret_cast<const float*>(read.data(*cube))[23], 23.0F);
}

TEST_F(GgufFileTest, TensorsAreCopiesThatMayBeEditedInPlace) {
  TinyGguf tiny;
  tiny.write(path_);
  const auto checkpoint = open_gguf_checkpoint(path_);
  at::Tensor edited = checkpoint->read("model.norm.weight");
  const float before = edited[0].item<float>();
  edited.add_(1);
  EXPECT_EQ(checkpoint->read("model.norm.weight")[0].item<float>(), before) << "the original has changed";
  EXPECT_EQ(open_gguf_checkpoint(path_)->read("model.norm.weight")[0].item<float>(), before);
}

TEST_F(GgufFileTest, MissingKeysAndTensorsAreNamed) {
  TinyGguf tiny;
  GgufMetadata bare;
  testing::write_gguf_file(path_, bare, tiny.tensors);
  expect_error(ErrorClass::kCorruption, {"key general.architecture: missing"},
               [&] { (void)open_gguf_checkpoint(path_); });
  bare.set_text("general.architecture", "llama");
  testing::write_gguf_file(path_, bare, tiny.tensors);
  expect_error(ErrorClass::kCorruption, {"key llama.embedding_length: missing"},
               [&] { (void)open_gguf_checkpoint(path_); });
  bare.set_text("general.architecture", "rwkv7");
  testing::write_gguf_file(path_, bare, tiny.tensors);
  expect_error(ErrorClass::kUnsupported, {"architecture \"rwkv7\""}, [&] { (void)open_gguf_checkpoint(path_); });
  tiny.tensors.push_back({"blk.0.attn_sinks.weight", at::ones({2})});
  tiny.write(path_);
  expect_error(ErrorClass::kUnsupported, {"blk.0.attn_sinks.weight"}, [&] { (void)open_gguf_checkpoint(path_); });
  tiny.tensors.pop_back();
  tiny.tensors[2].values = at::ones({8, 6});
  tiny.write(path_);
  expect_error(ErrorClass::kCorruption, {"blk.0.attn_q.weight: shape [8, 6]"},
               [&] { (void)open_gguf_checkpoint(path_); });
  error_of([&] { (void)open_gguf_checkpoint(folder_ / "nothing.gguf"); }, ErrorClass::kNotFound);
}

TEST_F(GgufFileTest, AModelInPartsIsOneCheckpoint) {
  TinyGguf whole;
  whole.write(path_);
  GgufMetadata first = whole.metadata, second;
  first.set_integer("split.count", 2);
  first.set_integer("split.no", 0);
  second.set_integer("split.count", 2);
  second.set_integer("split.no", 1);
  const std::vector<NamedTensor> head(whole.tensors.begin(), whole.tensors.begin() + 4);
  const std::vector<NamedTensor> tail(whole.tensors.begin() + 4, whole.tensors.end());
  const auto part1 = folder_ / "m-00001-of-00002.gguf", part2 = folder_ / "m-00002-of-00002.gguf";
  testing::write_gguf_file(part1, first, head);
  error_of([&] { (void)open_gguf_checkpoint(part1); }, ErrorClass::kNotFound);
  testing::write_gguf_file(part2, second, tail);
  const auto parts = open_gguf_checkpoint(part1), one = open_gguf_checkpoint(path_);
  ASSERT_EQ(parts->tensors().size(), one->tensors().size());
  for (const auto& info : one->tensors())
    EXPECT_TRUE(at::equal(parts->read(info.name), one->read(info.name))) << info.name;
  EXPECT_EQ(parts->fingerprint(), one->fingerprint());
  error_of([&] { (void)open_gguf_checkpoint(part2); }, ErrorClass::kInvalidArgument);
  testing::write_gguf_file(part2, second, whole.tensors);
  expect_error(ErrorClass::kCorruption, {"is also in"}, [&] { (void)open_gguf_checkpoint(part1); });
  std::filesystem::copy(part1, folder_ / "renamed.gguf");
  error_of([&] { (void)open_gguf_checkpoint(folder_ / "renamed.gguf"); }, ErrorClass::kInvalidArgument);
}

TEST_F(GgufFileTest, TheFingerprintDependsOnEveryByteOfTheWeights) {
  TinyGguf tiny;
  tiny.write(path_);
  const std::string before = open_gguf_checkpoint(path_)->fingerprint();
  EXPECT_EQ(before.size(), 64u);
  const auto other = folder_ / "other.gguf";
  tiny.write(other);
  EXPECT_EQ(open_gguf_checkpoint(other)->fingerprint(), before);
  tiny.tensors[3].values[1][2] += 1e-6;
  tiny.write(other);
  EXPECT_NE(open_gguf_checkpoint(other)->fingerprint(), before);
}

}  // namespace gguf_file_test
}  // namespace emend::models
