// A checkpoint with the weights of another one and a tokenizer of its own.
#pragma once

#include <emend/models/checkpoint.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emend::testing {

class ForwardingCheckpoint : public models::Checkpoint {
 public:
  explicit ForwardingCheckpoint(std::shared_ptr<const models::Checkpoint> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] const std::filesystem::path& path() const override { return inner_->path(); }
  [[nodiscard]] std::string format() const override { return inner_->format(); }
  [[nodiscard]] const nlohmann::json& config() const override { return inner_->config(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return inner_->tensors(); }
  [[nodiscard]] at::Tensor read(const std::string& name) const override { return inner_->read(name); }
  [[nodiscard]] std::string fingerprint() const override { return inner_->fingerprint(); }

 private:
  std::shared_ptr<const models::Checkpoint> inner_;
};

}  // namespace emend::testing
