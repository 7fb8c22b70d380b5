// A checkpoint that was never a file: configuration and tensors in memory. For tests and for programs that build
// models.
#pragma once

#include <emend/models/checkpoint.h>

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

/// A checkpoint of random weights for a family's debug flavour (or any configuration): matrices with standard deviation
/// 0.2, norm weights around 1. The same seed gives the same weights.
///   family  where it is not one of families.def
[[nodiscard]] std::shared_ptr<const Checkpoint> random_checkpoint(const nlohmann::json& config, uint64_t seed,
                                                                  const FamilySpec* family = nullptr);

}  // namespace emend::models
