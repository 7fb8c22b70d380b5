// A decoder-only language model spread over devices: weights, forward pass, hook points, edit sites.
//
// Goals: one executor for all families, driven by data (family.h); every piece of the forward pass can be run alone
// (restart above a layer, stop below one, project chosen tokens) because editing needs pieces.
// Non-goals: training whole models, encoder-decoder models.
#pragma once

#include <ATen/core/Generator.h>
#include <emend/devices/placement.h>
#include <emend/hooks/hook_point.h>
#include <emend/models/batch.h>
#include <emend/models/config.h>
#include <emend/models/kv_cache.h>

#include <optional>

namespace emend::models {

struct ExpectedTensor;
struct FamilySpec;
class Tokenizer;
class Checkpoint;
class Patch;
struct Prompts;
struct NextToken;
struct Trace;

/// How a stored matrix acts: kOutIn computes x·Wᵀ (nn.Linear), kInOut computes x·W (GPT-2's Conv1D).
enum class Orientation { kOutIn, kInOut };

/// A low-rank addition to one linear layer, for fine-tuning and for running an adapter without merging it:
/// y = x·Wᵀ + b + scale · dropout(x)·Aᵀ·Bᵀ (Hu et al. 2021). Attached with Model::set_adapter.
///   I input width · O output width · R rank
struct LinearAdapter {
  at::Tensor a_RI,
      b_OR;            ///< on the device of the weight, in the model's dtype or wider (results take the model's dtype)
  double scale = 1;    ///< lora_alpha / rank
  double dropout = 0;  ///< share of the inputs left out; only where `generator` is set
  /// CPU generator of the dropout masks; absent outside training. The masks do not depend on the device.
  mutable std::optional<at::Generator> generator;
};

/// The matrix that locate-then-edit methods rewrite in one layer.
struct EditSite {
  int layer = 0;
  std::string weight_name;  ///< as in the checkpoint, e.g. "model.layers.4.mlp.down_proj.weight"
  std::string bias_name;    ///< empty if there is no bias
  Orientation orientation = Orientation::kOutIn;
  int64_t in_features = 0;   ///< F
  int64_t out_features = 0;  ///< D
};

inline const std::vector<int64_t> kNoTokens;  ///< ForwardOptions::logit_tokens for a pass without logits

struct ForwardOptions {
  int first_layer = 0;     ///< layers before it are skipped; needs `hidden`
  at::Tensor hidden = {};  ///< [N,D] input of `first_layer`, any device (routed); undefined: embed the ids
  int end_layer = -1;      ///< one past the last layer to run; -1: all
  /// Keys and values of earlier tokens. Attention reads them; `append` also stores this batch's (in place, no
  /// gradient). Without `append` the cache is only read and gradients flow through this batch's own keys and values.
  KvCache* cache = nullptr;
  bool append = true;
  /// Packed tokens to project to logits: absent = all, empty = none. Ignored (none) when end_layer stops early.
  std::optional<std::vector<int64_t>> logit_tokens = {};
};

struct ForwardResult {
  at::Tensor hidden;     ///< [N,D] output of the last layer that ran (before the final norm), on that layer's device
  at::Tensor logits;     ///< [M,V] on the head's device, in the model's compute dtype; undefined if none were asked for
  bool stopped = false;  ///< a hook ended the pass

  /// logits; throws Error(kInvalidArgument) where a hook ended the pass before there were any.
  [[nodiscard]] const at::Tensor& needed_logits() const;
  /// hidden; throws Error(kInvalidArgument) where a hook ended the pass.
  [[nodiscard]] const at::Tensor& needed_hidden() const;
};

// What passes over a batch need on every device besides the weights: indices, masks, rotary tables. They are made on
// the host and copied at a device's first layer, which stalls a GPU at every pass. Who runs a batch often keeps them.

struct PassTables;  ///< of one batch, in front of one state of a cache

/// While it lives, passes of this thread take from `kept` what they need, if that was made for the same batch, cache
/// lengths and model, and otherwise put there what they have made. Scopes nest.
class KeptTables {
 public:
  explicit KeptTables(std::shared_ptr<PassTables>& kept) noexcept;
  ~KeptTables();
  KeptTables(const KeptTables&) = delete;
  KeptTables& operator=(const KeptTables&) = delete;

 private:
  std::shared_ptr<PassTables>* before_;
};

class Model {
 public:
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  [[nodiscard]] const ModelConfig& config() const noexcept;  ///< what config.json says, in emend's terms
  [[nodiscard]] const FamilySpec& family() const noexcept;
  [[nodiscard]] const devices::PlacementPlan& placement() const noexcept;
  [[nodiscard]] int n_layers() const noexcept { return static_cast<int>(config().n_layers); }
  /// The first layer that it has: 0, or where a compute copy begins (compute_copy.h).
  [[nodiscard]] int first_layer() const noexcept;
  [[nodiscard]] int64_t hidden_size() const noexcept { return config().hidden_size; }
  [[nodiscard]] int64_t vocab_size() const noexcept { return config().vocab_size; }
  /// dtype of the weights and activations (float32 or bfloat16; float64 for tests).
  [[nodiscard]] at::ScalarType dtype() const noexcept;
  [[nodiscard]] int64_t parameter_count() const noexcept;

  /// The tokenizer that came with the checkpoint. Throws Error(kNotFound) if there was none.
  [[nodiscard]] const Tokenizer& tokenizer() const;
  [[nodiscard]] bool has_tokenizer() const noexcept;

  /// Runs the batch. Gradients follow the caller's grad mode; weights never require gradients unless the caller set
  /// them so. Throws Error(kInvalidArgument) for token ids outside the vocabulary (naming row, token and id) or
  /// positions past a learned position table; Error(kDevice) when a device runs out of memory.
  ForwardResult forward(const TokenBatch& batch, const ForwardOptions& options = {}) const;

  /// Final norm and head on [M,D] rows of the residual stream (any device: routed to the head's, the smaller operand
  /// moves). `raw_head` leaves out logit soft-caps, as the published editors compute the loss at `v_loss_layer`.
  [[nodiscard]] at::Tensor project(const at::Tensor& hidden, bool raw_head = false) const;

  [[nodiscard]] hooks::HookTable& hooks() const noexcept;  ///< where HookSession attaches
  /// Whether a hook or an adapter is attached. Passes may then compute what fingerprints of weights do not tell, so
  /// nothing that comes of them may be kept under one.
  [[nodiscard]] bool has_attachments() const noexcept;
  /// Whether the family has such a place: plain MLPs have no gate, dense models no router.
  [[nodiscard]] bool has_site(hooks::Site site) const noexcept;

  /// For texts in one line (trace.h): logits, captures of `sites`, and changes on the way. Sites and patches that the
  /// pass does not meet are errors, as are those that the family lacks (kUnsupported).
  [[nodiscard]] Trace trace(const Prompts& prompts, const std::vector<hooks::SiteRef>& sites = {},
                            const std::vector<Patch>& patches = {}) const;
  ForwardResult forward(const Prompts& prompts) const;
  /// The `count` likeliest tokens behind the first prompt, the likeliest first.
  [[nodiscard]] std::vector<NextToken> next_tokens(const Prompts& prompt, int64_t count) const;

  /// Throws Error(kUnsupported) with the reason where no single matrix is rewritten (Mixtral, …),
  /// Error(kInvalidArgument) for a layer out of range.
  [[nodiscard]] EditSite edit_site(int layer) const;

  /// Weights under the checkpoint's own names and layout; names with the base prefix ("transformer.", "model.") that
  /// the file leaves out, and the head's name in a tied model, are understood too. The returned tensor shares storage
  /// with the model; only apply_delta and EditTransaction write to it. Throws Error(kNotFound) with the closest name.
  [[nodiscard]] at::Tensor weight(const std::string& name) const;
  /// The table of token embeddings [V,D].
  [[nodiscard]] at::Tensor embedding() const;
  /// The matrix that a site's tensor comes out of, read as [out, in] whatever the checkpoint's layout, for kAttnQ, K
  /// and V [heads, d, D] also where it is a part of a fused one; to be read. Throws Error(kUnsupported) if none is.
  [[nodiscard]] at::Tensor weight_at(const hooks::SiteRef& site) const;
  [[nodiscard]] bool has_weight(const std::string& name) const noexcept;
  [[nodiscard]] const std::vector<std::string>& weight_names() const noexcept;
  /// The family's table under the model's own names: files may leave the base prefix out, or have another before it.
  [[nodiscard]] std::vector<ExpectedTensor> weight_table() const;
  /// The weight and, where it also lives on a second device, its copy there (PlacementPlan::tied_copy): who writes to
  /// one in place must write to all. set_weight does.
  [[nodiscard]] std::vector<at::Tensor> weight_copies(const std::string& name) const;
  /// Replaces a weight by another tensor of the same shape, on the same device (any float dtype: cast).
  void set_weight(const std::string& name, const at::Tensor& value);

  /// Weights of the linear layers inside blocks, which can carry an adapter (no experts).
  [[nodiscard]] std::vector<std::string> adaptable_weights() const;
  /// Adds a low-rank addition to a linear layer (replacing an earlier one), or takes it away (null); the weight stays.
  /// Throws Error(kInvalidArgument) if shapes or device do not fit, Error(kNotFound) if the weight cannot carry one.
  void set_adapter(const std::string& weight, std::shared_ptr<const LinearAdapter> adapter);

  /// sha256 over names, dtypes, shapes and bytes of the weights in the file, and of what decides the arithmetic in the
  /// configuration. Computed on first use from the checkpoint, not from the (possibly edited) weights.
  [[nodiscard]] const std::string& fingerprint() const;
  /// sha256 over the weights in memory as they compute: compare it with itself, not with fingerprint() of the file.
  [[nodiscard]] std::string current_fingerprint() const;
  /// Where the model came from; used to save it with untouched files carried over.
  [[nodiscard]] const Checkpoint& checkpoint() const noexcept;

  /// Largest number of tokens in a row (position table or max_position_embeddings).
  [[nodiscard]] int64_t max_positions() const noexcept { return config().max_positions; }

  struct State;
  explicit Model(std::unique_ptr<State> state);

 private:
  friend Model compute_copy(const Model& model, at::ScalarType dtype, int first_layer);  // compute_copy.h
  friend Model another_view(const Model& model);
  std::unique_ptr<State> state_;
};

}  // namespace emend::models
