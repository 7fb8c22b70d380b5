// A checkpoint that was never a file: configuration and tensors in memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <emend/core/error.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <map>
#include <utility>

namespace emend::models {

class MemoryCheckpoint : public Checkpoint {
 public:
  /// `tensors` under Hugging Face names, on the CPU; `config` as config.json has it.
  MemoryCheckpoint(nlohmann::json config, std::vector<std::pair<std::string, at::Tensor>> tensors,
                   std::string name = "memory");

  [[nodiscard]] const std::filesystem::path& path() const override { return name_; }
  [[nodiscard]] std::string format() const override { return "memory"; }
  [[nodiscard]] const nlohmann::json& config() const override { return config_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return infos_; }
  /// A copy, so that edits of a model never reach the checkpoint.
  [[nodiscard]] at::Tensor read(const std::string& name) const override;
  [[nodiscard]] std::unique_ptr<Tokenizer> load_tokenizer() const override;
  [[nodiscard]] std::string fingerprint() const override;

 private:
  std::filesystem::path name_;
  nlohmann::json config_;
  std::map<std::string, at::Tensor> tensors_;
  std::vector<TensorInfo> infos_;
};

inline MemoryCheckpoint::MemoryCheckpoint(nlohmann::json config,
                                          std::vector<std::pair<std::string, at::Tensor>> tensors, std::string name)
    : name_(std::move(name)), config_(std::move(config)) {
  for (auto& [tensor_name, tensor] : tensors) {
    TensorInfo info;
    info.name = tensor_name;
    info.dtype = tensor.scalar_type();
    info.shape = tensor.sizes().vec();
    info.bytes = tensor.nbytes();
    infos_.push_back(std::move(info));
    tensors_.emplace(tensor_name, tensor.detach().contiguous());
  }
}

inline at::Tensor MemoryCheckpoint::read(const std::string& name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end())
    throw Error(ErrorClass::kNotFound,
                {name_.string(), "no tensor \"" + name + "\"", "one of the checkpoint's tensors", ""});
  return it->second.clone();
}

inline std::unique_ptr<Tokenizer> MemoryCheckpoint::load_tokenizer() const {
  return nullptr;
}

inline std::string MemoryCheckpoint::fingerprint() const {
  Sha256 hash;
  for (const auto& [name, tensor] : tensors_) detail::hash_tensor(hash, name, tensor);
  return hash.hex();
}

/// A checkpoint of random weights for a family's debug flavour (or any configuration): matrices with standard deviation
/// 0.2, norm weights around 1. The same seed gives the same weights.
///   family  where it is not one of families.def
[[nodiscard]] inline std::shared_ptr<const Checkpoint> random_checkpoint(const nlohmann::json& config, uint64_t seed,
                                                                         const FamilySpec* family_or_null = nullptr) {
  const FamilySpec& family = family_of(config, "config", family_or_null);
  const ModelConfig parsed = parse_config(config, "config", family);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const ExpectedTensor& expected : expected_tensors(family, parsed)) {
    const bool norm = expected.shape.size() == 1 && !expected.bias;
    at::Tensor value = at::normal(0.0, norm ? 0.1 : 0.2, expected.shape, generator, at::TensorOptions(at::kFloat));
    if (norm && !parsed.norm_one_plus) value.add_(1);
    tensors.emplace_back(expected.name, value);
  }
  return std::make_shared<MemoryCheckpoint>(config, std::move(tensors), "random-" + parsed.family);
}

}  // namespace emend::models
