#include <emend/core/atomic_file.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/folder_config.h>
#include <emend/models/tokenizer/detail/pipeline.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

using nlohmann::json;
constexpr const char* kConfigFile = "tokenizer_config.json";

json read_object(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return json::object();
  json document = read_json(path, {.repeated_keys = true});
  if (!document.is_object()) JsonView(document, path.string()).fail("an object");
  return document;
}

// A token is written as its text or as an object with "content".
std::optional<std::string> token_text(const JsonView& file, const std::string& key) {
  if (!file.has(key)) return std::nullopt;
  const JsonView view = file.at(key);
  if (view.value().is_string()) return view.string();
  if (view.has("content")) return view.at("content").string();
  view.fail("a string or an object with \"content\"");
}

// "eos_token_id": one id or a list.
std::vector<int64_t> id_list(const JsonView& file, const std::string& key) {
  if (!file.has(key)) return {};
  const JsonView view = file.at(key);
  if (!view.value().is_array()) return {view.integer(-1, kMaxTokenId)};
  return mapped(view.elements(), [](const JsonView& id) { return id.integer(0, kMaxTokenId); });
}

bool has_token(const std::vector<AddedToken>& tokens, const std::string& content) {
  return std::ranges::count(tokens, content, &AddedToken::content) > 0;
}

bool adds_bos_by_class(const std::string& name) {
  return name.rfind("Llama", 0) == 0 || name.rfind("CodeLlama", 0) == 0 || name.rfind("Gemma", 0) == 0;
}

}  // namespace

FolderConfig::FolderConfig(const std::filesystem::path& folder)
    : folder_(folder),
      config_(read_object(folder / kConfigFile)),
      map_(read_object(folder / "special_tokens_map.json")),
      generation_(read_object(folder / "generation_config.json")),
      model_config_(read_object(folder / "config.json")) {
  class_ = tokenizer_config().string_or("tokenizer_class", "");
  read_added_tokens();
}

void FolderConfig::read_added_tokens() {
  const JsonView config = tokenizer_config();
  if (config.has("added_tokens_decoder")) {
    const JsonView decoder = config.at("added_tokens_decoder");
    if (!decoder.value().is_object()) decoder.fail("an object");
    for (const auto& [key, ignored] : decoder.value().items()) {
      AddedToken token = read_added_token(decoder.at(key));
      token.id = number_in<uint32_t>(key).value_or(kNoToken);
      if (token.id > kMaxTokenId) decoder.at(key).fail("an id as key");
      added_.push_back(std::move(token));
    }
  }
  const json extra = read_object(folder_ / "added_tokens.json");
  const JsonView view(extra, (folder_ / "added_tokens.json").string());
  for (const auto& [content, ignored] : extra.items()) {
    const auto id = static_cast<uint32_t>(view.at(content).integer(0, kMaxTokenId));
    if (!has_token(added_, content)) added_.push_back({.content = content, .id = id, .special = false});
  }
  std::ranges::sort(added_, {}, &AddedToken::id);
}

JsonView FolderConfig::tokenizer_config() const {
  return {config_, (folder_ / kConfigFile).string()};
}

std::optional<std::string> FolderConfig::special_text(const std::string& key) const {
  const auto text = token_text(tokenizer_config(), key);
  return text ? text : token_text({map_, (folder_ / "special_tokens_map.json").string()}, key);
}

std::optional<bool> FolderConfig::flag(const std::string& key) const {
  const JsonView config = tokenizer_config();
  return config.has(key) ? std::optional<bool>(config.at(key).boolean()) : std::nullopt;
}

std::optional<int64_t> FolderConfig::id(const std::string& key) const {
  const JsonView config = tokenizer_config();
  return config.has(key) ? std::optional<int64_t>(config.at(key).integer(0, kMaxTokenId)) : std::nullopt;
}

std::vector<std::pair<std::string, int64_t>> FolderConfig::special_token_ids() const {
  const JsonView config = tokenizer_config();
  std::vector<std::pair<std::string, int64_t>> result;
  if (!config.has("special_tokens")) return result;
  const JsonView tokens = config.at("special_tokens");
  if (!tokens.value().is_object()) tokens.fail("an object of pieces and ids");
  for (const auto& [piece, ignored] : tokens.value().items())
    result.emplace_back(piece, tokens.at(piece).integer(0, kMaxTokenId));
  return result;
}

std::string FolderConfig::chat_template(std::string& place) const {
  for (const char* name : {"chat_template.jinja", "chat_template.json"}) {
    const auto path = folder_ / name;
    if (!std::filesystem::exists(path)) continue;
    place = path.string();
    if (path.extension() == ".jinja") return read_file(path);
    place += ": chat_template";
    const json document = read_object(path);
    return JsonView(document, path.string()).string_or("chat_template", "");
  }
  const JsonView config = tokenizer_config();
  if (!config.has("chat_template")) return {};
  place = config.where() + ": chat_template";
  const JsonView view = config.at("chat_template");
  if (view.value().is_string()) return view.string();
  if (!view.value().is_array()) view.fail("a text, or a list of templates with names");
  std::string first;
  for (const JsonView& entry : view.elements()) {  // several templates with names
    if (entry.string_or("name", "") == "default") return entry.at("template").string();
    if (first.empty()) first = entry.at("template").string();
  }
  return first;
}

void FolderConfig::fill(SpecialTokens& special, const FindId& find) const {
  const JsonView generation(generation_, (folder_ / "generation_config.json").string());
  const JsonView model(model_config_, (folder_ / "config.json").string());
  const auto resolve = [&](const std::string& name) -> std::optional<int64_t> {
    if (const auto text = special_text(name + "_token"))
      if (const auto found = find(*text)) return found;
    for (const JsonView& file : {generation, model}) {
      const std::vector<int64_t> ids = id_list(file, name + "_token_id");
      if (!ids.empty() && ids[0] >= 0) return ids[0];
    }
    return special_text(name + "_token") ? std::nullopt : id(name + "_id");
  };
  special.bos = resolve("bos");
  const auto named = config_.find("bos_token");
  special.bos_in_chats = named == config_.end() || !named->is_null() || special_text("bos_token");
  special.eos = resolve("eos");
  special.pad = resolve("pad");
  if (const auto unk = special_text("unk_token")) special.unk = find(*unk);
  special.eos_ids = id_list(generation, "eos_token_id");
  if (special.eos_ids.empty()) special.eos_ids = id_list(model, "eos_token_id");
  std::erase_if(special.eos_ids, [](int64_t value) { return value < 0; });
  if (special.eos && std::ranges::find(special.eos_ids, *special.eos) == special.eos_ids.end())
    special.eos_ids.insert(special.eos_ids.begin(), *special.eos);
  special.chat_template = chat_template(special.chat_template_place);
}

void FolderConfig::apply(PipelineSpec& spec, bool no_post_processor) const {
  for (const AddedToken& token : added_)
    if (!has_token(spec.added, token.content)) spec.add_token_with_id(token, (folder_ / kConfigFile).string());
  for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token"}) {
    const auto text = special_text(key);
    if (text && spec.find(*text) != kNoToken && !has_token(spec.added, *text)) spec.add_token({.content = *text});
  }
  fill(spec.special, [&spec](const std::string& piece) -> std::optional<int64_t> {
    const uint32_t found = spec.find(piece);
    return found == kNoToken ? std::nullopt : std::optional<int64_t>(found);
  });

  const bool by_class = adds_bos_by_class(class_);
  if ((!by_class && !no_post_processor) || (!flag("add_bos_token") && !flag("add_eos_token"))) return;
  const auto around = [&](const std::string& name, const std::optional<int64_t>& id, bool by_default) {
    std::vector<std::pair<std::string, int64_t>> pieces;
    const auto text = special_text(name);
    if (id && (text || by_class) && flag("add_" + name).value_or(by_default))
      pieces.emplace_back(text.value_or(""), *id);
    return pieces;
  };
  const auto prefix = around("bos_token", spec.special.bos, by_class),
             suffix = around("eos_token", spec.special.eos, false);
  if (by_class || !prefix.empty() || !suffix.empty()) spec.post_processor = template_processor(prefix, suffix);
}

std::vector<std::filesystem::path> FolderConfig::files(const std::vector<std::string>& main) const {
  std::vector<std::filesystem::path> result;
  std::vector<std::string> names = main;
  for (const char* name :
       {kConfigFile, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"})
    names.emplace_back(name);
  // Python classes that transformers loads with the checkpoint.
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("tokenization_", 0) == 0 && entry.path().extension() == ".py") names.push_back(name);
  }
  for (const std::string& name : names)
    if (std::filesystem::is_regular_file(folder_ / name)) result.push_back(std::filesystem::absolute(folder_ / name));
  return result;
}

}  // namespace emend::models::detail
