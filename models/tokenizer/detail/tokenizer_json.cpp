#include <emend/core/atomic_file.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/pipeline.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

using nlohmann::json;

// "a b" or ["a", "b"].
std::optional<std::pair<std::string_view, std::string_view>> pieces_of(const json& merge) {
  const auto text = [](const json& value) { return std::string_view(value.get_ref<const std::string&>()); };
  if (merge.is_string()) {
    const size_t space = text(merge).find(' ');
    if (space == std::string_view::npos || text(merge).find(' ', space + 1) != std::string_view::npos) return {};
    return std::pair(text(merge).substr(0, space), text(merge).substr(space + 1));
  }
  if (!merge.is_array() || merge.size() != 2 || !merge[0].is_string() || !merge[1].is_string()) return {};
  return std::pair(text(merge[0]), text(merge[1]));
}

void read_merges(const JsonView& merges, PipelineSpec& spec) {
  if (!merges.value().is_array()) merges.fail("an array of merges");
  spec.merges.reserve(merges.value().size());
  for (size_t i = 0; i < merges.value().size(); ++i) {
    const auto pieces = pieces_of(merges.value()[i]);
    if (!pieces) merges.element(i).fail("two pieces, as \"a b\" or [\"a\", \"b\"]");
    if (!spec.add_merge(pieces->first, pieces->second))
      throw Error(ErrorClass::kCorruption, {merges.element(i).where(),
                                            "\"" + shorten(pieces->first) + "\", \"" + shorten(pieces->second) +
                                                "\" or what they make is not in the vocabulary",
                                            "pieces of model.vocab", "get the file again"});
  }
}

void read_model(const JsonView& model, PipelineSpec& spec) {
  // Very old files have no type; what has merges is BPE.
  const std::string type = model.string_or("type", model.has("merges") ? "BPE" : "");
  if (type != "BPE") model.unsupported("a model of type \"" + shorten(type) + "\"", "BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.string_or(key, "").empty()) model.at(key).unsupported("the option " + std::string(key), "null");
  if (model.has("dropout") && model.at("dropout").value() != 0.0)
    model.at("dropout").unsupported("random dropout", "null");
  read_pieces(model.at("vocab"), spec.vocabulary);
  read_merges(model.at("merges"), spec);
  spec.options.byte_fallback = model.boolean_or("byte_fallback", false);
  spec.options.fuse_unk = model.boolean_or("fuse_unk", false);
  spec.options.ignore_merges = model.boolean_or("ignore_merges", false);
  if (model.has("unk_token")) spec.options.unk = spec.vocabulary.find(model.at("unk_token").string());
}

}  // namespace

void read_pieces(const JsonView& view, Vocabulary& vocabulary) {
  if (!view.value().is_object()) view.fail("an object of pieces and ids");
  vocabulary.reserve(view.value().size());
  for (const auto& [piece, id] : view.value().get_ref<const json::object_t&>()) {
    const bool fits = id.is_number_unsigned() && id.get<uint64_t>() <= kMaxTokenId;
    vocabulary.add(piece, static_cast<uint32_t>(fits ? id.get<int64_t>() : view.at(piece).integer(0, kMaxTokenId)));
  }
}

AddedToken read_added_token(const JsonView& view) {
  AddedToken token;
  token.content = view.at("content").string();
  token.single_word = view.boolean_or("single_word", false);
  token.lstrip = view.boolean_or("lstrip", false);
  token.rstrip = view.boolean_or("rstrip", false);
  token.special = view.boolean_or("special", false);
  token.normalized = view.boolean_or("normalized", !token.special);
  return token;
}

PipelineSpec parse_tokenizer_json(std::string_view text, const std::string& file) {
  const json document = parse_json(text, file, {.max_bytes = text.size(), .repeated_keys = true});
  const JsonView root(document, file);
  PipelineSpec spec;
  spec.file = file;
  read_model(root.at("model"), spec);
  for (const auto& [key, part] :
       {std::pair("normalizer", &spec.normalizer), std::pair("decoder", &spec.decoder),
        std::pair("pre_tokenizer", &spec.pre_tokenizer), std::pair("post_processor", &spec.post_processor)})
    if (root.has(key)) *part = root.at(key).value();
  if (root.has("added_tokens"))
    for (const JsonView& view : root.at("added_tokens").elements()) {
      if (view.has("id")) (void)view.at("id").integer(0, kMaxTokenId);
      spec.add_token(read_added_token(view));
    }
  return spec;
}

PipelineSpec read_tokenizer_json(const std::filesystem::path& path) {
  return parse_tokenizer_json(read_file(path), path.string());
}

// Writing one that Hugging Face tokenizers loads with identical ids.

namespace {

json added_token(const AddedToken& token) {
  return {{"id", token.id},          {"content", token.content}, {"single_word", token.single_word},
          {"lstrip", token.lstrip},  {"rstrip", token.rstrip},   {"normalized", token.normalized},
          {"special", token.special}};
}

json model_of(const PipelineSpec& spec) {
  const Vocabulary& vocabulary = spec.vocabulary;
  json pieces = json::object(), merges = json::array();
  for (uint32_t id = 0; id < vocabulary.id_end(); ++id) {
    const auto piece = vocabulary.piece(id);
    if (piece && vocabulary.find(*piece) == id) pieces[std::string(*piece)] = id;
  }
  for (const Merge& merge : spec.merges)
    merges.push_back({*vocabulary.piece(merge.left), *vocabulary.piece(merge.right)});
  const BpeOptions& options = spec.options;
  const json unk = options.unk == kNoToken ? json(nullptr) : json(*vocabulary.piece(options.unk));
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unk},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", options.fuse_unk},
          {"byte_fallback", options.byte_fallback},
          {"ignore_merges", options.ignore_merges},
          {"vocab", pieces},
          {"merges", merges}};
}

std::string piece_of(const PipelineSpec& spec, int64_t id) {
  const auto added = std::ranges::find(spec.added, id, &AddedToken::id);
  if (added != spec.added.end()) return added->content;
  return std::string(spec.vocabulary.piece(static_cast<uint32_t>(id)).value_or(""));
}

json config_of(const PipelineSpec& spec) {
  // Named inputs: the class alone also gives token_type_ids, which `generate` of a causal model refuses.
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false},
                 {"model_input_names", {"input_ids", "attention_mask"}}};
  const SpecialTokens& special = spec.special;
  const auto name = [&](const char* key, const std::optional<int64_t>& id) {
    if (id) config[key] = piece_of(spec, *id);
  };
  name("bos_token", special.bos);
  name("eos_token", special.eos);
  name("unk_token", special.unk);
  name("pad_token", special.pad);
  if (!special.chat_template.empty()) config["chat_template"] = special.chat_template;
  return config;
}

}  // namespace

void write_tokenizer_json(const PipelineSpec& spec, const std::filesystem::path& folder) {
  json added = json::array();
  std::vector<AddedToken> tokens = spec.added;
  std::ranges::sort(tokens, {}, &AddedToken::id);
  for (const AddedToken& token : tokens) added.push_back(added_token(token));
  const json document = {{"version", "1.0"},
                         {"truncation", nullptr},
                         {"padding", nullptr},
                         {"added_tokens", added},
                         {"normalizer", spec.normalizer},
                         {"pre_tokenizer", spec.pre_tokenizer},
                         {"post_processor", spec.post_processor},
                         {"decoder", spec.decoder},
                         {"model", model_of(spec)}};
  write_file(folder / "tokenizer.json", document.dump() + "\n");
  write_file(folder / "tokenizer_config.json", config_of(spec).dump(2) + "\n");
  // Those that end a turn beside the one that ends a text; no other file has room for several.
  const SpecialTokens& special = spec.special;
  if (std::ranges::all_of(special.eos_ids, [&](int64_t id) { return id == special.eos; })) return;
  json ends = {{"eos_token_id", special.eos_ids}};
  if (special.bos) ends["bos_token_id"] = *special.bos;
  if (special.pad) ends["pad_token_id"] = *special.pad;
  write_file(folder / "generation_config.json", ends.dump(2) + "\n");
}

bool JsonView::has(const std::string& key) const {
  if (!value_->is_object()) return false;
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonView JsonView::at(const std::string& key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  const std::string path = path_.empty() ? key : path_ + "." + shorten(key);
  if (found == value_->end())
    throw Error(ErrorClass::kCorruption,
                {file_, "the key \"" + path + "\" is missing", "a complete tokenizer file", "get the file again"});
  return {*found, file_, path};
}

std::vector<JsonView> JsonView::elements() const {
  if (!value_->is_array()) fail("an array");
  std::vector<JsonView> views;
  for (size_t i = 0; i < value_->size(); ++i) views.push_back(element(i));
  return views;
}

const std::string& JsonView::string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get_ref<const std::string&>();
}

int64_t JsonView::integer(int64_t lowest, int64_t highest) const {
  const bool fits = value_->is_number_unsigned() ? value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)
                                                 : value_->is_number_integer();
  if (!fits || value_->get<int64_t>() < lowest || value_->get<int64_t>() > highest)
    fail("an integer from " + std::to_string(lowest) + " to " + std::to_string(highest));
  return value_->get<int64_t>();
}

bool JsonView::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

void JsonView::fail(const std::string& expected) const {
  std::string got = value_->dump(-1, ' ', false, json::error_handler_t::replace);
  if (got.size() > 60) got = std::string(value_->type_name()) + " of " + std::to_string(value_->size()) + " elements";
  throw Error(ErrorClass::kCorruption, {where(), "got " + got, expected, "get the file again"});
}

void JsonView::unsupported(const std::string& what, const std::string& expected) const {
  throw Error(ErrorClass::kUnsupported, {where(), what, expected, "use another model, or report this one"});
}

}  // namespace emend::models::detail
