#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/detail/gguf_container.h>
#include <emend/models/gguf/detail/gguf_tensors.h>
#include <emend/models/gguf/detail/hf_vocabulary.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/models/model.h>
#include <emend/models/tied_head.h>

#include <algorithm>
#include <set>

namespace emend::models {
namespace {

using Json = nlohmann::json;
using detail::GgufRecipe;

/// What is being written: values under table names, as they are now and as the checkpoint has them.
struct Source {
  const Checkpoint& checkpoint;
  ModelConfig config;
  const FamilySpec& family;
  std::function<at::Tensor(const std::string&)> now;
  std::function<at::Tensor(const std::string&)> before;  ///< empty: the same
  std::map<std::string, at::ScalarType> stored_dtype;    ///< by table name
};

/// Tensors of the checkpoint by their names in the family's table.
std::map<std::string, TensorInfo> by_table_name(const Checkpoint& checkpoint, const FamilySpec& family,
                                                const ModelConfig& config) {
  std::set<std::string> wanted;
  for (const ExpectedTensor& tensor : expected_tensors(family, config)) wanted.insert(tensor.name);
  std::map<std::string, TensorInfo> found;
  for (const TensorInfo& info : checkpoint.tensors())
    for (const std::string& name : table_spellings(family, info.name))
      if (wanted.count(name)) found.emplace(name, info);
  for (const std::string& name : wanted)
    if (!found.count(name))
      throw Error(ErrorClass::kCorruption,
                  {checkpoint.path().string(), "no tensor \"" + name + "\"", "all tensors of family " + family.name,
                   "check that config.json and weights belong together"});
  return found;
}

Source source_of(const Checkpoint& checkpoint, const FamilySpec* own) {
  const std::string where = checkpoint.path().string();
  const FamilySpec& family = family_of(checkpoint.config(), where, own);
  const ModelConfig config = parse_config(checkpoint.config(), where, family);
  auto names = by_table_name(checkpoint, family, config);
  require_tied(checkpoint, family, config);
  Source source{checkpoint, config, family, {}, {}, {}};
  for (const auto& [name, info] : names) source.stored_dtype[name] = info.dtype;
  source.now = [&checkpoint, names = std::move(names)](const std::string& name) {
    return checkpoint.read(names.at(name).name);
  };
  return source;
}

Part part_of(const GgufRecipe& recipe) {
  return recipe.expected.part;
}

/// What writes into each tensor of the file.
using Users = std::map<const GgufTensor*, std::vector<const GgufRecipe*>>;

class Writer {
 public:
  Writer(Source source, const std::filesystem::path& path, const GgufWriteOptions& options)
      : source_(std::move(source)),
        path_(path),
        options_(options),
        form_(detail::gguf_architecture_for(source_.config.model_type, source_.checkpoint.path().string(),
                                            &source_.family)) {
    std::filesystem::path base = options.base;
    if (base.empty() && source_.checkpoint.format() == "gguf" && source_.checkpoint.spare_neurons() == 0)
      base = source_.checkpoint.path();
    if (!base.empty()) open_base(base);
  }

  GgufWriteReport write() {
    GgufConfig config = detail::config_to_gguf(source_.config, form_);
    report_.notes = config.notes;
    if (base_)
      plan_from_base();
    else
      plan_anew(config);
    GgufMetadata metadata = base_ ? copied_metadata() : new_metadata(config.metadata);
    metadata.set_integer("general.file_type", file_type());
    if (!options_.edits.empty()) describe_edits(metadata);
    if (is_quantised_) metadata.set_integer("general.quantization_version", 2);
    report_.bytes = detail::write_container(path_, metadata, alignment_, outputs_);
    log_notes();
    return std::move(report_);
  }

 private:
  void open_base(const std::filesystem::path& path) {
    base_.emplace(path);
    const GgufFile& meta = base_->metadata();
    const GgufForm& form =
        detail::gguf_architecture(meta.required_text("general.architecture"), path.string(), &source_.family);
    ModelConfig stored = source_.config;  // Qwen2.5's published files, for one, have a tied head beside the embedding
    stored.tied_head = stored.tied_head && !base_->find("output.weight");
    layout_.recipes = detail::plan_tensors(*base_, form, source_.family, stored);
    const size_t expected = expected_tensors(source_.family, stored).size();
    if (layout_.recipes.size() != expected)
      refuse({path.string(),
              std::to_string(layout_.recipes.size()) + " of the model's " + std::to_string(expected) + " tensors",
              "a GGUF file of the same model", "name the file that the model was converted to before editing"});
    if (stored.tied_head != source_.config.tied_head)
      std::ranges::find(layout_.recipes, Part::kHead, part_of)->expected.name =
          std::ranges::find(layout_.recipes, Part::kEmbedding, part_of)->expected.name;
    alignment_ = meta.alignment();
    if (!options_.base.empty() && !meta.texts(kGgufEdits).empty())
      refuse({path.string(), "a file that holds edits: " + shorten(meta.texts(kGgufEdits).front(), 80),
              "the file that the model was converted to before editing", "name that one, or leave it out"});
  }

  // ---- tensors

  [[nodiscard]] Users users_of_tensors() const {
    Users users;
    for (const GgufRecipe& recipe : layout_.recipes)
      for (const auto& piece : recipe.pieces) users[piece.source.tensor].push_back(&recipe);
    return users;
  }
  [[nodiscard]] bool any_changed(const std::vector<const GgufRecipe*>& recipes) {
    return std::ranges::any_of(recipes, [&](auto* recipe) { return is_changed(*recipe); });
  }

  void plan_from_base() {
    Users users = users_of_tensors();
    for (const auto& part : base_->parts())
      for (const GgufTensor& tensor : part->tensors()) {
        const auto& of_tensor = users[&tensor];
        const bool changed = any_changed(of_tensor);
        GgmlType type = of_tensor.empty() ? tensor.type : type_over_base(tensor, changed);
        if (changed && type == GgmlType::kQ8_0 && !options_.type && !options_.changed_type &&
            rounds_others_away(tensor, of_tensor))
          type = GgmlType::kF16;
        if (!changed && !options_.base.empty() && !of_tensor.empty()) require_like_the_model(*part, tensor, of_tensor);
        if (!changed && type == tensor.type)
          add_copy(*part, tensor);
        else
          add_encoded(tensor, of_tensor, type, changed);
      }
  }

  static at::Tensor bytes_of(const GgufFile& file, const GgufTensor& tensor) {
    auto* data = const_cast<std::byte*>(file.data(tensor));  // only read from
    return at::from_blob(data, {static_cast<int64_t>(tensor.bytes)}, at::kByte);
  }

  // A named base may be another model of the same shape; what rounding alone makes of a tensor depends on its bits.
  void require_like_the_model(const GgufFile& file, const GgufTensor& tensor,
                              const std::vector<const GgufRecipe*>& users) {
    const at::Tensor own = detail::assemble(tensor, users, source_.now);
    const at::Tensor based = detail::decode(bytes_of(file, tensor), tensor.type, own);
    const double bits = 8.0 * static_cast<double>(tensor.bytes) / static_cast<double>(own.numel());
    double most = bits >= 16 ? 0.02 : bits >= 8 ? 0.03 : bits >= 5 ? 0.1 : bits >= 4 ? 0.2 : bits >= 3 ? 0.35 : 0.6;
    if (source_.checkpoint.format() == "gguf") most = std::max(most, 0.2);  // rounded itself
    const double size = std::max(own.norm().item<double>(), based.norm().item<double>());
    const double apart = (based - own).norm().item<double>();
    if (apart > most * size)
      refuse({file.path().string(),
              formatted("%s differs from the model's by %.2g %%", tensor.name.c_str(), 100 * apart / size),
              "a GGUF file of the same model", "name the file that the model was converted to before editing"});
  }

  void plan_anew(const GgufConfig& config) {
    layout_ = detail::new_layout(form_, source_.family, source_.config);
    const Users users = users_of_tensors();
    for (const auto& [name, values] : config.tables) add_table(name, values);
    for (const GgufTensor& tensor : layout_.tensors) {
      const auto& of_tensor = users.at(&tensor);
      const at::ScalarType stored = source_.stored_dtype.at(of_tensor.front()->expected.name);
      const GgmlType own = plain_type(stored).value_or(GgmlType::kF32);
      add_encoded(tensor, of_tensor, type_of(tensor, options_.type.value_or(own)), any_changed(of_tensor));
    }
  }

  [[nodiscard]] bool is_changed(const GgufRecipe& recipe) {
    if (!source_.before) return false;
    const auto known = changed_.find(recipe.expected.name);
    if (known != changed_.end()) return known->second;
    const at::Tensor now = source_.now(recipe.expected.name);
    return changed_[recipe.expected.name] = !at::equal(now, source_.before(recipe.expected.name).to(now.scalar_type()));
  }

  /// The type of a tensor when all matrices are to be `wanted`, before falling back for odd rows.
  [[nodiscard]] GgmlType type_of(const GgufTensor& tensor, GgmlType wanted) const {
    const std::string& name = tensor.name;
    if (tensor.shape.size() == 1 || !name.ends_with(".weight") || name.ends_with("_norm.weight") ||
        name == "position_embd.weight" || name.ends_with("ffn_gate_inp.weight"))
      return GgmlType::kF32;
    const bool head = name == "output.weight" || (name == "token_embd.weight" && source_.config.tied_head);
    const bool wide = block_values(wanted) == 1 || wanted == GgmlType::kQ8_0 || wanted == GgmlType::kQ6_K;
    if (!head || wide) return wanted;
    return tensor.row_values() % 256 == 0 && !form_.wide_head ? GgmlType::kQ6_K : GgmlType::kQ8_0;
  }

  [[nodiscard]] GgmlType type_over_base(const GgufTensor& tensor, bool changed) const {
    if (options_.type) return type_of(tensor, *options_.type);
    if (!changed) return tensor.type;
    const bool wide = block_values(tensor.type) == 1 || tensor.type == GgmlType::kQ8_0;
    return options_.changed_type ? type_of(tensor, *options_.changed_type) : wide ? tensor.type : GgmlType::kQ8_0;
  }

  /// A block of Q8_0 has one scale. Where an edit writes far larger numbers than those that stand beside them in a row,
  /// as LATCH does, these lose what they had: they are further off than before by a tenth and more.
  [[nodiscard]] bool rounds_others_away(const GgufTensor& tensor, const std::vector<const GgufRecipe*>& users) const {
    const at::Tensor now = detail::assemble(tensor, users, source_.now),
                     before = detail::assemble(tensor, users, source_.before), others = now == before;
    const auto lost = [&](const at::Tensor& values) {
      const at::Tensor bytes = detail::encode(values, GgmlType::kQ8_0, tensor.name);
      return ((detail::decode(bytes, GgmlType::kQ8_0, values) - values) * others).norm().item<double>();
    };
    return tensor.row_values() % block_values(GgmlType::kQ8_0) == 0 && lost(now) > 1.1 * lost(before);
  }

  // What comes out of `bytes` is written as the tensor `as`.
  void add(GgufWrittenTensor as, const std::vector<int64_t>& shape, std::function<at::Tensor()> bytes) {
    const auto done = static_cast<double>(outputs_.size() + 1);
    outputs_.push_back({as.name, as.type, shape, [this, bytes = std::move(bytes), name = as.name, done] {
                          at::Tensor stored = bytes();
                          if (options_.progress)
                            options_.progress({"convert", done, static_cast<double>(outputs_.size()), name});
                          return stored;
                        }});
    report_.tensors.push_back(std::move(as));
  }

  void add_copy(const GgufFile& file, const GgufTensor& tensor) {
    count(tensor.type, tensor);
    add({tensor.name, tensor.type}, tensor.shape, [&file, &tensor] { return bytes_of(file, tensor); });
  }

  void add_table(const std::string& name, const std::vector<float>& values) {
    add({name, GgmlType::kF32}, {std::ssize(values)},
        [values, name] { return detail::encode(at::tensor(values, at::kFloat), GgmlType::kF32, name); });
  }

  void add_encoded(const GgufTensor& tensor, const std::vector<const GgufRecipe*>& users, GgmlType wanted,
                   bool changed) {
    const GgmlType type = type_for_row(wanted, tensor.row_values());
    count(type, tensor);
    const size_t index = report_.tensors.size();
    add({tensor.name, type, type != wanted, changed}, tensor.shape, [this, &tensor, users, type, changed, index] {
      const at::Tensor values = detail::assemble(tensor, users, source_.now);
      at::Tensor bytes = detail::encode(values, type, path_.string() + ": tensor " + tensor.name);
      if (changed && type != GgmlType::kF32)
        report_.tensors[index].error_of_change = error_of_change(tensor, users, values, bytes, type);
      return bytes;
    });
  }

  [[nodiscard]] double error_of_change(const GgufTensor& tensor, const std::vector<const GgufRecipe*>& users,
                                       const at::Tensor& values, const at::Tensor& bytes, GgmlType type) const {
    const double error = (detail::decode(bytes, type, values) - values).norm().item<double>();
    const double change = (values - detail::assemble(tensor, users, source_.before)).norm().item<double>();
    return change > 0 ? error / change : 0;
  }

  // Bytes by type decide what the file calls itself.
  void count(GgmlType type, const GgufTensor& tensor) {
    is_quantised_ = is_quantised_ || block_values(type) > 1;
    if (tensor.shape.size() > 1) values_of_type_[type] += tensor.rows() * tensor.row_values();
  }

  // ---- metadata

  [[nodiscard]] int64_t file_type() const {
    static const std::map<GgmlType, int64_t> numbers = {
        {GgmlType::kF32, 0},     {GgmlType::kF16, 1},     {GgmlType::kQ4_0, 2},  {GgmlType::kQ4_1, 3},
        {GgmlType::kQ8_0, 7},    {GgmlType::kQ5_0, 8},    {GgmlType::kQ5_1, 9},  {GgmlType::kQ2_K, 10},
        {GgmlType::kQ3_K, 11},   {GgmlType::kQ4_K, 14},   {GgmlType::kQ5_K, 16}, {GgmlType::kQ6_K, 18},
        {GgmlType::kIQ4_NL, 25}, {GgmlType::kIQ4_XS, 30}, {GgmlType::kBF16, 32}};
    if (base_ && !options_.type) return base_->metadata().integer("general.file_type").value_or(0);
    const auto most =
        std::ranges::max_element(values_of_type_, [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto number =
        most == values_of_type_.end() ? numbers.end() : numbers.find(options_.type.value_or(most->first));
    return number == numbers.end() ? 0 : number->second;
  }

  [[nodiscard]] GgufMetadata copied_metadata() const {
    const GgufFile& meta = base_->metadata();
    GgufMetadata metadata;
    for (const std::string& key : meta.keys())
      if (!key.starts_with("split.") &&
          (options_.vocabulary || !(key.starts_with("tokenizer.") || key == detail::kTokenizerKey)))
        metadata.copy(key, *meta.find(key));
    if (!options_.vocabulary) metadata.set_text("tokenizer.ggml.model", "none");
    return metadata;
  }

  [[nodiscard]] GgufMetadata new_metadata(const GgufMetadata& config) {
    GgufMetadata metadata;
    metadata.set_text("general.architecture", form_.architecture);
    metadata.set_text("general.type", "model");
    metadata.set_text("general.name", name());
    metadata.append(config);
    if (options_.keep_config) {
      metadata.set_text(detail::kConfigKey, kept_config().dump());
      keep_norms(metadata);
    }
    const auto tokenizer = options_.vocabulary ? source_.checkpoint.load_tokenizer() : nullptr;
    if (!tokenizer) {
      metadata.set_text("tokenizer.ggml.model", "none");
      return metadata;
    }
    auto [vocabulary, notes] =
        detail::hf_vocabulary(source_.checkpoint.path(), *tokenizer, source_.config.vocab_size, form_.pre);
    metadata.append(detail::vocabulary_metadata(vocabulary));
    if (options_.keep_config) {
      auto files = detail::keep_tokenizer(*tokenizer);
      const std::string ends = "generation_config.json";  // which tokens end a text
      if (const auto path = source_.checkpoint.path() / ends; std::filesystem::is_regular_file(path))
        files.insert(files.end(), {ends, read_file(path)});
      metadata.set_texts(detail::kTokenizerKey, files);
    }
    report_.notes.insert(report_.notes.end(), notes.begin(), notes.end());
    return metadata;
  }

  // What was edited, with what, on which base: after what the base says of itself.
  void describe_edits(GgufMetadata& metadata) const {
    auto all = base_ ? base_->metadata().texts(kGgufEdits) : std::vector<std::string>();
    all.insert(all.end(), options_.edits.begin(), options_.edits.end());
    metadata.set_texts(kGgufEdits, all);
    if (metadata.contains("general.base_model.count")) return;
    const std::string base = model_name(source_.checkpoint.path());
    const size_t slash = base.find('/');
    metadata.set_integer("general.base_model.count", 1);
    metadata.set_text("general.base_model.0.name", base.substr(slash + 1));
    if (slash == std::string::npos) return;
    metadata.set_text("general.base_model.0.organization", base.substr(0, slash));
    metadata.set_text("general.base_model.0.repo_url", "https://huggingface.co/" + base);
  }

  // Norms that are stored as 1 + w, where float32 drops bits of w. Half-precision norms lose nothing.
  void keep_norms(GgufMetadata& metadata) const {
    for (const GgufRecipe& recipe : layout_.recipes) {
      if (!recipe.plus_one) continue;
      const at::Tensor w = source_.now(recipe.expected.name).to(at::kFloat).contiguous();
      if (at::equal((w + 1) - 1, w)) continue;
      const float* values = w.const_data_ptr<float>();
      metadata.set_numbers(detail::kNormKey + recipe.expected.name, std::vector<float>(values, values + w.numel()));
    }
  }

  // The folder's name, with a word that the family's files must have in theirs.
  [[nodiscard]] std::string name() const {
    std::string name = model_name(source_.checkpoint.path());
    name.erase(0, name.rfind('/') + 1);
    for (const std::string& word : form_.name_words)
      if (name.find(word) != std::string::npos) return name;
    return form_.name_words.empty() ? name : form_.name_words.front() + " " + name;
  }

  // The config.json; of multimodal ones the language model's part.
  [[nodiscard]] Json kept_config() const {
    const Json& config = source_.checkpoint.config();
    if (!config.contains("text_config")) return config;
    const std::string& defaults = source_.family.nested_defaults;
    Json text = defaults.empty() ? Json::object() : Json::parse(defaults);
    text.update(config["text_config"]);
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"})
      if (config.contains(key) && !config[key].is_null()) text[key] = config[key];
    if (!text.contains("model_type")) text["model_type"] = source_.family.model_types.front();
    return text;
  }

  void log_notes() const {
    if (!options_.log) return;
    for (const auto& note : report_.notes) options_.log->warning("gguf.note", note);
    const auto fallen = std::ranges::count_if(report_.tensors, [](const auto& tensor) { return tensor.fell_back; });
    if (fallen > 0)
      options_.log->warning(
          "gguf.fallback", std::to_string(fallen) + " tensors have rows that are not whole blocks of " +
                               to_string(options_.type.value_or(GgmlType::kF16)) + " and were written in a wider type");
  }

  Source source_;
  std::filesystem::path path_;
  GgufWriteOptions options_;
  const GgufForm& form_;
  std::optional<detail::GgufFiles> base_;  ///< whose layout, metadata and untouched tensors are taken over
  detail::GgufLayout layout_;              ///< over a base: recipes only
  std::vector<detail::GgufOutput> outputs_;
  std::map<std::string, bool> changed_;
  std::map<GgmlType, int64_t> values_of_type_;
  bool is_quantised_ = false;
  uint64_t alignment_ = 32;
  GgufWriteReport report_;
};

}  // namespace

void require_gguf_architecture(const std::string& model_type, const std::string& where) {
  (void)detail::gguf_architecture_for(model_type, where);
}

GgufWriteReport write_gguf(const Model& model, const std::filesystem::path& path, const GgufWriteOptions& options) {
  require_apart(path, model.checkpoint().path());
  const at::NoGradGuard no_grad;
  Source source = source_of(model.checkpoint(), &model.family());
  source.before = source.now;
  // What was not edited is as exact as the file, whatever the model computes in.
  source.now = [&model, &options, before = source.before](const std::string& name) {
    at::Tensor weight = devices::to_host(model.weight(name).detach());
    if (weight.element_size() >= 4) return weight;
    at::Tensor original = before(name);
    if (auto exact = options.exact ? options.exact(name, original) : std::nullopt) return *std::move(exact);
    return at::equal(weight, original.to(weight.scalar_type())) ? original : weight;
  };
  return Writer(std::move(source), path, options).write();
}

GgufWriteReport write_gguf(const Checkpoint& checkpoint, const std::filesystem::path& path,
                           const GgufWriteOptions& options) {
  if (!options.base.empty())
    refuse({"write_gguf", "a base for a checkpoint", "no base: nothing was edited",
            "load the model to write its edited weights"});
  const at::NoGradGuard no_grad;
  return Writer(source_of(checkpoint, options.family), path, options).write();
}

}  // namespace emend::models
