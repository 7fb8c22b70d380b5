// Loading streams: no copy where the dtype stays, else the model plus one tensor. A sharded checkpoint of
// EMEND_LOADING_GIB GiB (default 1) is written as sparse files, which cost no disk.
#include <emend/core/atomic_file.h>
#include <emend/models/checkpoint.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/model.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "support/sanitizer.h"

namespace emend::models {
namespace loading_memory_test {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kMiB = 1 << 20;
// Allocator, tables of names, the sampling thread; freed blocks that the sanitizer keeps.
constexpr int64_t kSlack = (testing::kAddressSanitizer ? 256 : 64) * kMiB;

// "RssAnon:   123 kB" of /proc/self/status or "MemAvailable" of /proc/meminfo, in bytes.
int64_t proc_bytes(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return -1;
}
int64_t anonymous() {
  return proc_bytes("/proc/self/status", "RssAnon");
}
int64_t resident() {
  return proc_bytes("/proc/self/status", "VmRSS");
}

// The largest values while it lives, looked at every millisecond, relative to the beginning.
class PeakMemory {
 public:
  PeakMemory() : thread_([this] { watch(); }) {}
  ~PeakMemory() { stop(); }
  void stop() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
  }
  [[nodiscard]] int64_t anonymous_growth() const { return anonymous_ - anonymous_before_; }
  [[nodiscard]] int64_t resident_growth() const { return resident_ - resident_before_; }

 private:
  void watch() {
    while (!done_) {
      anonymous_ = std::max(anonymous_, anonymous());
      resident_ = std::max(resident_, resident());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    anonymous_ = std::max(anonymous_, anonymous());
    resident_ = std::max(resident_, resident());
  }
  int64_t anonymous_before_ = anonymous(), resident_before_ = resident();
  int64_t anonymous_ = 0, resident_ = 0;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

class Loading : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* wanted = std::getenv("EMEND_LOADING_GIB")) gib_ = std::max(1L, std::atol(wanted));
    const int64_t size = gib_ << 30;
    if (proc_bytes("/proc/meminfo", "MemAvailable") < 2 * size + (1 << 30))
      GTEST_SKIP() << "needs " << 2 * gib_ + 1 << " GiB of free memory";
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    if (static_cast<int64_t>(fs::space(folder_).available) < size)  // a file system without sparse files
      GTEST_SKIP() << "needs " << gib_ << " GiB of free disk at " << folder_;
  }
  void TearDown() override { fs::remove_all(folder_); }

  // A Llama of `gib` GiB in the dtype, one layer a shard; all weights 0, which takes no disk.
  void write(const char* dtype, int64_t element) {
    config_ = {{"model_type", "llama"},        {"hidden_size", 2048},       {"num_hidden_layers", gib_ * 16 / element},
               {"num_attention_heads", 16},    {"intermediate_size", 8192}, {"vocab_size", 8192},
               {"max_position_embeddings", 64}};
    const ModelConfig config = parse_config(nlohmann::json(config_), "test");
    std::map<int, std::vector<ExpectedTensor>> shards;
    for (const auto& tensor : expected_tensors(family_named("llama"), config)) shards[tensor.layer].push_back(tensor);
    Json index = {{"weight_map", Json::object()}};
    size_ = largest_ = 0;
    for (const auto& [layer, tensors] : shards) {
      const std::string file = "model-" + std::to_string(layer + 2) + ".safetensors";
      Json header;
      int64_t offset = 0;
      for (const auto& tensor : tensors) {
        const int64_t bytes = c10::multiply_integers(tensor.shape) * element;
        header[tensor.name] = {{"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + bytes}}};
        index["weight_map"][tensor.name] = file;
        offset += bytes;
        values_ = std::max(values_, bytes / element);
        size_ += bytes / element;
      }
      std::string text = header.dump();
      text.resize((text.size() + 63) / 64 * 64 - 8 + 64, ' ');
      const uint64_t length = text.size();
      std::string start(reinterpret_cast<const char*>(&length), 8);
      write_file(folder_ / file, start + text);
      fs::resize_file(folder_ / file, start.size() + text.size() + static_cast<size_t>(offset));
    }
    write_file(folder_ / "model.safetensors.index.json", index.dump());
    write_file(folder_ / "config.json", config_.dump());
    largest_ = values_;
  }

  // Loads and says what was seen.
  struct Figures {
    int64_t anonymous, resident;
  };
  Figures load(at::ScalarType dtype) {
    PeakMemory peak;
    const Model model = load_model(folder_.string(), {.dtype = dtype});
    peak.stop();
    EXPECT_EQ(model.parameter_count(), size_);
    const Figures figures{peak.anonymous_growth(), peak.resident_growth()};
    std::cout << "[ figure   ] " << static_cast<double>(size_) / 1e6 << " million weights loaded as "
              << c10::toString(dtype) << ": at most " << figures.anonymous / kMiB << " MiB anonymous, "
              << figures.resident / kMiB << " MiB resident with the mapped files\n";
    return figures;
  }

  int64_t gib_ = 1;
  fs::path folder_ = fs::path(::testing::TempDir()) / ("emend_loading_memory_" + std::to_string(::getpid()));
  Json config_;
  int64_t size_ = 0, largest_ = 0, values_ = 0;  // in values
};

TEST_F(Loading, TheSameDtypeIsNotCopied) {
  write("F32", 4);
  EXPECT_GE(size_ * 4, gib_ << 30);
  const Figures figures = load(at::kFloat);
  EXPECT_LE(figures.anonymous, kSlack);
  EXPECT_LE(figures.resident, size_ * 4 + kSlack);
  write("BF16", 2);
  EXPECT_LE(load(at::kBFloat16).anonymous, kSlack);
}

TEST_F(Loading, AnotherDtypeCostsTheModelAndOneTensor) {
  write("F32", 4);
  Figures figures = load(at::kBFloat16);  // half the file's size
  EXPECT_GE(figures.anonymous, size_ * 2 - kSlack);
  EXPECT_LE(figures.anonymous, size_ * 2 + kSlack);
  EXPECT_LE(figures.resident, size_ * 2 + largest_ * 4 + kSlack);
  gib_ = std::max<int64_t>(1, gib_ / 2);
  write("BF16", 2);
  figures = load(at::kFloat);  // twice the file's size
  EXPECT_LE(figures.anonymous, size_ * 4 + kSlack);
  EXPECT_LE(figures.resident, size_ * 4 + largest_ * 2 + kSlack);
}

}  // namespace loading_memory_test
}  // namespace emend::models
