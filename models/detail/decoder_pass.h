// One forward pass: the executor that all families share.
#pragma once

#include <emend/devices/kernels.h>
#include <emend/models/detail/attention.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/detail/rotary.h>

namespace emend::models {
namespace detail {

/// x + added (may be undefined) and the family's norm of that over the last dimension. Statistics are float32 at least.
[[nodiscard]] devices::SumAndNorm add_and_norm(at::Tensor x, const at::Tensor& added, const Linear& weights,
                                               const ModelConfig& config);
[[nodiscard]] inline at::Tensor apply_norm(const at::Tensor& x, const Linear& weights, const ModelConfig& config) {
  return add_and_norm(x, {}, weights, config).normed;
}
/// RMS norm of each head of x [N, heads, d].
[[nodiscard]] at::Tensor apply_head_norm(const at::Tensor& x_Nhd, const at::Tensor& weight, const ModelConfig& config);

/// The MLP of a layer on packed rows [N, D]. Runs the hook points inside it.
[[nodiscard]] at::Tensor apply_mlp(const at::Tensor& x_ND, const LayerWeights& weights, const ModelConfig& config,
                                   bool conv1d, const hooks::HookTable& hooks, int layer);

}  // namespace detail

/// What the layers of one device share.
struct DeviceTables {
  detail::AttentionTables attention;
  std::map<int, detail::RotaryTable> rotary;
  at::Tensor logn;
  at::Tensor cache_row, cache_slot;  ///< [N] where each token's keys and values go
};

struct PassTables {
  /// All that decides them.
  struct Key {
    const Model::State* model = nullptr;
    std::vector<int64_t> positions, lengths, columns, row_begin, prefix;
    std::vector<bool> padding;
    detail::KeySource source = detail::KeySource::kOwn;
    bool operator==(const Key&) const = default;
  } key;
  struct Order {
    bool operator()(c10::Device a, c10::Device b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };
  std::map<c10::Device, DeviceTables, Order> devices;
};

class DecoderPass {
 public:
  /// Checks the batch and the options against the model. All references must outlive the pass.
  DecoderPass(const Model::State& model, const TokenBatch& batch, const ForwardOptions& options);
  ForwardResult run();

 private:
  const TokenBatch& checked_batch() const;
  void check_batch() const;
  void check_cache() const;
  void decide_positions();
  at::Tensor embed() const;
  at::Tensor run_layer(int layer, at::Tensor x);
  at::Tensor attention(int layer, const at::Tensor& x);
  void project_qkv(int layer, const at::Tensor& x, at::Tensor& q, at::Tensor& k, at::Tensor& v) const;
  detail::AttentionHook slots_hook(const hooks::HookPoint& point, const DeviceTables& here) const;
  void find_tables();
  void reserve_cache(int layer, const at::Tensor& k_Ngd, DeviceTables& here);
  void store(int layer, const at::Tensor& k_Ngd, const at::Tensor& v_Ngd, DeviceTables& here);
  void with_cached(int layer, at::Tensor& k, at::Tensor& v, const DeviceTables& here) const;
  DeviceTables& tables(int layer);
  const detail::RotaryTable& rotary(int layer, DeviceTables& here);
  const detail::AttentionTables::Mask& mask(int layer, DeviceTables& here);
  at::Tensor add_post_norm(const at::Tensor& branch, Part norm, const detail::LayerWeights& weights) const;
  void remember_in_cache(int first_run, int end_run);

  const Model::State& model_;
  const ModelConfig& config_;
  const TokenBatch& batch_;
  const ForwardOptions& options_;
  int end_layer_;
  int next_layer_;                  ///< first layer that has not finished
  std::vector<int64_t> positions_;  ///< after the family's rule
  std::vector<int64_t> lengths_;    ///< per row, for rotary forms that depend on it
  detail::AttentionLayout layout_;
  std::shared_ptr<PassTables> tables_;
};

namespace detail {

/// Final norm, output projection and head of the model on [M,D] rows.
[[nodiscard]] at::Tensor project_rows(const Model::State& model, const at::Tensor& hidden_MD, bool raw_head,
                                      bool fire_hooks);

}  // namespace detail
}  // namespace emend::models
