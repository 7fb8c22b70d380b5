// Single neurons of an MLP: what they contribute to a text, which of them can be given away, and how one is written.
//
//   MLP(x) = W_down (act(W_gate x) ∘ W_up x)      without a gate: W_down act(W_up x)
//   D hidden width · F neurons · E neurons that are written · N tokens of text
#pragma once

#include <emend/editors/steps/apply.h>

#include <set>
#include <span>

namespace emend::editors {

/// LayerFigures::solver of such writes.
inline constexpr const char* kWholeNeurons = "neurons";

/// The weights of one layer's neurons. Without a gate, `gate` is W_up and `up` has no name.
struct MlpWeights {
  models::EditSite gate, up, down;
  std::vector<std::string> biases;  ///< of gate and up; [F] or, where they are one matrix, [2F]
  bool fused = false;               ///< gate rows, then up rows in one matrix

  /// Throws Error(kUnsupported) where there is no single MLP (experts), as Model::edit_site does.
  [[nodiscard]] static MlpWeights of(const models::Model& model, int layer);
  [[nodiscard]] bool gated() const noexcept { return fused || !up.weight_name.empty(); }
};

/// What a layer's MLP does on a text.
struct TextPass {
  at::Tensor inputs_ND;  ///< what enters it, bfloat16
  at::Tensor energy_F;   ///< mean square of the neurons' values, float64

  /// Runs the rows once, up to the last of these layers; each result lies where that layer's systems are solved.
  /// `reader` is the model, or a whole compute copy of it. Throws Error(kCancelled).
  [[nodiscard]] static std::map<int, TextPass> of(const models::Model& model, const models::Model& reader,
                                                  const std::vector<std::vector<int64_t>>& rows,
                                                  const std::vector<int>& layers, const EditContext& context);
};

/// Neurons that are zero and may be used without any loss: those that `emend convert --spare-neurons` added.
[[nodiscard]] std::vector<int64_t> vacant_neurons(const models::Model& model, const MlpWeights& weights);

/// `count` neurons, and behind them the next ones, `more` or as many as there are: vacant ones first, then those that
/// contribute least on the text (E[a²]·‖column of W_down‖²), without those of `used`. What hardly ever moves (a
/// thousandth of the median) is left alone: it may hold an earlier edit, or something else that is rare. Throws
/// Error(kInvalidArgument) if there are not as many.
[[nodiscard]] std::vector<int64_t> spare_neurons(const models::Model& model, const MlpWeights& weights,
                                                 const TextPass& pass, size_t count, size_t more,
                                                 const std::set<int64_t>& used);

/// Whole new rows and columns of neurons.
struct NewNeurons {
  std::vector<int64_t> places;
  at::Tensor gate_ED, up_ED;  ///< rows of W_gate and W_up; up_ED is not used where there is no gate
  at::Tensor down_DE;         ///< columns of W_down
};

/// Writes them, with biases of 0; one delta a weight is added to `deltas` and its figures to `layers`.
void write_neurons(const MlpWeights& weights, const NewNeurons& neurons, EditTransaction& transaction,
                   EditResult& result);

/// Adds change_DE (any float dtype and device) to columns of W_down that write_neurons has written in this transaction:
/// its delta in `result` grows, and the weight is written anew with it, so that one rounding is all there is.
void grow_columns(const MlpWeights& weights, const std::vector<int64_t>& places, const at::Tensor& change_DE,
                  EditTransaction& transaction, EditResult& result);

// Gates: linear functions that are open at some hidden states and shut at all others.
//   N rows · D their width

/// The first `text` rows are many and alike: a start needs only every `step`-th of them.
struct ThinnedText {
  int64_t text = 0, step = 1;
};

/// The rows of which a gate wants something else than to be shut, each as much as usual.
struct GateRule {
  at::Tensor index_E;   ///< different rows, int64
  at::Tensor sign_E;    ///< +1 where it is open, -1 where it is shut, float32
  at::Tensor weight_E;  ///< c, float64; 0: what it does there does not count
};

/// Fits many gates over the same rows. A gate g is the minimiser of
///   ½ Σ_n c_n·max(0, 1 − y_n·gᵀx_n)² + ½ ρ‖g‖²,   y_n = +1 where it is open, −1 where it is shut,
/// a support vector machine with squared hinge, found by Newton's steps over the rows within the margin (Chapelle,
/// Training a Support Vector Machine in the Primal, 2007). There is no offset: an MLP's input need not have one.
/// Few rows lie within the margin of the gate that is found, but most do at first: the start is found on some rows.
class GateFit {
 public:
  /// rows_ND any float dtype, on the device where the systems are solved; usual_N [N] float64, the weight c of each row
  /// for a gate that is shut everywhere. ρ is `ridge` times the mean diagonal of Σ c x xᵀ. Throws Error(kNumeric) if a
  /// row is not finite.
  GateFit(at::Tensor rows_ND, at::Tensor usual_N, ThinnedText start = {}, double ridge = 1e-3);

  /// A gate [D] for each rule, whose tensors are on the rows' device, in float32 there. At most `steps` steps on the
  /// rows of the start, and as many on all. The gates go side by side, and on a CPU so do cores.
  [[nodiscard]] std::vector<at::Tensor> fit(std::span<const GateRule> rules, int64_t steps = 12) const;
  /// [D] in float32 on the rows' device: the minimiser of Σ usual (uᵀx)² + 1/M Σ_m (1 − uᵀx_m)² + ρ‖u‖², which is 1 at
  /// the M rows open_MD and as small as can be at those of the start (ROME's C⁻¹k, for several keys).
  [[nodiscard]] at::Tensor reader(const at::Tensor& open_MD) const;
  /// [D] in float32 on the rows' device: what is nearest to 1 at all rows of the start, by least squares. Hidden states
  /// have so much in common that it is an offset.
  [[nodiscard]] at::Tensor level() const;

 private:
  struct Rows {
    at::Tensor x_ND, usual_N;
    at::Tensor a_DD, sum_D;  ///< lower triangle of Σ usual x xᵀ, Σ usual x, in float64; undefined: not known
  };
  struct Search;
  [[nodiscard]] int64_t text_of_start() const;  // rows
  [[nodiscard]] double start_scale() const;     // for how many rows of the text one of these stands
  [[nodiscard]] GateRule on_start(const GateRule& rule) const;
  [[nodiscard]] Search search(const Rows& rows, const GateRule& rule, at::Tensor gate_D) const;
  [[nodiscard]] at::Tensor minimum(const Rows& rows, Search& search, const at::Tensor& now_N) const;
  void newton(const Rows& rows, std::span<const GateRule> rules, std::vector<at::Tensor>& gates, int64_t steps) const;
  ThinnedText thinned_;
  Rows all_, start_;
  at::Tensor ridge_DD_, chol_DD_;  ///< ρI and the factor of the start's a_DD + ρI, float64
};

}  // namespace emend::editors
