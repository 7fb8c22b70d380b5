// How each tensor of a checkpoint is made from the tensors of a GGUF file.
#pragma once

#include <emend/core/safetensors.h>
#include <emend/models/gguf/detail/gguf_architecture.h>

#include <deque>
#include <functional>

namespace emend::models::detail {

/// Some rows of a stored tensor, seen as a matrix (elements, for a vector).
struct GgufPiece {
  LocatedTensor source;
  int64_t first_row = 0;
  int64_t rows = 0;
};

/// One tensor under its Hugging Face name.
struct GgufRecipe {
  TensorInfo info;  ///< name, dtype and shape as read_tensor gives them
  ExpectedTensor expected;
  std::vector<GgufPiece> pieces;                      ///< laid one below the other …
  std::shared_ptr<const std::vector<int64_t>> order;  ///< … our row r is row (*order)[r] of them; null: the same order
  bool transposed = false;
  bool plus_one = false;

  /// True if the stored bytes of a single piece are the tensor.
  [[nodiscard]] bool is_plain() const { return pieces.size() == 1 && !order && !transposed && !plus_one; }
};

/// Recipes in the order of the family's table. Tensors that the file lacks have none: the loader reports them.
/// Throws Error(kCorruption) for a stored tensor of the wrong shape, Error(kUnsupported) for one that no recipe uses.
[[nodiscard]] std::vector<GgufRecipe> plan_tensors(const GgufFiles& files, const GgufForm& form,
                                                   const FamilySpec& family, const ModelConfig& config);

/// Carries out a recipe: a view of the mapped file if it is plain and not quantised, else a new tensor.
[[nodiscard]] at::Tensor read_tensor(const GgufRecipe& recipe);

/// The tensors of a file that does not exist yet, and what each of ours becomes in it. Types are F32 until set.
struct GgufLayout {
  std::deque<GgufTensor> tensors;   ///< recipes point to them
  std::vector<GgufRecipe> recipes;  ///< sources have no file
};
[[nodiscard]] GgufLayout new_layout(const GgufForm& form, const FamilySpec& family, const ModelConfig& config);

/// The way back: float32 values of a stored tensor, [rows, columns] or [n], from those of our tensors that it holds.
///   users  the recipes with a piece of `target`; together they cover it
///   read   gives a tensor on the CPU under its name in the family's table
[[nodiscard]] at::Tensor assemble(const GgufTensor& target, const std::vector<const GgufRecipe*>& users,
                                  const std::function<at::Tensor(const std::string&)>& read);

}  // namespace emend::models::detail
