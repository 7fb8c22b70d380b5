// Damaged and hostile files end in an Error, in bounded time and memory.
#include <emend/core/error.h>
#include <emend/models/gguf/gguf_checkpoint.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <random>

#include "support/error_of.h"
#include "support/gguf_builder.h"

namespace emend::models {
namespace gguf_hostile_test {

using testing::TemporaryFolder;
using testing::TinyGguf;

class GgufHostile : public ::testing::Test {
 protected:
  TemporaryFolder folder_{"gguf_hostile"};
  std::filesystem::path path_ = folder_ / "x.gguf";

  std::string good() {
    TinyGguf().write(path_);
    return read_file(path_);
  }

  // Without syncing, which would take most of the time.
  void put(const std::string& bytes) { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }

  // Opens and reads everything; an Error of any class but kIo is fine, anything else is not.
  bool survives(const std::string& bytes) {
    put(bytes);
    try {
      const auto checkpoint = open_gguf_checkpoint(path_);
      for (const auto& info : checkpoint->tensors()) (void)checkpoint->read(info.name);
      (void)checkpoint->load_tokenizer();
      (void)checkpoint->fingerprint();
      return true;
    } catch (const Error& error) {
      EXPECT_NE(error.error_class(), ErrorClass::kIo) << error.what();
      EXPECT_NE(std::string(error.what()).find(path_.string()), std::string::npos) << error.what();
      return false;
    }
  }

  void refuses(const std::string& bytes, ErrorClass expected, const std::string& part) {
    put(bytes);
    const auto message = testing::error_of([&] { (void)open_gguf_checkpoint(path_); }, expected);
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
  }
};

template <class T>
std::string with(std::string bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

// Offset just behind a tensor's name.
size_t after(const std::string& bytes, const std::string& name) {
  return bytes.find(name) + name.size();
}

TEST_F(GgufHostile, TheGoodFileIsAccepted) {
  EXPECT_TRUE(survives(good()));
}

TEST_F(GgufHostile, EveryTruncationIsRefused) {
  const std::string bytes = good();
  const size_t data = bytes.find(std::string(20, '\0'));  // near the end of the header
  for (size_t size = 0; size < bytes.size(); size += size < data + 64 ? 1 : 97) {
    put(bytes.substr(0, size));
    EXPECT_THROW((void)open_gguf_checkpoint(path_), Error) << size << " of " << bytes.size();
  }
}

TEST_F(GgufHostile, PreambleIsChecked) {
  const std::string bytes = good();
  refuses("", ErrorClass::kCorruption, "the magic number needs 4 bytes");
  refuses(with(bytes, 0, 'X'), ErrorClass::kCorruption, "the file begins with bytes 58 47 55 46");
  refuses(with(bytes, 4, uint32_t{1}), ErrorClass::kUnsupported, "GGUF version 1");
  refuses(with(bytes, 4, uint32_t{4}), ErrorClass::kUnsupported, "GGUF version 4");
  refuses(with(bytes, 4, uint32_t{0x03000000}), ErrorClass::kUnsupported, "big-endian");
  for (const uint64_t count : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{1} << 32, uint64_t{100000}}) {
    refuses(with(bytes, 8, count), ErrorClass::kCorruption, "tensors claimed");
    refuses(with(bytes, 16, count), ErrorClass::kCorruption, "keys claimed");
  }
  refuses(with(bytes, 24, uint64_t{1} << 62), ErrorClass::kCorruption, "key 0 claims");
  refuses(with(bytes, 24, uint64_t{70000}), ErrorClass::kCorruption, "key 0 claims 70000 bytes");
}

TEST_F(GgufHostile, ValuesAreChecked) {
  const std::string bytes = good();
  const size_t type = after(bytes, "general.architecture");
  refuses(with(bytes, type, uint32_t{13}), ErrorClass::kCorruption, "general.architecture");
  refuses(with(bytes, type, uint32_t{9}), ErrorClass::kCorruption, "general.architecture");
  refuses(with(bytes, type + 4, uint64_t{1} << 60), ErrorClass::kCorruption, "general.architecture");
  const size_t list = after(bytes, "tokenizer.ggml.tokens");
  refuses(with(bytes, list + 4, uint32_t{9}), ErrorClass::kCorruption, "a flat array");
  for (const uint64_t count : {~uint64_t{0}, uint64_t{1} << 61, uint64_t{1} << 20})
    refuses(with(bytes, list + 8, count), ErrorClass::kCorruption, "tokenizer.ggml.tokens");
  refuses(with(bytes, list + 16, ~uint64_t{0} - 4), ErrorClass::kCorruption, "reaches past the end");
}

TEST_F(GgufHostile, TensorsAreChecked) {
  const std::string bytes = good();
  const size_t at = after(bytes, "token_embd.weight");  // dimensions, two sizes, type, offset
  refuses(with(bytes, at, uint32_t{0}), ErrorClass::kCorruption, "has 0 dimensions");
  refuses(with(bytes, at, uint32_t{5}), ErrorClass::kCorruption, "has 5 dimensions");
  refuses(with(bytes, at + 4, uint64_t{0}), ErrorClass::kCorruption, "a dimension of 0");
  refuses(with(bytes, at + 4, ~uint64_t{0}), ErrorClass::kCorruption, "a dimension of 18446744073709551615");
  refuses(with(with(bytes, at + 4, uint64_t{1} << 40), at + 12, uint64_t{1} << 40), ErrorClass::kCorruption,
          "a dimension of");
  refuses(with(bytes, at + 4, uint64_t{1} << 30), ErrorClass::kCorruption, "occupies");
  refuses(with(bytes, at + 20, uint32_t{26}), ErrorClass::kUnsupported, "is stored as i32");
  refuses(with(bytes, at + 20, uint32_t{4000}), ErrorClass::kUnsupported, "is stored as type 4000");
  refuses(with(bytes, at + 20, uint32_t{2}), ErrorClass::kCorruption,
          "rows of 8 values; expected a multiple of 32 for Q4_0");
  refuses(with(bytes, at + 24, uint64_t{4}), ErrorClass::kCorruption,
          "starts at 4; expected a multiple of the alignment 32");
  refuses(with(bytes, at + 24, ~uint64_t{31}), ErrorClass::kCorruption, "occupies");
  refuses(with(bytes, at + 24, uint64_t{320}), ErrorClass::kCorruption, "overlap");
}

TEST_F(GgufHostile, NamesAndKeysAreUnique) {
  TinyGguf tiny;
  tiny.tensors.push_back(tiny.tensors[0]);
  tiny.write(path_);
  refuses(read_file(path_), ErrorClass::kCorruption, "tensor \"token_embd.weight\" occurs twice");
  GgufMetadata twice;
  twice.set_flag("a", true);
  const std::string entry = twice.encoded();
  const std::string head = with(with("GGUF" + std::string(20, '\0'), 4, uint32_t{3}), 16, uint64_t{2});
  refuses(head + entry + entry, ErrorClass::kCorruption, "key \"a\" occurs twice");
}

TEST_F(GgufHostile, AlignmentIsChecked) {
  for (const int64_t alignment : {0L, 3L, 1L << 21, 1L << 32}) {
    TinyGguf tiny;
    tiny.metadata.set_integer("general.alignment", alignment);
    tiny.write(path_);
    refuses(read_file(path_), ErrorClass::kCorruption, "general.alignment");
  }
  TinyGguf wide;
  wide.metadata.set_integer("general.alignment", 256);
  testing::write_gguf_file(path_, wide.metadata, wide.tensors, 256);
  EXPECT_NO_THROW((void)open_gguf_checkpoint(path_));
}

TEST_F(GgufHostile, SizesAreChecked) {
  const auto refused = [&](const std::string& key, int64_t value, const std::string& part,
                           ErrorClass expected = ErrorClass::kCorruption) {
    TinyGguf tiny;
    tiny.metadata.set_integer(key, value);
    tiny.write(path_);
    refuses(read_file(path_), expected, part);
  };
  refused("llama.block_count", 0, "llama.block_count");
  refused("llama.block_count", 1'000'000'000, "llama.block_count");
  refused("llama.block_count", 4000, "no more blocks than the file has tensors");
  refused("llama.embedding_length", -1, "llama.embedding_length");
  refused("llama.attention.head_count", 0, "llama.attention.head_count");
  refused("llama.attention.head_count", int64_t{1} << 40, "llama.attention.head_count");
  refused("llama.attention.head_count_kv", 0, "llama.attention.head_count_kv");
  refused("llama.attention.head_count_kv", 3, "llama.attention.head_count_kv");
  refused("llama.attention.key_length", int64_t{1} << 50, "llama.attention.key_length");
  refused("llama.attention.value_length", 2, "llama.attention.value_length", ErrorClass::kUnsupported);
  refused("llama.rope.dimension_count", 3, "llama.rope.dimension_count");
  refused("llama.expert_count", 1 << 30, "expert");
  refused("llama.attention.sliding_window", -4, "llama.attention.sliding_window");
  refused("split.count", 100000, "split.count");
}

TEST_F(GgufHostile, AConfigurationKeptInTheFileIsNotTrusted) {
  for (const char* text : {"", "{", "[]", "{\"model_type\": 3}", "{\"model_type\": \"gpt2\"}",
                           "{\"model_type\": \"llama\", \"num_hidden_layers\": 2000000000}"}) {
    TinyGguf tiny;
    tiny.metadata.set_text("emend.config", text);
    tiny.write(path_);
    refuses(read_file(path_), ErrorClass::kCorruption, "emend.config");
  }
  TinyGguf tiny;
  tiny.metadata.set_text("emend.config", std::string(100000, '['));
  tiny.write(path_);
  refuses(read_file(path_), ErrorClass::kCorruption, "emend.config");
}

TEST_F(GgufHostile, RandomDamageNeverGetsThrough) {
  const std::string bytes = good();
  std::mt19937 random(7);
  int accepted = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 2000; ++round) {
    std::string damaged = bytes;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes; ++i) {
      const size_t at = random() % std::min<size_t>(damaged.size(), 1500);  // the header
      damaged[at] = random() % 3 == 0 ? '\xff' : static_cast<char>(damaged[at] ^ (1 << (random() % 8)));
    }
    accepted += survives(damaged);
  }
  EXPECT_LT(accepted, 2000);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(120));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 1 << 20) << "kilobytes";
}

}  // namespace gguf_hostile_test
}  // namespace emend::models
