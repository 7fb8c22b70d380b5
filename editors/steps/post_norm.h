// Families with a norm between the rewritten matrix and the residual stream (ModelConfig::mlp_post_norm): Gemma 2 and
// 3, GLM-4, post-norm OPT. There a change of the matrix's output is not the same change of the layer's output:
//
//   Gemma, GLM   h = x + g⊙m/rms(m)         m the matrix's output, x the stream before it
//   OPT          h = g⊙(s − mean s)/std(s) + b,   s = x + m
//
// A norm's output lies on an ellipsoid, so not every h can be reached. What editors do about it:
//   - δ is optimised where it can be written, at the matrix's output of the last layer, and acts through the norm;
//   - residuals are measured in the stream, at that layer's output, and shared out over the layers as everywhere;
//   - a layer's share is turned into a change of its matrix's output by change_for: the point of the ellipsoid nearest
//     to what is wanted. With one layer that is what the optimisation found.
//   N rows · D hidden width
#pragma once

#include <emend/hooks/site.h>
#include <emend/models/model.h>

namespace emend::editors {

class PostNorm {
 public:
  /// Reads the layer's norm. The model must be of such a family (mlp_post_norm).
  PostNorm(const models::Model& model, int layer);

  /// What the functions below take, in this order: m, and for OPT also x.
  [[nodiscard]] const std::vector<hooks::SiteRef>& sites() const noexcept { return sites_; }

  /// [N, D] what the norm gives: g⊙m/rms(m), or the layer's output (OPT).
  ///   values_ND  of sites(), one device and float dtype
  [[nodiscard]] at::Tensor apply(const std::vector<at::Tensor>& values_ND) const;
  /// [N, D] the layer's output if m were `changed_ND`, from what it is now.
  [[nodiscard]] at::Tensor layer_output(const std::vector<at::Tensor>& values_ND, const at::Tensor& output_ND,
                                        const at::Tensor& changed_ND) const;
  /// [N, D] the change of m after which apply() is as near as possible to `wanted_ND`. The norm's input keeps its mean
  /// and its size (rms or standard deviation).
  [[nodiscard]] at::Tensor change_for(const std::vector<at::Tensor>& values_ND, const at::Tensor& wanted_ND) const;

 private:
  struct Parts {
    at::Tensor gain_D, bias_D;    ///< like the values
    at::Tensor mean_N1, size_N1;  ///< of the norm's input
    at::Tensor input_ND;
  };
  [[nodiscard]] Parts parts(const std::vector<at::Tensor>& values_ND) const;

  std::vector<hooks::SiteRef> sites_;
  at::Tensor gain_D_, bias_D_;  // host, float64
  double eps_ = 0;
  bool centred_ = false;  // LayerNorm
};

}  // namespace emend::editors
