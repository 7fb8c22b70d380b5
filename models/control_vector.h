// Directions in the residual stream: one vector a layer, by which what the layer hands on is steered.
//
// As a file: the control vectors that llama.cpp, repeng, EasySteer and others exchange (GGUF, tensors "direction.N").
// Tensor N acts behind block N, counted from 0 as everywhere in emend; llama.cpp's have none behind block 0.
#pragma once

#include <emend/models/model.h>

#include <filesystem>
#include <map>

namespace emend::models {

/// One vector a layer.
struct ControlVector {
  std::string model_hint;            ///< kind of model it was made for ("llama"); empty: not known
  std::map<int, at::Tensor> layers;  ///< block → [D] float32, host
  /// Block → coordinate along the direction, in its lengths, that counts as 0 where states are clamped; none: 0 itself.
  std::map<int, double> origin = {};
};

/// First and last layer, both included; -1 leaves an end open.
struct LayerRange {
  int first = -1, last = -1;
  [[nodiscard]] bool contains(int layer) const noexcept { return layer >= first && (last < 0 || layer <= last); }
  /// "4-8", "4" or nothing. Throws Error(kInvalidArgument).
  [[nodiscard]] static LayerRange parse(const std::string& text);
};

/// Throws Error(kNotFound), Error(kCorruption) naming file and tensor if it is no control vector (another architecture,
/// no tensor direction.N, N = 0 unless EasySteer wrote it, another type than F32, several widths, non-finite values),
/// Error(kUnsupported) for one of EasySteer's that is not of hidden states.
[[nodiscard]] ControlVector read_control_vector(const std::filesystem::path& path);
/// Writes what llama.cpp reads, atomically, without block 0. Throws Error(kInvalidArgument) if that is all, Error(kIo).
void write_control_vector(const std::filesystem::path& path, const ControlVector& vector);

/// "made for a model of type "gpt2", this one is "llama": …" where the hint names another kind than the model's, for
/// warnings; empty otherwise.
[[nodiscard]] std::string other_kind(const std::string& model_hint, const Model& model);

struct SteerOptions {
  double strength = 1;
  LayerRange layers = {};
  /// "add": strength times the vector is added. "clamp": the state's coordinate along the vector, in its lengths and
  /// from the vector's origin on, becomes `strength`; "at-least", "at-most": where it is below, above.
  std::string by = "add";
  /// The effect falls linearly to nothing over so many tokens of an answer, and is whole in the prompt; 0: it stays.
  int64_t decay = 0;
};

/// Throws Error(kInvalidArgument) naming `where` and the layers that there are if the vector has none in the range.
void require_directions(const ControlVector& vector, const LayerRange& range, const std::string& where);

/// Throws Error(kInvalidArgument) naming `where` if the vector has another width than the model, a layer that it lacks,
/// or none in the range, and for an unknown `by`. Passes may run meanwhile: nothing is attached.
void require_steering(const Model& model, const ControlVector& vector, const SteerOptions& options,
                      const std::string& where);

/// While the handles live, the model's states are steered behind the layers of the vector that are in the range.
/// Throws as require_steering. No pass may run while handles come or go; the model must outlive them.
[[nodiscard]] std::vector<hooks::HookHandle> attach_steering(const Model& model, const ControlVector& vector,
                                                             const SteerOptions& options = {},
                                                             const std::string& where = "control vector");

}  // namespace emend::models
