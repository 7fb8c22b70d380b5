// Room for edits: neurons of zeros at the end of every MLP. They add nothing, so the model computes what it did.
#pragma once

#include <emend/models/checkpoint.h>

#include <cstdint>
#include <map>

namespace emend::models {

/// Which tensors of a checkpoint grow with `count` neurons more in every MLP, and how: those whose expected shape
/// depends on the width in the family's table.
class SpareNeurons {
 public:
  /// Throws Error(kUnsupported) for a mixture of experts and where config.json does not say the width; what
  /// parse_config throws. `checkpoint` must outlive it.
  SpareNeurons(const Checkpoint& checkpoint, int64_t count);

  /// The tensor's shape with them, in its stored orientation.
  [[nodiscard]] std::vector<int64_t> shape(const TensorInfo& info) const;
  /// The tensor with zeros behind its neurons; gate and up in one matrix each get theirs.
  [[nodiscard]] at::Tensor widened(const std::string& name, const at::Tensor& tensor) const;
  /// config.json with the new width, under the name that it has there.
  [[nodiscard]] nlohmann::ordered_json widened(nlohmann::ordered_json config) const;

 private:
  struct Grown {
    std::vector<int64_t> shape;
    bool fused;
  };
  [[noreturn]] void refuse(const std::string& got) const;

  const Checkpoint& checkpoint_;
  int64_t count_, width_ = 0;             // of all MLPs, without them
  std::vector<std::string> width_names_;  // what config.json may call it
  bool nested_ = false;                   // and in an object of its own (multimodal models)
  std::map<std::string, Grown> shapes_;
};

/// The checkpoint with `count` neurons of zeros more in every MLP; itself for 0. Path and vocabulary are the narrow
/// one's, the fingerprint is that of the folder which convert_model writes with as many. Throws as SpareNeurons does.
[[nodiscard]] std::shared_ptr<const Checkpoint> with_spare_neurons(std::shared_ptr<const Checkpoint> checkpoint,
                                                                   int64_t count);

/// How many neurons of a layer's MLP have a column of zeros in W_down, without loading the model: places that nobody
/// uses. Throws as expected_tensors and Checkpoint::read do.
[[nodiscard]] int64_t idle_neurons(const Checkpoint& checkpoint, int layer);

}  // namespace emend::models
