#include <emend/core/atomic_file.h>
#include <emend/core/safetensors.h>
#include <gtest/gtest.h>

#include "support/error_of.h"

namespace emend {
namespace safetensors_test {

class SafetensorsTest : public ::testing::Test {
 protected:
  std::filesystem::path path_ = std::filesystem::path(::testing::TempDir()) / "emend_safetensors_test.safetensors";
  void TearDown() override { std::filesystem::remove(path_); }

  void write_raw(const std::string& header, size_t data_bytes) {
    const uint64_t size = header.size();
    std::string text(reinterpret_cast<const char*>(&size), 8);
    write_file(path_, text + header + std::string(data_bytes, '\0'));
  }
  void expect_refused(ErrorClass error_class = ErrorClass::kCorruption) const {
    testing::expect_refused([&] { const SafetensorsFile file(path_); }, error_class, {path_.string()});
  }
};

TEST_F(SafetensorsTest, RoundTripsEveryDtype) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte, at::kBool})
    tensors.emplace_back(c10::toString(dtype), at::arange(6).reshape({2, 3}).to(dtype));
  tensors.emplace_back("transposed", at::rand({3, 5}).t());
  tensors.emplace_back("empty", at::empty({0, 4}));
  write_safetensors(path_, tensors, {{"note", "kept"}});
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata().at("note"), "kept");
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(file.tensor(name), tensor)) << name;
}

TEST_F(SafetensorsTest, ChangesInPlaceDoNotReachTheFile) {
  write_safetensors(path_, {{"w", at::zeros({4})}});
  SafetensorsFile(path_).tensor("w").add_(1);
  EXPECT_EQ(SafetensorsFile(path_).tensor("w").sum().item<float>(), 0.0F);
}

TEST_F(SafetensorsTest, MissingTensorNamesTheClosest) {
  write_safetensors(path_, {{"model.norm.weight", at::zeros({4})}});
  testing::expect_refused([&] { (void)SafetensorsFile(path_).tensor("model.norm.weigth"); }, ErrorClass::kNotFound,
                          {"did you mean \"model.norm.weight\"?"});
}

TEST_F(SafetensorsTest, RefusesHostileHeaders) {
  write_file(path_, "abc");
  expect_refused();
  write_file(path_, std::string(8, '\xff'));
  expect_refused();
  const char* bad[] = {
      R"([])",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}})",                     // bytes ≠ shape
      R"({"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}})",                     // past the end
      R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})",                     // negative
      R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",  // overflow
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}})",                      // reversed
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      R"({"a":{"shape":[1],"data_offsets":[0,4]}})",
      R"({"a":7})",
      R"({"__metadata__":{"k":1}})",
  };
  for (const char* header : bad) {
    write_raw(header, 16);
    SCOPED_TRACE(header);
    expect_refused();
  }
  write_raw(R"({"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 16);
  expect_refused(ErrorClass::kUnsupported);
}

TEST_F(SafetensorsTest, RefusesBytesBehindTheLastTensor) {
  write_safetensors(path_, {{"a", at::ones({2})}}, {});
  write_file(path_, read_file(path_) + "x");
  expect_refused();
}

TEST_F(SafetensorsTest, PatchingBackRestoresEveryByte) {
  write_safetensors(path_, {{"a", at::rand({3, 4})}, {"b", at::rand({5}).to(at::kHalf)}, {"c", at::rand({2})}});
  const std::string before = read_file(path_);
  const at::Tensor old = SafetensorsFile(path_).tensor("b").clone();
  patch_safetensors(path_, path_, {{"b", old + 1}});
  EXPECT_NE(read_file(path_), before);
  EXPECT_TRUE(at::equal(SafetensorsFile(path_).tensor("b"), old + 1));
  patch_safetensors(path_, path_, {{"b", old}});
  EXPECT_EQ(read_file(path_), before);
  EXPECT_THROW(patch_safetensors(path_, path_, {{"b", at::rand({5})}}), Error);
  EXPECT_THROW(patch_safetensors(path_, path_, {{"x", old}}), Error);
}

TEST_F(SafetensorsTest, RefusesDuplicateNamesWhenWriting) {
  EXPECT_THROW(write_safetensors(path_, {{"w", at::zeros({1})}, {"w", at::zeros({1})}}), Error);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace safetensors_test
}  // namespace emend
