// Row orders by hand, and the names of tensors.
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/gguf/detail/gguf_tensors.h>
#include <gtest/gtest.h>

#include <set>

#include "support/debug_models.h"

namespace emend::models::detail {
namespace gguf_layout_test {

using Rows = std::vector<int64_t>;

ModelConfig sizes(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  ModelConfig config;
  config.n_heads = heads;
  config.n_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.hidden_size = heads * head_dim;
  return config;
}

TEST(GgufLayout, LlamaRowsAreStoredAsPairs) {
  const auto& llama = gguf_architecture("llama", "");
  const ModelConfig config = sizes(2, 1, 4);
  // A head's rows 0 1 | 2 3 rotate as (0,2) (1,3): stored 0 2 1 3, so our row 1 is stored row 2.
  EXPECT_EQ(gguf_row_order(llama, config, Part::kQ), (Rows{0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(gguf_row_order(llama, config, Part::kK), (Rows{0, 2, 1, 3}));
  EXPECT_TRUE(gguf_row_order(llama, config, Part::kV).empty());
  EXPECT_TRUE(gguf_row_order(llama, config, Part::kAttnOut).empty());
  EXPECT_TRUE(gguf_row_order(gguf_architecture("qwen2", ""), config, Part::kQ).empty());
}

TEST(GgufLayout, PerHeadRowsBecomeBlocks) {
  ModelConfig config = sizes(2, 2, 2);
  config.qkv = Qkv::kPerHead;  // ours: q0 k0 v0 q1 k1 v1, two rows each; stored: q0 q1 k0 k1 v0 v1
  EXPECT_EQ(gguf_row_order(gguf_architecture("gptneox", ""), config, Part::kQkv),
            (Rows{0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11}));
}

TEST(GgufLayout, PerGroupRowsBecomeBlocks) {
  ModelConfig config = sizes(4, 2, 1);
  config.qkv = Qkv::kPerGroup;  // ours: q0 q1 k0 v0 q2 q3 k1 v1; stored: q0 q1 q2 q3 k0 k1 v0 v1
  EXPECT_EQ(gguf_row_order(gguf_architecture("falcon", ""), config, Part::kQkv), (Rows{0, 1, 4, 6, 2, 3, 5, 7}));
}

TEST(GgufLayout, GroupsAndPairsCombine) {
  ModelConfig config = sizes(2, 1, 4);
  config.qkv = Qkv::kPerGroup;  // InternLM2: q0 q1 k v, four rows each; queries and keys paired, values not
  EXPECT_EQ(gguf_row_order(gguf_architecture("internlm2", ""), config, Part::kQkv),
            (Rows{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15}));
}

TEST(GgufLayout, OrdersArePermutations) {
  for (const auto& [family, flavour] : testing::all_flavours()) {
    const ModelConfig config = parse_config(testing::debug_config(family, flavour), "debug");
    for (const FamilySpec& stored : all_families())
      for (const Part part : {Part::kQ, Part::kK, Part::kQkv}) {
        const Rows order = gguf_row_order(stored.gguf, config, part);
        EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), order.size());
        const int64_t largest = order.empty() ? -1 : *std::max_element(order.begin(), order.end());
        EXPECT_EQ(largest, static_cast<int64_t>(order.size()) - 1);
      }
  }
}

TEST(GgufLayout, StoredNamesAreUnique) {
  for (const auto& [family, flavour] : testing::all_flavours()) {
    if (family == "opt") continue;
    const ModelConfig config = parse_config(testing::debug_config(family, flavour), "debug");
    const GgufLayout layout = new_layout(gguf_architecture_for(config.model_type, ""), family_named(family), config);
    std::set<std::string> names;
    for (const auto& tensor : layout.tensors)
      EXPECT_TRUE(names.insert(tensor.name).second) << family << " " << tensor.name;
  }
}

}  // namespace gguf_layout_test
}  // namespace emend::models::detail
