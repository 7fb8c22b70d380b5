// Tiny GGUF files for tests.
#pragma once

#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/models/gguf/detail/gguf_container.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"

namespace emend::testing {

struct NamedTensor {
  std::string name;
  at::Tensor values;  ///< float32
  models::GgmlType type = models::GgmlType::kF32;
};

inline void write_gguf_file(const std::filesystem::path& path, const models::GgufMetadata& metadata,
                            const std::vector<NamedTensor>& tensors, uint64_t alignment = 32) {
  std::vector<models::detail::GgufOutput> outputs;
  for (const NamedTensor& tensor : tensors)
    outputs.push_back({tensor.name, tensor.type, tensor.values.sizes().vec(),
                       [tensor] { return models::detail::encode(tensor.values, tensor.type, tensor.name); }});
  models::detail::write_container(path, metadata, alignment, outputs);
}

/// Metadata and tensors of a file whose tensors are all F32.
inline std::pair<models::GgufMetadata, std::vector<NamedTensor>> gguf_contents(const std::filesystem::path& path) {
  const models::GgufFile file(path);
  models::GgufMetadata metadata;
  for (const auto& key : file.keys()) metadata.copy(key, *file.find(key));
  std::vector<NamedTensor> tensors;
  for (const models::GgufTensor& tensor : file.tensors()) {
    EXPECT_EQ(tensor.type, models::GgmlType::kF32) << tensor.name;
    tensors.push_back({tensor.name, at::from_blob(const_cast<std::byte*>(file.data(tensor)), tensor.shape).clone()});
  }
  return {std::move(metadata), std::move(tensors)};
}

/// A one-layer Llama with 2 heads of 4 and random weights: metadata and tensors, to be spoiled at will.
struct TinyGguf {
  models::GgufMetadata metadata;
  std::vector<NamedTensor> tensors;

  TinyGguf() {
    metadata.set_text("general.architecture", "llama");
    for (const auto& [key, value] : std::vector<std::pair<std::string, int64_t>>{{"block_count", 1},
                                                                                 {"context_length", 16},
                                                                                 {"embedding_length", 8},
                                                                                 {"feed_forward_length", 12},
                                                                                 {"attention.head_count", 2},
                                                                                 {"attention.head_count_kv", 2},
                                                                                 {"rope.dimension_count", 4}})
      metadata.set_integer("llama." + key, value);
    metadata.set_number("llama.attention.layer_norm_rms_epsilon", 1e-5);
    metadata.set_texts("tokenizer.ggml.tokens", {"a", "b", "c"});
    add("token_embd.weight", {10, 8});
    add("output_norm.weight", {8});
    for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"})
      add(std::string("blk.0.") + name + ".weight", {8, 8});
    for (const char* name : {"attn_norm", "ffn_norm"}) add(std::string("blk.0.") + name + ".weight", {8});
    for (const char* name : {"ffn_gate", "ffn_up"}) add(std::string("blk.0.") + name + ".weight", {12, 8});
    add("blk.0.ffn_down.weight", {8, 12});
  }
  void write(const std::filesystem::path& path) const { write_gguf_file(path, metadata, tensors); }

 private:
  void add(const std::string& name, std::vector<int64_t> shape) {
    int64_t values = 1;
    for (const int64_t n : shape) values *= n;
    const auto seed = static_cast<double>(tensors.size());
    tensors.push_back({name, at::sin(at::arange(values, at::kFloat) + seed).reshape(shape)});
  }
};

}  // namespace emend::testing
