// The files of a Hugging Face model folder: which ones there are, and writing them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace emend::models::detail {

/// "model*.safetensors" and their index.
[[nodiscard]] bool is_weight_file(const std::string& name);
/// tokenizer.json, tokenizer.model, vocab.json, merges.txt, *.tiktoken, chat templates and the like.
[[nodiscard]] bool is_tokenizer_file(const std::string& name);
/// Anything that belongs to one model in such a folder: weights, config.json, tokenizer, generation settings, ledger.
[[nodiscard]] bool is_model_file(const std::string& name);

/// Copies what is small and lies beside the weights (tokenizer, generation settings, chat template, remote code,
/// licence; not config.json) from one folder to another.
///   tokenizer  false: leave out what is_tokenizer_file says
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to, bool tokenizer = true);

/// Writes tensors (name, stored bytes) as model.safetensors, or in numbered files of at most `shard_bytes` with their
/// index. `read` gives a tensor as it is to be stored; one file is in memory at a time.
void write_weight_files(const std::filesystem::path& folder,
                        const std::vector<std::pair<std::string, uint64_t>>& tensors, uint64_t shard_bytes,
                        const std::function<at::Tensor(const std::string&)>& read);
/// The text of a config.json, with another dtype if one is given.
[[nodiscard]] std::string config_text(const std::string& original, std::optional<at::ScalarType> dtype);

}  // namespace emend::models::detail
