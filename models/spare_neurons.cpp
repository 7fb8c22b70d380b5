#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/models/detail/model_state.h>
#include <emend/models/spare_neurons.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

namespace emend::models {
namespace {

ModelConfig config_of(const Checkpoint& checkpoint, const nlohmann::json& config) {
  const std::string file = checkpoint.path().string();
  return parse_config(config, file, family_of(config, file));
}

class WiderCheckpoint final : public Checkpoint {
 public:
  WiderCheckpoint(std::shared_ptr<const Checkpoint> narrow, int64_t count)
      : Checkpoint(narrow->path(), narrow->format(), {}, narrow->tensors()),
        narrow_(std::move(narrow)),
        spare_(*narrow_, count) {
    config_ = spare_.widened(nlohmann::ordered_json(narrow_->config()));
    for (TensorInfo& info : tensors_) info.shape = spare_.shape(info);
    spare_neurons_ = count;
  }

  [[nodiscard]] at::Tensor read(const std::string& name) const override {
    return spare_.widened(name, narrow_->read(name));
  }
  [[nodiscard]] std::unique_ptr<Tokenizer> load_tokenizer() const override { return narrow_->load_tokenizer(); }

 private:
  [[nodiscard]] std::string hash() const override {
    auto names = mapped(tensors_, &TensorInfo::name);
    return detail::hash_tensors(std::move(names), [&](const std::string& name) { return read(name); }).hex();
  }

  std::shared_ptr<const Checkpoint> narrow_;
  SpareNeurons spare_;
};

}  // namespace

SpareNeurons::SpareNeurons(const Checkpoint& checkpoint, int64_t count) : checkpoint_(checkpoint), count_(count) {
  if (count == 0) return;
  const FamilySpec& family = family_of(checkpoint.config(), checkpoint.path().string());
  const ModelConfig before = config_of(checkpoint, checkpoint.config());
  width_ = before.mlp_width;
  width_names_ = family.keys.mlp_width;
  nested_ = checkpoint.config().contains("text_config") && !family.nested_defaults.empty();
  const ModelConfig after = config_of(checkpoint, widened(nlohmann::ordered_json(checkpoint.config())));
  const auto now = expected_tensors(family, before), then = expected_tensors(family, after);
  std::map<std::string, size_t> grow;
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i].expert >= 0) refuse("a mixture of experts");
    if (now[i].shape != then.at(i).shape) grow[now[i].name] = i;
  }
  if (grow.empty() || after.mlp_width != before.mlp_width + count) refuse("a width that config.json does not say");
  for (const TensorInfo& info : checkpoint.tensors())
    for (const std::string& name : table_spellings(family, info.name))
      if (const auto found = grow.find(name); found != grow.end())
        shapes_[info.name] = {then[found->second].shape, now[found->second].part == Part::kGateUp};
}

std::vector<int64_t> SpareNeurons::shape(const TensorInfo& info) const {
  const auto found = shapes_.find(info.name);
  return found == shapes_.end() ? info.shape : found->second.shape;
}

at::Tensor SpareNeurons::widened(const std::string& name, const at::Tensor& tensor) const {
  const auto found = shapes_.find(name);
  if (found == shapes_.end()) return tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == found->second.shape[static_cast<size_t>(dim)]) continue;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : tensor.chunk(found->second.fused ? 2 : 1, dim)) {
      auto zeros = part.sizes().vec();
      zeros[static_cast<size_t>(dim)] = count_;
      parts.insert(parts.end(), {part, at::zeros(zeros, part.options())});
    }
    return at::cat(parts, dim);
  }
  return tensor;
}

nlohmann::ordered_json SpareNeurons::widened(nlohmann::ordered_json config) const {
  if (count_ == 0) return config;
  auto& sizes = nested_ ? config["text_config"] : config;
  const auto said = std::ranges::find_if(
      width_names_, [&](const std::string& name) { return sizes.contains(name) && sizes[name].is_number_integer(); });
  // Qwen says twice the width.
  const int64_t times = said == width_names_.end() ? 1 : sizes[*said].get<int64_t>() / width_;
  sizes[said == width_names_.end() ? width_names_.front() : *said] = times * (width_ + count_);
  return config;
}

void SpareNeurons::refuse(const std::string& got) const {
  throw Error(ErrorClass::kUnsupported, {checkpoint_.path().string(), got, "plain MLPs of one width",
                                         "leave " + setting("spare_neurons") + " out"});
}

std::shared_ptr<const Checkpoint> with_spare_neurons(std::shared_ptr<const Checkpoint> checkpoint, int64_t count) {
  if (count == 0) return checkpoint;
  return std::make_shared<WiderCheckpoint>(std::move(checkpoint), count);
}

int64_t idle_neurons(const Checkpoint& checkpoint, int layer) {
  const FamilySpec& family = family_of(checkpoint.config(), checkpoint.path().string());
  const ModelConfig config = config_of(checkpoint, checkpoint.config());
  std::string down;
  int64_t dim = 0;
  for (const ExpectedTensor& tensor : expected_tensors(family, config))
    if (tensor.part == Part::kDown && tensor.layer == layer && !tensor.bias) {
      down = tensor.name;
      dim = tensor.shape[0] == config.mlp_width ? 1 : 0;
    }
  for (const TensorInfo& info : checkpoint.tensors())
    for (const std::string& name : table_spellings(family, info.name))
      if (!down.empty() && name == down) return (checkpoint.read(info.name) == 0).all(dim).sum().item<int64_t>();
  return 0;
}

}  // namespace emend::models
