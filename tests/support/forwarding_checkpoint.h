// A checkpoint with the weights of another one and a tokenizer of its own.
#pragma once

#include <emend/models/checkpoint.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emend::testing {

class ForwardingCheckpoint final : public models::Checkpoint {
 public:
  using MakeTokenizer = std::function<std::unique_ptr<models::Tokenizer>()>;
  ForwardingCheckpoint(std::shared_ptr<const models::Checkpoint> inner, MakeTokenizer make_tokenizer)
      : inner_(std::move(inner)), make_tokenizer_(std::move(make_tokenizer)) {}
  [[nodiscard]] const std::filesystem::path& path() const override { return inner_->path(); }
  [[nodiscard]] std::string format() const override { return inner_->format(); }
  [[nodiscard]] const nlohmann::json& config() const override { return inner_->config(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return inner_->tensors(); }
  [[nodiscard]] at::Tensor read(const std::string& name) const override { return inner_->read(name); }
  [[nodiscard]] std::unique_ptr<models::Tokenizer> load_tokenizer() const override { return make_tokenizer_(); }
  [[nodiscard]] std::string fingerprint() const override { return inner_->fingerprint(); }

 private:
  std::shared_ptr<const models::Checkpoint> inner_;
  MakeTokenizer make_tokenizer_;
};

}  // namespace emend::testing
