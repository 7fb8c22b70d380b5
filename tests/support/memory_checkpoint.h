// A checkpoint that was never a file: configuration and tensors in memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <map>
#include <utility>

namespace emend::models {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

class MemoryCheckpoint : public Checkpoint {
 public:
  /// `tensors` under Hugging Face names, on the CPU; `config` as config.json has it.
  MemoryCheckpoint(nlohmann::json config, NamedTensors tensors, std::string name = "memory")
      : Checkpoint(std::move(name), "memory", std::move(config)) {
    for (auto& [tensor_name, tensor] : tensors) {
      TensorInfo info;
      info.name = tensor_name;
      info.dtype = tensor.scalar_type();
      info.shape = tensor.sizes().vec();
      info.bytes = tensor.nbytes();
      tensors_.push_back(std::move(info));
      values_.emplace(tensor_name, tensor.detach().contiguous());
    }
  }

  /// A copy, so that edits of a model never reach the checkpoint.
  [[nodiscard]] at::Tensor read(const std::string& name) const override {
    const auto it = values_.find(name);
    if (it == values_.end())
      throw Error(ErrorClass::kNotFound,
                  {path_.string(), "no tensor \"" + name + "\"", "one of the checkpoint's tensors", ""});
    return it->second.clone();
  }

 private:
  [[nodiscard]] std::string hash() const override {
    Sha256 hash;
    for (const auto& [name, tensor] : values_) detail::hash_tensor(hash, name, tensor);
    return hash.hex();
  }

  std::map<std::string, at::Tensor> values_;
};

/// A checkpoint of random weights for a family's debug flavour (or any configuration): matrices with standard deviation
/// 0.2, norm weights around 1. The same seed gives the same weights.
///   family  where it is not one of families.def
[[nodiscard]] inline std::shared_ptr<const Checkpoint> random_checkpoint(const nlohmann::json& config, uint64_t seed,
                                                                         const FamilySpec* family_or_null = nullptr) {
  const FamilySpec& family = family_of(config, "config", family_or_null);
  const ModelConfig parsed = parse_config(config, "config", family);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  NamedTensors tensors;
  for (const ExpectedTensor& expected : expected_tensors(family, parsed)) {
    const bool norm = expected.shape.size() == 1 && !expected.bias;
    at::Tensor value = at::normal(0.0, norm ? 0.1 : 0.2, expected.shape, generator, at::TensorOptions(at::kFloat));
    if (norm && !parsed.norm_one_plus) value.add_(1);
    tensors.emplace_back(expected.name, value);
  }
  return std::make_shared<MemoryCheckpoint>(config, std::move(tensors), "random-" + parsed.family);
}

/// All tensors of a checkpoint.
[[nodiscard]] inline NamedTensors tensors_of(const Checkpoint& checkpoint, at::ScalarType dtype = at::kFloat) {
  NamedTensors all;
  for (const TensorInfo& info : checkpoint.tensors()) all.emplace_back(info.name, checkpoint.read(info.name).to(dtype));
  return all;
}

/// Writes it as a folder, which is made, without a tokenizer.
inline void write_folder(const Checkpoint& checkpoint, const std::filesystem::path& folder,
                         at::ScalarType dtype = at::kFloat) {
  std::filesystem::create_directories(folder);
  write_safetensors(folder / "model.safetensors", tensors_of(checkpoint, dtype), {{"format", "pt"}});
  write_file(folder / "config.json", checkpoint.config().dump(1));
}

}  // namespace emend::models
