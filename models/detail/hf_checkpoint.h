// A Hugging Face folder: config.json and safetensors files.
//
// Every tensor that is read gets a mapping of its own, private to the reader: edits of one model never show in another
// one, nor in what fingerprint() and save_model see. Files stay open, so replacing them on disk changes nothing here.
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/models/checkpoint.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace emend::models::detail {

// The files of a Hugging Face model folder: which ones there are, and writing them.

/// tokenizer.json, tokenizer.model, vocab.json, merges.txt, *.tiktoken, chat templates and the like.
[[nodiscard]] bool is_tokenizer_file(const std::string& name);

/// Copies what is small and lies beside the weights (tokenizer, generation settings, chat template, remote code,
/// licence; not config.json) from one folder to another. Returns the names of all else there that no model needs.
///   tokenizer  false: leave out what is_tokenizer_file says
std::vector<std::string> copy_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                         bool tokenizer = true);

/// Of a numbered file, at most.
inline constexpr uint64_t kShardBytes = 5'000'000'000;
/// Writes tensors (name, stored bytes) as model.safetensors, or in numbered files of at most `shard_bytes` with their
/// index. `read` gives a tensor as it is to be stored; one file is in memory at a time.
void write_weight_files(const std::filesystem::path& folder,
                        const std::vector<std::pair<std::string, uint64_t>>& tensors, uint64_t shard_bytes,
                        const std::function<at::Tensor(const std::string&)>& read);
/// The text of a config.json, with another dtype if one is given.
[[nodiscard]] std::string config_text(const std::string& original, std::optional<at::ScalarType> dtype);

/// Whether a file of this name holds weights as a pickle.
[[nodiscard]] bool is_pickle(const std::filesystem::path& path);
/// What to do with weights in pickle files.
[[nodiscard]] std::string pickle_advice(const std::filesystem::path& folder);

class HfCheckpoint : public Checkpoint {
 public:
  /// `config_name` is another file name than config.json only in tests of old spellings.
  explicit HfCheckpoint(std::filesystem::path folder, const std::string& config_name = "config.json");

  [[nodiscard]] at::Tensor read(const std::string& name) const override;
  [[nodiscard]] std::unique_ptr<Tokenizer> load_tokenizer() const override;

  /// For save_model: the weight files, in the order of their names, and the index text if there is one.
  struct Shard {
    std::filesystem::path path;
    Descriptor descriptor;
    std::unique_ptr<SafetensorsFile> file;  ///< read only for names, metadata and original bytes
  };
  [[nodiscard]] const std::vector<Shard>& shards() const noexcept { return shards_; }
  /// The file that holds each tensor.
  [[nodiscard]] std::map<std::string, std::filesystem::path> files() const;
  /// For messages: the file that holds a tensor, or the file that lists all of them where there is no such tensor.
  [[nodiscard]] std::string file_of(const std::string& tensor) const;
  [[nodiscard]] const std::optional<nlohmann::json>& index() const noexcept { return index_; }
  [[nodiscard]] const std::string& config_text() const noexcept { return config_text_; }

 private:
  [[nodiscard]] std::string hash() const override;
  void open_shards(const std::vector<std::string>& files);
  void read_index(const std::filesystem::path& path);

  std::string config_text_;
  std::optional<nlohmann::json> index_;
  std::vector<Shard> shards_;
  std::map<std::string, size_t> shard_of_;
};

}  // namespace emend::models::detail
