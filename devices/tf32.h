// CUDA's products of float32 matrices in TF32: the factors rounded to 11 bits, sums in float32.
#pragma once

namespace emend::devices {

/// On while it lives, if `on`; scopes nest. LibTorch keeps this setting for the whole process.
class Tf32Products {
 public:
  explicit Tf32Products(bool on);
  ~Tf32Products();
  Tf32Products(const Tf32Products&) = delete;
  Tf32Products& operator=(const Tf32Products&) = delete;

 private:
  bool on_;
  int before_;
};
/// Whether it is on: what was computed then is not what is computed else.
[[nodiscard]] bool tf32_products();

}  // namespace emend::devices
