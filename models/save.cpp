// Writing a model as a Hugging Face folder.
//
// A tensor counts as changed when its weight differs from what the checkpoint gives in the model's own dtype: loading a
// float32 file in bfloat16 changes nothing by itself. Unchanged files are copied; others keep every other byte.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <emend/devices/route.h>
#include <emend/models/detail/hf_checkpoint.h>
#include <emend/models/model.h>
#include <emend/models/tokenizer/tokenizer.h>

namespace emend::models {
namespace {

namespace fs = std::filesystem;

// The weight as the file should hold it. Throws if the narrower dtype cannot hold it.
at::Tensor as_stored(const at::Tensor& weight, at::ScalarType dtype, const std::string& name) {
  const at::Tensor host = devices::to_host(weight.detach(), devices::Purpose::kHost);
  const at::Tensor stored = host.to(dtype);
  if (dtype == at::kHalf && !at::isfinite(stored.sum(at::kFloat)).item<bool>() &&
      !at::isfinite(stored).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"save_model", "tensor \"" + name + "\" has values beyond float16's range",
                                       "at most 65504", "save in bfloat16 or float32"});
  return stored;
}

bool is_changed(const at::Tensor& weight, const at::Tensor& original) {
  return !at::equal(devices::to_host(weight.detach()), original.to(weight.scalar_type()));
}

// One weight file of the checkpoint; returns the names of its changed tensors and adds its bytes to `total`.
std::vector<std::string> save_shard(const Model& model, const detail::HfCheckpoint::Shard& shard,
                                    const fs::path& target, std::optional<at::ScalarType> dtype, uint64_t& total) {
  std::vector<std::string> changed;
  std::map<std::string, at::Tensor> replaced;
  bool converted = false;
  for (const auto& [name, info] : shard.file->tensors()) {
    const at::ScalarType wanted = dtype && at::isFloatingType(info.dtype) ? *dtype : info.dtype;
    const at::Tensor original = shard.file->tensor(name);
    const bool edited = model.has_weight(name) && is_changed(model.weight(name), original);
    total += static_cast<uint64_t>(original.numel()) * c10::elementSize(wanted);
    if (!edited && wanted == info.dtype) continue;
    converted = converted || wanted != info.dtype;
    replaced[name] = as_stored(edited ? model.weight(name) : original, wanted, name);
    changed.push_back(name);
  }
  if (changed.empty()) {
    clone_file(shard.path, target);
  } else if (!converted) {
    patch_safetensors(shard.path, target, replaced);
  } else {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& [name, info] : shard.file->tensors())
      tensors.emplace_back(name, replaced.count(name) ? replaced.at(name) : shard.file->tensor(name));
    write_safetensors(target, tensors, shard.file->metadata());
  }
  return changed;
}

std::vector<std::string> save_from_folder(const Model& model, const detail::HfCheckpoint& source,
                                          const fs::path& folder, std::optional<at::ScalarType> dtype) {
  std::vector<std::string> changed;
  uint64_t total = 0;
  for (const auto& shard : source.shards()) {
    const std::string name = shard.path.filename().string();
    for (auto& tensor : save_shard(model, shard, folder / name, dtype, total)) changed.push_back(std::move(tensor));
  }
  if (source.index()) {
    nlohmann::json index = *source.index();
    if (dtype) index["metadata"]["total_size"] = total;
    const std::string name = "model.safetensors.index.json";
    write_file(folder / name, index.dump(2) + "\n");
  }
  detail::copy_companions(source.path(), folder);
  write_file(folder / "config.json", detail::config_text(source.config_text(), dtype));
  return changed;
}

// All weights anew, in files of at most 5 GB.
std::vector<std::string> save_from_other(const Model& model, const fs::path& folder, at::ScalarType dtype) {
  std::vector<std::string> changed;
  std::vector<std::pair<std::string, uint64_t>> sizes;
  for (const std::string& name : model.weight_names()) {
    const at::Tensor weight = model.weight(name);
    if (is_changed(weight, model.checkpoint().read(name))) changed.push_back(name);
    sizes.emplace_back(name, static_cast<uint64_t>(weight.numel()) * c10::elementSize(dtype));
  }
  // What was not edited is as exact as the file, whatever the model computes in.
  const bool narrow = c10::elementSize(model.dtype()) < 4;
  detail::write_weight_files(folder, sizes, detail::kShardBytes, [&](const std::string& name) {
    const bool original = narrow && std::ranges::count(changed, name) == 0;
    return as_stored(original ? model.checkpoint().read(name) : model.weight(name), dtype, name);
  });
  if (model.has_tokenizer()) save_tokenizer(model.tokenizer(), folder);
  write_file(folder / "config.json", detail::config_text(model.checkpoint().config().dump(2), dtype));
  return changed;
}

// For a folder that is to be replaced.
void require_no_edits(const fs::path& folder) {
  std::error_code none;
  if (fs::directory_iterator(folder / ".emend" / "packs", none) == fs::directory_iterator()) return;
  refuse({folder.string(), "a model whose folder keeps edits, which would go with it", "a place for a model",
          "choose another place; emend list shows its edits"});
}

}  // namespace

bool is_within(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

void require_apart(const fs::path& out, const fs::path& source) {
  if (out.empty()) emend::refuse({"place to write", "an empty path", "a file or folder", "name it"});
  std::error_code failure;
  const fs::path real = fs::canonical(source, failure);
  if (failure) return;  // not from a place
  const auto absolute = fs::absolute(out).lexically_normal();
  const auto named = fs::weakly_canonical(absolute.has_filename() ? absolute : absolute.parent_path(), failure);
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorClass::kInvalidArgument, {out.string(), got, "a place that the model is not read from",
                                               "choose another place; emend apply PACK edits in place, and takes it "
                                               "back"});
  };
  if (named == real || fs::equivalent(out, source, failure)) refuse("the model was loaded from there");
  // Also by its own name: files of a folder may be links that lead out of it.
  for (const auto& place : {named, fs::weakly_canonical(absolute.parent_path(), failure) / absolute.filename()})
    if (is_within(place, real)) refuse("it lies inside of the model " + source.string());
}

std::vector<std::string> save_model(const Model& model, const fs::path& folder, std::optional<at::ScalarType> dtype) {
  if (dtype && *dtype != at::kFloat && *dtype != at::kHalf && *dtype != at::kBFloat16)
    refuse({"save_model", std::string("dtype ") + c10::toString(*dtype), "float32, float16 or bfloat16", ""});
  require_apart(folder, model.checkpoint().path());
  require_no_edits(folder);
  const at::NoGradGuard no_grad;
  std::vector<std::string> changed;
  const auto write = [&](const fs::path& staged) {
    fs::create_directory(staged);
    const auto* source = dynamic_cast<const detail::HfCheckpoint*>(&model.checkpoint());
    changed = source ? save_from_folder(model, *source, staged, dtype)
                     : save_from_other(model, staged, dtype.value_or(at::kFloat));
  };
  write_whole(folder, write, is_model_file);
  return changed;
}

}  // namespace emend::models
