// What a family's file says about GGUF: the architecture, and what llama.cpp names, orders or stores in another way
// than the family's own tables. The rest follows from ConfigKeys, the block and the table (docs/formats/gguf.md).
#pragma once

#include <emend/models/gguf/gguf_file.h>

#include <functional>
#include <nlohmann/json.hpp>

namespace emend::models {

enum class Part;
struct FamilySpec;
struct ModelConfig;

namespace detail {
class GgufFiles;
}

/// One file's metadata under "ARCHITECTURE.", checked. Sizes that tensors show are taken from them.
class GgufConfigReader {
 public:
  /// `files` must outlive the reader. Throws Error(kCorruption) naming file and key for missing or impossible sizes.
  GgufConfigReader(const detail::GgufFiles& files, const std::string& architecture);

  [[nodiscard]] const GgufFile& file() const { return meta_; }
  [[nodiscard]] std::string key(std::string_view name) const { return prefix_ + std::string(name); }
  [[nodiscard]] std::optional<int64_t> integer(std::string_view name) const { return meta_.integer(key(name)); }
  [[nodiscard]] std::optional<double> number(std::string_view name) const { return meta_.number(key(name)); }
  [[nodiscard]] std::optional<bool> flag(std::string_view name) const { return meta_.flag(key(name)); }
  /// A required size from 1 to 2^31.
  [[nodiscard]] int64_t size(std::string_view name) const;
  [[nodiscard]] bool has(std::string_view tensor) const;  ///< is there such a tensor?
  /// A tensor's extent, rows first; nothing if there is no such tensor or dimension.
  [[nodiscard]] std::optional<int64_t> dimension(std::string_view tensor, size_t index) const;

  [[nodiscard]] double epsilon() const;  ///< of the norms
  [[nodiscard]] double rotary_base() const { return number("rope.freq_base").value_or(10000.0); }
  [[nodiscard]] int64_t rotary_dims() const;
  /// The fraction that gives exactly rotary_dims() when multiplied by head_dim and cut to an integer.
  [[nodiscard]] double rotary_fraction() const;
  /// Writes rotary_base() under `theta` and, where there is any, rope_scaling and (unless the family has written it)
  /// the share of a head that turns.
  void put_rotary(nlohmann::json& config, const std::string& theta = "rope_theta") const;

  [[nodiscard]] int64_t window() const;  ///< of attention, in tokens; 0: none
  /// layer_types from the pattern key (a period, or one flag a layer). Without it, all layers but each `period`-th have
  /// the window; with period 0 all have it.
  [[nodiscard]] nlohmann::json layer_types(int64_t period) const;

  int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp = 0, vocab = 0, positions = 0;

 private:
  [[nodiscard]] std::optional<int64_t> per_layer(std::string_view name) const;
  void read_head_dim();
  [[nodiscard]] nlohmann::json rotary_scaling() const;

  const detail::GgufFiles& files_;
  const GgufFile& meta_;
  std::string prefix_;
};

/// What is made of a configuration: keys "ARCHITECTURE.…", rotary tables to write as tensors, and what llama.cpp will
/// not do as the model does. A key that is set again keeps its place.
struct GgufConfig {
  std::string prefix;  ///< "llama."
  GgufMetadata metadata;
  std::vector<std::pair<std::string, std::vector<float>>> tables;
  std::vector<std::string> notes;

  void integer(const char* name, int64_t value) { metadata.set_integer(prefix + name, value); }  ///< sets a key
  void number(const char* name, double value) { metadata.set_number(prefix + name, value); }     ///< sets a key
  void text(const char* name, std::string_view value) { metadata.set_text(prefix + name, value); }
  void note(const std::string& text) { notes.push_back(text); }
};

/// A value of tokenizer.ggml.pre and what it means.
struct GgufPre {
  std::string name;
  nlohmann::json pre_tokenizer;  ///< as in a tokenizer.json
  bool nfc = false;
  bool ignore_merges = false;
  bool add_bos = false;  ///< unless the file says otherwise
};

struct GgufForm {
  std::string architecture;  ///< general.architecture, which families may share; empty: GGUF has no form for the family
  std::string class_name;    ///< for "architectures" in config.json: "LlamaForCausalLM"

  /// Query and key rows are stored pair by pair: row 2j + s of a head is our row j + s·d/2 (llama.cpp rotates
  /// neighbours). Families of one architecture agree on this and on the next two.
  bool paired_rotary_rows = false;
  /// attn_q, attn_k, attn_v are stored apart although the Hugging Face checkpoint has one matrix.
  bool splits_qkv = false;
  bool not_run_by_llama_cpp = false;  ///< it has a name for the architecture, and cannot run it
  /// A tensor's name inside its block ("attn_norm") where it is not the usual one, else "". May be empty.
  std::function<std::string(const ModelConfig&, Part)> tensor_name;

  /// Every layer but each n-th has the window unless the file says otherwise; 0: llama.cpp ignores windows.
  int64_t window_period = 0;
  /// The member with so many layers scales attention by hidden size / heads, the others by the head size; 0: no such.
  int64_t layers_of_largest = 0;
  bool wide_head = false;          ///< below Q6_K, llama.cpp quantises the head to Q8_0 rather than Q6_K
  bool longrope_by_table = false;  ///< the factors alone say "longrope" (Phi-3)
  /// general.name must contain one of these words: llama.cpp, and our reader, go by the name. Empty: any name.
  std::vector<std::string> name_words;
  std::vector<std::string> not_in_config;  ///< ConfigKeys that published config.json files leave out ("head_dim")
  std::vector<GgufPre> pre;                ///< names of pre-tokenizers that the family brings, the one to write first

  /// Of several families of one architecture: is the file this one's? Without it, the one whose claim no other made.
  std::function<bool(const GgufConfigReader&)> claims;
  /// Adds to a config.json, which has the sizes, epsilon and activation under the family's keys, what the metadata and
  /// tensors say beyond that. The rotary form of a family that rotates follows, unless `read` writes it: `own_rotary`.
  std::function<void(const GgufConfigReader&, nlohmann::json&)> read;
  bool own_rotary = false;
  /// The way back: keys and notes of the family's own.
  std::function<void(const ModelConfig&, GgufConfig&)> write;
};

}  // namespace emend::models
