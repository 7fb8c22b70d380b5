#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/core/staged.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

namespace emend {
namespace cache_folder_test {

namespace fs = std::filesystem;
using std::chrono::hours;

class CacheFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("emend_cache_folder_" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "statistics");
  }
  void TearDown() override { fs::remove_all(folder_); }

  // A file of about 4 KiB that was used `age` ago.
  fs::path store(char digit, hours age = hours(0)) {
    const fs::path path = folder_ / "statistics" / (std::string(64, digit) + ".safetensors");
    write_checked(path, {{"cov", at::full({32, 32}, digit, at::kFloat)}}, {{"key", std::string(1, digit)}});
    fs::last_write_time(path, fs::file_time_type::clock::now() - age);
    return path;
  }
  [[nodiscard]] std::string left() const {
    std::string digits;
    for (const auto& entry : list_cache(folder_)) digits += entry.path.filename().string()[0];
    return digits;
  }

  fs::path folder_;
};

TEST_F(CacheFolder, EveryDamageIsSeen) {
  const auto path = store('a');
  ASSERT_TRUE(open_cached(path));
  EXPECT_FALSE(open_cached(folder_ / "nothing"));
  const std::string bytes = read_file(path);
  int refused = 0, checked = 0;
  for (size_t at = 0; at<bytes.size(); at += bytes.size()> 200 ? 13 : 1) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    std::ofstream(path, std::ios::binary) << damaged;
    ++checked;
    try {
      (void)open_cached(path);
    } catch (const Error& error) {
      EXPECT_TRUE(error.error_class() == ErrorClass::kCorruption || error.error_class() == ErrorClass::kUnsupported)
          << error.what();
      ++refused;
    }
  }
  EXPECT_EQ(refused, checked);
  for (const size_t length : {size_t{0}, size_t{7}, bytes.size() / 2, bytes.size() - 1}) {
    write_file(path, bytes.substr(0, length));
    EXPECT_THROW((void)open_cached(path), Error) << length;
    EXPECT_TRUE(fault_of(list_cache(folder_).at(0))) << length;
  }
  write_file(path, bytes);
  EXPECT_FALSE(fault_of(list_cache(folder_).at(0)));
}

TEST_F(CacheFolder, FilesOfEarlierVersionsAreCheckedToo) {
  const auto path = folder_ / "statistics" / (std::string(64, 'b') + ".safetensors");
  const at::Tensor cov = at::ones({4, 4});
  Sha256 hash;
  hash.update(cov.const_data_ptr(), cov.nbytes());
  const std::string sum = hash.hex();
  write_safetensors(path, {{"cov", cov}}, {{"sha256", sum}});
  EXPECT_TRUE(open_cached(path));
  write_safetensors(path, {{"cov", cov * 2}}, {{"sha256", sum}});
  EXPECT_THROW((void)open_cached(path), Error);
  write_safetensors(path, {{"cov", cov}});
  EXPECT_THROW((void)open_cached(path), Error) << "no checksum at all";
  write_safetensors(path, {}, {{"evaluation", "{}"}, {"sha256", sha256_hex("{}")}});
  EXPECT_TRUE(open_cached(path));
  write_safetensors(path, {}, {{"evaluation", "[]"}, {"sha256", sha256_hex("{}")}});
  EXPECT_THROW((void)open_cached(path), Error);
}

TEST_F(CacheFolder, TheLeastRecentlyUsedGoFirst) {
  for (const auto& [digit, age] : std::map<char, hours>{{'a', hours(3)}, {'b', hours(5)}, {'c', hours(1)}})
    (void)store(digit, age);
  EXPECT_EQ(left(), "bac");
  ASSERT_TRUE(open_cached(folder_ / "statistics" / (std::string(64, 'b') + ".safetensors")));  // used: now the newest
  EXPECT_EQ(left(), "acb");
  const uint64_t one = list_cache(folder_)[0].bytes;
  EXPECT_TRUE(prune_cache(folder_, 3 * one).empty());
  EXPECT_EQ(prune_cache(folder_, 2 * one).size(), 1U);
  EXPECT_EQ(left(), "cb");
  const auto kept = folder_ / "statistics" / (std::string(64, 'c') + ".safetensors");
  EXPECT_EQ(prune_cache(folder_, 0, kept).size(), 1U);
  EXPECT_EQ(left(), "c");
}

TEST_F(CacheFolder, OnlyItsOwnFilesAreTouched) {
  (void)store('a');
  const std::vector<std::string> others = {"model.safetensors",
                                           "notes.txt",
                                           "before-12.safetensors",
                                           std::string(63, 'a') + ".safetensors",
                                           std::string(64, 'g') + ".safetensors",
                                           "x.tmp-1-2-3",
                                           "y.tmp-",
                                           "z.tmp-99999999999999-1"};
  for (const auto& name : others) write_file(folder_ / name, "mine");
  fs::create_symlink(folder_ / "notes.txt", folder_ / (std::string(64, 'd') + ".safetensors"));
  EXPECT_EQ(prune_cache(folder_, 0).size(), 1U);
  for (const auto& name : others) EXPECT_TRUE(fs::exists(folder_ / name)) << name;
  EXPECT_TRUE(prune_cache(folder_ / "absent", 0).empty());
}

TEST_F(CacheFolder, WhatKilledProcessesLeftIsRemoved) {
  const auto abandoned = folder_ / "statistics" / (std::string(64, 'a') + ".safetensors.tmp-2147480000-0");
  const auto at_work = folder_ / ("b.tmp-" + std::to_string(::getpid()) + "-0");
  write_file(abandoned, "half");
  write_file(at_work, "half");
  EXPECT_EQ(remove_abandoned(folder_), 0U) << "too young to be sure: another machine may be at work";
  fs::last_write_time(abandoned, fs::file_time_type::clock::now() - hours(2));
  ASSERT_EQ(list_cache(folder_).size(), 1U);
  EXPECT_EQ(list_cache(folder_)[0].kind, "abandoned");
  EXPECT_TRUE(fault_of(list_cache(folder_)[0]));
  EXPECT_EQ(remove_abandoned(folder_), 1U);
  EXPECT_FALSE(fs::exists(abandoned));
  EXPECT_TRUE(fs::exists(at_work));
}

TEST_F(CacheFolder, TheLimitIsReadFromTheEnvironment) {
  ::unsetenv("EMEND_CACHE_GIB");
  EXPECT_EQ(cache_limit(), uint64_t{20} << 30);
  ::setenv("EMEND_CACHE_GIB", "0.5", 1);
  EXPECT_EQ(cache_limit(), uint64_t{1} << 29);
  ::setenv("EMEND_CACHE_GIB", "0", 1);
  EXPECT_EQ(cache_limit(), UINT64_MAX);
  for (const char* bad : {"much", "-1", "5GiB", "nan"}) {
    ::setenv("EMEND_CACHE_GIB", bad, 1);
    EXPECT_THROW((void)cache_limit(), Error) << bad;
  }
  ::unsetenv("EMEND_CACHE_GIB");
}

}  // namespace cache_folder_test
}  // namespace emend
