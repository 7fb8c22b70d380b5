// A low-rank change of a model as the LoRA file that llama.cpp loads with --lora, next to an unedited GGUF model.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

namespace emend::models {

class Model;

/// W ← W + b·a for one matrix of a block, in paper orientation.
///   R rank · I input width · O output width
struct LoraFactors {
  std::string weight;     ///< as Model::weight_names has it
  at::Tensor a_RI, b_OR;  ///< any float dtype and device; written as float32
};

/// Writes the adapter (atomically). Rows of queries and keys are put into llama.cpp's order, projections that it keeps
/// apart are cut. Returns the names of the GGUF tensors that are adapted. Throws Error(kUnsupported) for a family
/// without a GGUF architecture or a weight that is no block's matrix, Error(kInvalidArgument) for shapes, Error(kIo).
std::vector<std::string> write_gguf_lora(const Model& model, const std::vector<LoraFactors>& factors,
                                         const std::filesystem::path& path);

}  // namespace emend::models
