// The facts whose targets are being optimised together: everything below the edited place computed once, and the pass
// above it.
//
// Three facts make this exact. Nothing below the place where δ is added depends on δ; causal attention keeps tokens
// before the looked-up one from seeing it; and the loss reads only the labelled tokens. So the set keeps, for every
// row, the hidden state that enters the first layer above (tokens from the looked-up one on) and the keys and values of
// the tokens before it.
//   N tokens of all rows · B facts (slots) · M labelled tokens · K KL rows · D hidden width
#pragma once

#include <emend/editors/steps/targets.h>
#include <emend/models/batch.h>
#include <emend/models/kv_cache.h>
#include <emend/models/model.h>

#include <span>
#include <vector>

namespace emend::editors::detail {

/// One row that is run, from its looked-up token on: for every row of the problem that it begins with. Those have the
/// same looked-up token, with as many tokens before it (all cached), and further tokens that δ is added to.
struct ActiveRow {
  size_t slot = 0;
  bool kl = false;
  const TargetRow* source = nullptr;  ///< the first of them
  std::vector<int64_t> suffix = {};   ///< ids from its looked-up token on; KL rows: that alone
  std::vector<std::pair<size_t, const TargetRow*>> readings = {};  ///< all of them with their numbers; none of a KL row
  std::vector<std::pair<int64_t, const HeldVector*>> held = {};    ///< with its token of the suffix
};

/// Where things are in the packed batch; rebuilt whenever rows leave or enter. Index tensors live where they are used.
struct ActiveIndex {
  models::TokenBatch batch;      ///< all rows
  models::TokenBatch kl_batch;   ///< KL rows alone, for a loss layer below the last
  std::vector<int64_t> lookups;  ///< packed index of each row's looked-up token
  at::Tensor added_N;            ///< of each token that δ is added to
  at::Tensor slot_of_added_N;
  struct Reading {
    size_t slot = 0, number = 0;
    int64_t row = 0;
    bool sampled_context = false;
  };
  std::vector<Reading> readings;  ///< of all rows, in their order
  at::Tensor label_token_M, label_id_M;
  at::Tensor label_weight_M;  ///< the reading's weight / T
  at::Tensor label_slot_M, label_reading_M;
  at::Tensor label_floor_M;  ///< undefined where all are 0
  at::Tensor kl_token_K, kl_slot_K;
  at::Tensor kl_weight_K;                                      ///< kl_factor / KL rows of the fact
  at::Tensor slot_of_reading, reading_labels, reading_weight;  ///< [readings]; labels: T
};

/// The first layer that depends on δ, and is run at every step.
[[nodiscard]] int first_layer_of(const TargetSpec& spec);

class ActiveSet {
 public:
  /// Runs the rows of these problems, which must outlive the set, up to the edited place, and their prefixes through
  /// the layers above. `upper` runs the layers from first_layer_of(spec) on, and those below if it has them: the model
  /// itself, or a compute copy of it. t0 always comes from the model.
  ActiveSet(const models::Model& model, const models::Model& upper, const TargetSpec& spec,
            std::span<const TargetProblem> problems, std::vector<size_t> members);

  [[nodiscard]] size_t size() const noexcept { return members_.size(); }
  /// Index of each slot's problem.
  [[nodiscard]] const std::vector<size_t>& members() const noexcept { return members_; }
  [[nodiscard]] const ActiveIndex& index() const noexcept { return index_; }
  /// [B,D] t0 of a site, work dtype.
  [[nodiscard]] const at::Tensor& initial(size_t site) const { return initial_BD_[site]; }
  /// log p of the KL rows before any change, set by the first loss.
  at::Tensor kl_first_KV;

  /// Residual stream that the two losses read, with δ [B,D] a site added; follows the grad mode.
  struct Hidden {
    at::Tensor label_MD, kl_KD;
    std::vector<at::Tensor> watched_RD;  ///< at each row's looked-up token, a layer each of TargetSpec::watched_layers
  };
  [[nodiscard]] Hidden forward(const std::vector<at::Tensor>& delta_BD);
  /// Sets kl_first_KV from a pass without δ.
  void compare_with_unchanged();

  /// Drops all slots but these (ascending).
  void keep(const std::vector<int64_t>& slots);
  /// Takes over the slots of another set over the same models; they come last. Both must have made their first loss,
  /// or neither.
  void append(ActiveSet&& other);

 private:
  /// Vectors held at packed tokens, and the looked-up tokens of the plain rows.
  struct Changes {
    std::vector<std::pair<int64_t, const HeldVector*>> held;
    std::vector<int64_t> plain;
  };
  [[nodiscard]] Changes changes_in(std::span<const TargetProblem> problems,
                                   const std::vector<std::vector<int64_t>>& ids) const;
  [[nodiscard]] at::Tensor observe(size_t site, const at::Tensor& x, const Changes& changes, bool take_initial);
  void read_initial(std::span<const TargetProblem> problems, const std::vector<std::vector<int64_t>>& ids);
  /// Returns the ids of the rows.
  [[nodiscard]] std::vector<std::vector<int64_t>> build_rows(std::span<const TargetProblem> problems);
  void run_below(std::span<const TargetProblem> problems, const std::vector<std::vector<int64_t>>& ids);
  void fill_cache(const models::TokenBatch& prefixes, const at::Tensor& entering_ND, const Changes& changes);
  void rebuild_index();
  [[nodiscard]] at::Tensor add_to(const at::Tensor& output_ND, const at::Tensor& delta_BD, size_t site) const;
  [[nodiscard]] at::Tensor run_above(const std::vector<at::Tensor>& delta_BD, std::vector<at::Tensor>& watched_RD);

  const models::Model* model_;
  const models::Model* upper_;
  const TargetSpec* spec_;
  int first_layer_ = 0;  ///< first layer that is run at every step
  int end_layer_ = 0;    ///< one past the layer that the nll is read from
  bool above_ = true;    ///< δ is added to what enters first_layer_; otherwise by hooks inside it
  std::vector<size_t> members_;
  std::vector<ActiveRow> rows_;
  std::vector<at::Tensor> initial_BD_;
  at::Tensor entering_ND_;
  models::KvCache cache_, kl_cache_;
  ActiveIndex index_;
  std::shared_ptr<models::PassTables> tables_, kl_tables_;  ///< of index_.batch and index_.kl_batch
};

// The loss at labelled tokens, computed with its gradient in slices so that no [tokens, vocabulary] tensor outlives a
// slice.

struct LabelLoss {
  at::Tensor nll_M;    ///< −log p(label), as far as it is above the floor; work dtype, on the head's device
  at::Tensor hit_M;    ///< label is the argmax (bool); undefined unless asked for
  at::Tensor grad_MD;  ///< of Σ coefficient·nll with respect to the hidden rows; undefined without gradient
};

struct LossWants {
  bool gradient = true;
  bool hits = false;
};

/// `hidden_MD` residual stream at the labelled tokens (its autograd history is not touched); `labels_M`,
/// `coefficient_M` and `floor_M` (undefined: 0) on any device.
[[nodiscard]] LabelLoss label_loss(const models::Model& model, const at::Tensor& hidden_MD, const at::Tensor& labels_M,
                                   const at::Tensor& coefficient_M, const at::Tensor& floor_M, bool raw_head,
                                   const LossWants& wants);

struct DivergenceLoss {
  at::Tensor kl_K;     ///< KL(now ‖ first) of each row
  at::Tensor grad_KD;  ///< of Σ coefficient·kl
};

/// `first_KV` log-probabilities to compare with; if undefined, set from this pass.
[[nodiscard]] DivergenceLoss divergence_loss(const models::Model& model, const at::Tensor& hidden_KD,
                                             const at::Tensor& coefficient_K, at::Tensor& first_KV, bool gradient);

}  // namespace emend::editors::detail
