// A few kernels of our own, where LibTorch's operators are bound by launches, allocation and memory: what
// libemend_cuda.so offers for GPUs, and what emend has inside for the host.
//
// Goals: a C ABI of plain functions and structs, so that the plug-in needs neither LibTorch nor emend, and a program
// without it neither CUDA nor nvcc; LibTorch's operators stay the oracle and the way back. Non-goals: products and
// attention, for which there are libraries. All kernels go row by row (kernels.cu); tensors are contiguous unless
// strides are given, `T` is float or bfloat16. devices/kernels.h is what tensors are given to.
#pragma once

#include <cstdint>

namespace emend::devices {

inline constexpr int32_t kKernelPluginAbi = 2;                       ///< raised with every change of this file
inline constexpr char kKernelPluginEntry[] = "emend_kernel_plugin";  ///< the one symbol that a plug-in exports

/// The memory that the pointers lead to: of CUDA devices, or of the host (the same source compiled without nvcc).
enum class KernelMemory : int32_t { kCuda = 0, kHost = 1 };
/// What T is.
enum class KernelDtype : int32_t { kFloat32 = 0, kBFloat16 = 1 };
/// Where and behind what a kernel runs.
struct KernelPlace {
  int32_t device = 0;
  void* stream = nullptr;              ///< a cudaStream_t
  int64_t first_row = 0, end_row = 0;  ///< on the host only: the rows that this thread does
};

/// sum = x + added; normed = sum / sqrt(mean(sum²) + ε) · w, where w is 1 + weight if `one_plus`.
struct AddRmsNorm {
  const void *x, *added, *weight;  ///< T [rows,width]; `added` may be null, and then `sum` is; weight [width]
  void *sum, *normed;
  float* inverse;  ///< [rows] 1 / sqrt(…), for the way back
  int64_t rows, width;
  float epsilon;
  bool one_plus;
};
/// The gradient of x, and of `added`, from those of both results.
struct AddRmsNormBack {
  const void *sum, *weight, *grad_normed, *grad_sum;  ///< grad_sum may be null
  const float* inverse;
  void* grad;
  int64_t rows, width;
  bool one_plus;
};

/// Heads of all tokens on their way to another tensor.
struct HeadPart {
  const void* from;  ///< T, [tokens, heads, size] with these strides; the last dimension has none
  void* to;          ///< T, [rows, heads, slots, size] with the strides below
  int64_t heads, from_token, from_head, to_row, to_head, to_slot;
  bool rotated;   ///< by the tables; else copied
  bool at_slots;  ///< token n goes to row[n], slot[n]; else to row n, slot 0
};
/// y_i = x_i·cos_i + x_p(i)·sin_i, p(i) being the partner of i; `back` is the way of the gradient.
struct RotateHeads {
  HeadPart parts[3];
  int32_t n_parts;
  const void *cos, *sin;      ///< T [tokens, turned]; sin carries its sign
  const int64_t *row, *slot;  ///< [tokens]
  int64_t tokens, size, turned;
  bool interleaved, back;
};

/// key = silu(gate)·up.
struct Gated {
  const void *gate, *up;  ///< T [rows,width], a row every gate_row and up_row numbers
  void* key;              ///< T [rows,width]
  int64_t rows, width, gate_row, up_row;
};
/// The gradients of gate and up from that of the key.
struct GatedBack {
  const void *gate, *up, *grad_key;
  void *grad_gate, *grad_up;  ///< T [rows,width]
  int64_t rows, width, gate_row, up_row;
};

/// −log softmax(logits) at the label, as far as it is above the floor, and its gradient.
struct HeadLoss {
  const void* logits;  ///< T [rows,vocab]
  const int64_t* labels;
  const float *weight, *floor;  ///< [rows] what the label counts; `floor` may be null
  float* nll;                   ///< [rows]
  bool* hit;                    ///< [rows] the label is the most probable
  void* grad;                   ///< T [rows,vocab] of Σ weight·nll; may be null
  int64_t rows, vocab;
};

/// Adam's step of each row, cut back to the ball of radius `limit`. Moments are written in place.
struct BallAdam {
  const float *value, *grad, *limit;  ///< [rows,width]; limit [rows]
  const double *power1, *power2;      ///< [rows] β^t
  float *first, *second, *moved;
  int64_t rows, width;
  double rate, beta1, beta2, epsilon;
};

/// The table that the entry point returns; it lives as long as the library. Functions only start work and give 0, or
/// anything else after a failure, which last_error describes.
struct KernelPlugin {
  int32_t abi;  ///< kKernelPluginAbi of the plug-in; the only field to be read where it differs from the reader's
  KernelMemory memory;
  int (*add_rms_norm)(const AddRmsNorm& work, KernelDtype dtype, const KernelPlace& place);
  int (*add_rms_norm_back)(const AddRmsNormBack& work, KernelDtype dtype, const KernelPlace& place);
  int (*rotate_heads)(const RotateHeads& work, KernelDtype dtype, const KernelPlace& place);
  int (*gated)(const Gated& work, KernelDtype dtype, const KernelPlace& place);
  int (*gated_back)(const GatedBack& work, KernelDtype dtype, const KernelPlace& place);
  int (*head_loss)(const HeadLoss& work, KernelDtype dtype, const KernelPlace& place);
  int (*ball_adam)(const BallAdam& work, const KernelPlace& place);
  const char* (*last_error)();  ///< of this thread's last failed call, or ""
};

}  // namespace emend::devices
