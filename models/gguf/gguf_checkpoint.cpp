#include <ATen/ATen.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/models/gguf/detail/gguf_tensors.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/gguf/gguf_checkpoint.h>

#include <map>

namespace emend::models {
namespace {

class GgufCheckpoint : public Checkpoint {
 public:
  GgufCheckpoint(const std::filesystem::path& path, const FamilySpec* own)
      : Checkpoint(path, "gguf"), files_(path), own_(own) {
    const auto architecture = files_.metadata().required_text("general.architecture");
    const GgufForm& form = detail::gguf_architecture(architecture, path.string(), own);
    config_ = detail::config_from_gguf(files_, architecture, own);
    const std::string as = path.string() + " (as config.json)";
    const FamilySpec& family = family_of(config_, as, own);
    recipes_ = detail::plan_tensors(files_, form, family, parse_config(config_, as, family));
    for (const auto& recipe : recipes_) {
      index_[recipe.info.name] = tensors_.size();
      tensors_.push_back(recipe.info);
    }
  }

  at::Tensor read(const std::string& name) const override {
    const auto it = index_.find(name);
    if (it != index_.end()) return exact_norm(recipes_[it->second], detail::read_tensor(recipes_[it->second]));
    throw Error(ErrorClass::kNotFound, {path_.string(), "no tensor \"" + name + "\"", "",
                                        did_you_mean(name, tensors_, "", [](const auto& info) { return info.name; })});
  }

  std::unique_ptr<Tokenizer> load_tokenizer() const override {
    const auto vocabulary = detail::read_gguf_vocabulary(files_.metadata());
    if (!vocabulary) return nullptr;
    auto kept = detail::kept_tokenizer(files_.metadata(), config_);
    // Another add_bos_token was set since (gguf-set-metadata): it counts, as for llama.cpp.
    if (kept && vocabulary->add_bos.value_or(kept->adds_bos()) == kept->adds_bos()) return kept;
    return tokenizer_from_gguf(*vocabulary, own_ ? &own_->gguf.pre : nullptr);
  }

 private:
  std::string hash() const override {
    Sha256 hash;
    for (const auto& part : files_.parts())
      for (const GgufTensor& tensor : part->tensors()) {
        std::string head = tensor.name + "\n" + to_string(tensor.type);
        for (const int64_t n : tensor.shape) head += " " + std::to_string(n);
        hash.update(head + "\n");
        hash.update(part->data(tensor), tensor.bytes);
      }
    return hash.hex();
  }

  // The values that emend kept of a norm stored as 1 + w, where they are those of the tensor up to rounding.
  at::Tensor exact_norm(const detail::GgufRecipe& recipe, const at::Tensor& values) const {
    if (!recipe.plus_one) return values;
    const std::string key = detail::kNormKey + recipe.expected.name;
    const std::vector<double> kept = files_.metadata().numbers(key);
    if (kept.empty()) return values;
    if (std::ssize(kept) != values.numel())
      files_.metadata().fail_key(key, std::to_string(kept.size()) + " numbers", std::to_string(values.numel()));
    const at::Tensor exact = at::tensor(kept, at::kDouble).to(values.scalar_type()).view(values.sizes());
    return at::where((exact - values).abs() <= 2.4e-7 * (1 + values.abs()), exact, values);
  }

  detail::GgufFiles files_;
  const FamilySpec* own_;
  std::vector<detail::GgufRecipe> recipes_;
  std::map<std::string, size_t> index_;
};

}  // namespace

std::shared_ptr<const Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path, const FamilySpec* family) {
  return std::make_shared<const GgufCheckpoint>(path, family);
}

}  // namespace emend::models
