// Directions in the residual stream: one vector a layer, added to what the layer hands on.
//
// As a file: the control vectors that llama.cpp, repeng and others exchange (GGUF, tensors "direction.N"). Tensor N
// acts behind block N, counted from 0 as everywhere in emend; the format has none behind block 0.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/model.h>

#include <filesystem>
#include <map>
#include <string>

namespace emend::models {

/// One vector a layer.
struct ControlVector {
  std::string model_hint;            ///< what it was made for ("llama"); nothing is decided by it
  std::map<int, at::Tensor> layers;  ///< block → [D] float32, host
};

/// First and last layer, both included; -1 leaves an end open.
struct LayerRange {
  int first = -1, last = -1;
  [[nodiscard]] bool contains(int layer) const noexcept { return layer >= first && (last < 0 || layer <= last); }
};

/// Throws Error(kNotFound), Error(kCorruption) naming file and tensor for a file that is no control vector (another
/// architecture, no tensor direction.N with N ≥ 1, another type than F32, several widths, values that are not finite).
[[nodiscard]] ControlVector read_control_vector(const std::filesystem::path& path);
/// Writes what llama.cpp reads, atomically; a vector behind block 0 is left out. Throws Error(kInvalidArgument) if
/// nothing is left, Error(kIo).
void write_control_vector(const std::filesystem::path& path, const ControlVector& vector);

/// While it lives, `strength` times each layer's vector is added behind that layer. The model must outlive it. Layers
/// that the vector lacks stay as they are.
class Steering {
 public:
  /// Throws Error(kInvalidArgument) naming `where` if the vector has another width than the model, a layer that it
  /// lacks, or none in the range.
  Steering(const Model& model, const ControlVector& vector, double strength, LayerRange layers = {},
           const std::string& where = "control vector");

 private:
  hooks::HookSession session_;
};

}  // namespace emend::models
