#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/models/gguf/detail/gguf_tensors.h>

#include <algorithm>
#include <map>

namespace emend::models::detail {
namespace {

// Rows of one stored tensor that a projection fused on our side is cut into.
std::vector<int64_t> cut_rows(const ModelConfig& config, size_t parts, int64_t rows) {
  if (parts == 1) return {rows};
  const int64_t q = config.n_heads * config.head_dim, k = config.n_kv_heads * config.head_dim;
  return {q, k, k};
}

at::Tensor in_file_form(const GgufRecipe& recipe, at::Tensor values) {
  values = values.to(at::kFloat);
  if (recipe.transposed) values = values.t();
  if (recipe.plus_one) values = values + 1;
  return values.contiguous();
}

}  // namespace

GgufLayout new_layout(const GgufArchitecture& architecture, const FamilySpec& family, const ModelConfig& config) {
  GgufLayout layout;
  std::map<std::string, GgufTensor*> stacks;
  for (const ExpectedTensor& expected : expected_tensors(family, config)) {
    GgufRecipe recipe;
    recipe.expected = expected;
    recipe.info.name = expected.name;
    recipe.info.shape = expected.shape;
    recipe.transposed = is_transposed(family, expected);
    recipe.plus_one = is_stored_plus_one(config, expected);
    if (auto order = gguf_row_order(architecture, config, expected.part); !order.empty())
      recipe.order = std::make_shared<const std::vector<int64_t>>(std::move(order));
    std::vector<int64_t> shape = expected.shape;
    if (recipe.transposed) std::reverse(shape.begin(), shape.end());
    const auto names = gguf_names(architecture, config, expected);
    const auto rows = cut_rows(config, names.size(), shape[0]);
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string name = names[i] + (expected.bias ? ".bias" : ".weight");
      if (expected.expert >= 0) {
        GgufTensor*& stack = stacks[name];
        if (!stack)
          stack =
              &layout.tensors.emplace_back(GgufTensor{name, GgmlType::kF32, {config.n_experts, shape[0], shape[1]}});
        recipe.pieces.push_back({{nullptr, stack}, expected.expert * shape[0], shape[0]});
      } else {
        std::vector<int64_t> cut = shape;
        cut[0] = rows[i];
        const GgufTensor& tensor = layout.tensors.emplace_back(GgufTensor{name, GgmlType::kF32, std::move(cut)});
        recipe.pieces.push_back({{nullptr, &tensor}, 0, rows[i]});
      }
    }
    layout.recipes.push_back(std::move(recipe));
  }
  return layout;
}

at::Tensor assemble(const GgufTensor& target, const std::vector<const GgufRecipe*>& users,
                    const std::function<at::Tensor(const std::string&)>& read) {
  if (users.size() == 1 && users[0]->pieces.size() == 1 && !users[0]->order && users[0]->pieces[0].first_row == 0)
    return in_file_form(*users[0], read(users[0]->expected.name));
  const bool matrix = target.shape.size() > 1;
  const int64_t rows = matrix ? target.rows() : target.shape[0];
  at::Tensor result = matrix ? at::empty({rows, target.row_values()}, at::kFloat) : at::empty({rows}, at::kFloat);
  int64_t covered = 0;
  for (const GgufRecipe* recipe : users) {
    const at::Tensor values = in_file_form(*recipe, read(recipe->expected.name));
    std::vector<int64_t> ours, theirs;
    for (int64_t r = 0; r < values.size(0); ++r) {
      int64_t from = recipe->order ? (*recipe->order)[r] : r;
      size_t p = 0;
      while (from >= recipe->pieces[p].rows) from -= recipe->pieces[p++].rows;
      if (recipe->pieces[p].source.tensor != &target) continue;
      ours.push_back(r);
      theirs.push_back(recipe->pieces[p].first_row + from);
    }
    covered += static_cast<int64_t>(ours.size());
    const auto index = [](const std::vector<int64_t>& list) {
      return at::tensor(at::ArrayRef<int64_t>(list), at::kLong);
    };
    result.index_copy_(0, index(theirs), values.index_select(0, index(ours)));
  }
  EMEND_CHECK(covered == rows, "recipes cover " + target.name);
  return result;
}

}  // namespace emend::models::detail
