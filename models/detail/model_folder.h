// The files of a Hugging Face model folder: which ones there are, copying the small ones, and writing a folder that
// appears whole.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emend::models::detail {

/// "model*.safetensors" and their index.
[[nodiscard]] bool is_weight_file(const std::string& name);
/// tokenizer.json, tokenizer.model, vocab.json, merges.txt, *.tiktoken, chat templates and the like.
[[nodiscard]] bool is_tokenizer_file(const std::string& name);
/// Any file that belongs to a model in such a folder: weights, config.json, tokenizer, generation settings, remote
/// code.
[[nodiscard]] bool is_model_file(const std::string& name);

/// Copies what is small and lies beside the weights (tokenizer, generation settings, chat template, remote code,
/// licence; not config.json) from one folder to another. Returns the new files.
///   tokenizer  false: leave out what is_tokenizer_file says
std::vector<std::filesystem::path> copy_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                                   bool tokenizer = true);

/// Writes tensors (name, stored bytes) as model.safetensors, or in numbered files of at most `shard_bytes` with their
/// index. `read` gives a tensor as it is to be stored; one file is in memory at a time. Returns the names of the files.
std::set<std::string> write_weight_files(const std::filesystem::path& folder,
                                         const std::vector<std::pair<std::string, uint64_t>>& tensors,
                                         uint64_t shard_bytes,
                                         const std::function<at::Tensor(const std::string&)>& read);
/// The text of a config.json, with another dtype if one is given.
[[nodiscard]] std::string config_text(const std::string& original, std::optional<at::ScalarType> dtype);

/// A folder that is filled beside its final place and moved there by commit(). The destructor removes what was not
/// committed.
class StagedFolder {
 public:
  /// Makes "<parent>/.<name>.partial-<pid>". Throws Error(kInvalidArgument) if `target` is a file, or holds a model and
  /// `replace` is false; Error(kIo) if it cannot be made.
  StagedFolder(std::filesystem::path target, bool replace);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  /// Where to write; files directly in it.
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return staging_; }

  /// Moves the files to the target. A new or empty target appears at once, by one rename; into a folder with other
  /// files config.json goes last, so that at no time a half replaced model looks whole. The target's older model files
  /// go; its other files stay. Returns the final paths, sorted.
  std::vector<std::filesystem::path> commit();

 private:
  void replace_files() const;

  std::filesystem::path target_, staging_;
  bool committed_ = false;
};

}  // namespace emend::models::detail
