// What a Model owns.
#pragma once

#include <emend/core/sha256.h>
#include <emend/models/checkpoint.h>
#include <emend/models/family.h>
#include <emend/models/model.h>
#include <emend/models/products.h>

#include <array>
#include <mutex>
#include <unordered_map>

namespace emend::models {

namespace detail {

// The weights as the executor sees them: by part, layer and expert, never by name.

struct Linear {
  at::Tensor weight, bias;                            ///< undefined where the family has none
  std::shared_ptr<const LinearAdapter> adapter = {};  ///< usually null
  std::shared_ptr<const PackedWeight> packed = {};    ///< of the weight (of its transpose for a Conv1D); usually null
};

struct PartTable {
  std::array<Linear, kParts> parts;
  [[nodiscard]] Linear& operator[](Part part) { return parts[static_cast<size_t>(part)]; }
  [[nodiscard]] const Linear& operator[](Part part) const { return parts[static_cast<size_t>(part)]; }
};

struct ExpertWeights {
  Linear gate, up, down;
};

struct LayerWeights : PartTable {
  std::vector<ExpertWeights> experts;
};

/// x·Wᵀ + b, or x·W + b for a Conv1D, on packed rows; plus the adapter's share.
[[nodiscard]] at::Tensor apply_linear(const at::Tensor& x, const Linear& linear, bool conv1d);

/// How a tensor enters a fingerprint: name, dtype, shape and bytes, on the CPU.
void hash_tensor(Sha256& hash, const std::string& name, const at::Tensor& tensor);
/// All of them, in the order of their names.
[[nodiscard]] Sha256 hash_tensors(std::vector<std::string> names,
                                  const std::function<at::Tensor(const std::string&)>& read);

}  // namespace detail

struct Model::State {
  State(ModelConfig c, const FamilySpec& f, devices::PlacementPlan p)
      : config(std::move(c)),
        family(&f),
        plan(std::move(p)),
        layers(config.n_layers),
        hooks(static_cast<int>(config.n_layers)) {}

  struct Weight {
    at::Tensor tensor;
    ExpectedTensor expected;
    at::Tensor copy;  ///< the head's own copy of a tied embedding on another device (PlacementPlan::tied_copy)
  };

  ModelConfig config;
  const FamilySpec* family;
  devices::PlacementPlan plan;
  at::ScalarType dtype = at::kFloat;
  int first_layer = 0;  ///< layers below it have no weights (a compute copy); 0 for whole models
  detail::PartTable top;
  std::vector<detail::LayerWeights> layers;
  /// Under the checkpoint's own names, in the order of the family's table.
  std::vector<std::string> names;
  std::unordered_map<std::string, Weight> weights;
  /// Other spellings: with the base prefix, the tied head, a duplicate of it in the file.
  std::unordered_map<std::string, std::string> synonyms;
  mutable hooks::HookTable hooks;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Tokenizer> tokenizer;
  mutable std::mutex fingerprint_mutex;
  mutable std::string fingerprint;

  [[nodiscard]] const Weight& find(const std::string& name) const;
  [[nodiscard]] bool conv1d() const noexcept { return family->orientation == Orientation::kInOut; }
};

}  // namespace emend::models
