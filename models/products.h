// Products with the matrices of a model, a count of their arithmetic, and the functions between them.
//
// LibTorch multiplies float32 matrices on a CPU through MKL, which on processors that are not Intel's stays with AVX2
// even where they have AVX-512, and copies the weight at each product. oneDNN, the other library in LibTorch, does not
// stay with AVX2. Measured: docs/performance.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>

namespace emend::models {

enum class Activation;

/// The function of an MLP, entry by entry.
[[nodiscard]] at::Tensor activate(const at::Tensor& x, Activation activation);

/// x·Wᵀ + b, recorded by autograd as at::linear is. `weight_OI` may be any view, so that x·W is product(x, W.t()).
/// Float32 products on a CPU (or a simulated device) whose weight needs no gradient go through oneDNN where that is
/// faster (`has_fast_products()`), the product is large enough to be worth the call, and the weight (or its transpose)
/// is contiguous; those of few rows on processors with AVX2 that are not Intel's read the weight where it lies
/// (detail/dot_products.h); all others are at::linear's.
/// All are float32 products of IEEE numbers; they add in different orders. Where the processor does not multiply
/// bfloat16 (`multiplies_bfloat16()`), products of half-precision numbers on a CPU are computed in float32 and rounded
/// once: LibTorch has a loop for them that takes some thirty times as long. The result lies where x lies.
[[nodiscard]] at::Tensor product(const at::Tensor& x_NI, const at::Tensor& weight_OI, const at::Tensor& bias_O = {});

/// A weight that no longer changes, kept also in the order in which oneDNN multiplies it: LibTorch puts bfloat16
/// weights into that order at every product. Each direction is ordered when it is first needed; threads may share it.
class PackedWeight {
 public:
  /// `weight_OI` may be any view. Nothing where the order is not worth it: small weights, other dtypes than bfloat16,
  /// other devices than the CPU, and processors that do not multiply bfloat16.
  [[nodiscard]] static std::shared_ptr<const PackedWeight> of(const at::Tensor& weight_OI);

  /// x·Wᵀ + b as product() is, recorded by autograd with respect to x.
  [[nodiscard]] at::Tensor product(const at::Tensor& x_NI, const at::Tensor& bias_O) const;

 private:
  struct Order {
    std::once_flag once;
    at::Tensor weight;
  };
  explicit PackedWeight(at::Tensor weight_OI) : weight_OI_(std::move(weight_OI)) {}
  [[nodiscard]] const at::Tensor& ordered(Order& order, bool transposed) const;

  at::Tensor weight_OI_;
  mutable Order forward_, backward_;
};

/// Whether this processor multiplies float32 faster through oneDNN (AVX-512, not Intel's); the same in every run.
[[nodiscard]] bool has_fast_products() noexcept;

/// Whether that device (the host's processor if it is no GPU) multiplies bfloat16 by instructions of its own.
[[nodiscard]] bool multiplies_bfloat16(c10::Device device);

/// Floating-point operations of these products since the program began: two a multiply-add, forward and (where
/// gradients are recorded) backward with respect to inputs and weights. Attention scores, norms and activations are
/// not counted. Differences of two readings are what a phase took.
[[nodiscard]] int64_t linear_flops() noexcept;

}  // namespace emend::models
