// Prompts and files of directions.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/datasets/lint.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/directions.h>

#include <iterator>
#include <map>
#include <sstream>

namespace emend::workflow {
namespace {

using nlohmann::json;

constexpr const char* kDirectionsFormat = "emend directions 1";

const std::map<std::string, std::string ContrastPrompt::*> kPromptMembers = {
    {"prompt", &ContrastPrompt::prompt}, {"system", &ContrastPrompt::system}, {"reply", &ContrastPrompt::reply}};

ContrastPrompt read_prompt_object(const std::string& line, const std::string& where) {
  const json object = parse_json(line, where);
  ContrastPrompt prompt;
  for (const auto& [key, value] : object.items()) {
    const auto member = kPromptMembers.find(key);
    if (member == kPromptMembers.end()) {  // what people's files hold beside is theirs; a slip is not
      const auto meant = did_you_mean(key, kPromptMembers, "", key_of);
      if (meant.empty()) continue;
      throw Error(ErrorClass::kCorruption,
                  {where, "the key \"" + shorten(key, 60) + "\"", "prompt, system or reply", meant});
    }
    if (!value.is_string()) throw Error(ErrorClass::kCorruption, {where, key + " is no text", "a string", ""});
    prompt.*member->second = value.get<std::string>();
  }
  if (prompt.prompt.empty())
    throw Error(ErrorClass::kCorruption, {where, "an object without \"prompt\"", "{\"prompt\": \"…\"}", ""});
  return prompt;
}

bool has_template(const models::Model& model, bool chat) {
  return chat && !model.tokenizer().chat_template().empty();
}

// An error of the template with the way out.
template <class Work>
auto by_template(const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    auto parts = parts_of(error);
    parts.advice = "give the prompts as they are (" + setting("no_chat") + ")";
    throw Error(error.error_class(), parts);
  }
}

}  // namespace

std::vector<ContrastPrompt> read_prompts(const std::filesystem::path& path) {
  std::string all = read_file(path);
  if (all.starts_with(kByteOrderMark)) all.erase(0, kByteOrderMark.size());
  std::istringstream lines(all);
  std::vector<ContrastPrompt> prompts;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const std::string text(trimmed(line));
    if (text.empty()) continue;
    datasets::require_prompt_size(path.string() + ":" + std::to_string(number), text);
    prompts.push_back(text[0] == '{' ? read_prompt_object(text, path.string() + ":" + std::to_string(number))
                                     : ContrastPrompt{.prompt = text});
  }
  if (prompts.empty()) refuse({path.string(), "no prompt", "one a line", "write some prompts into it"});
  return prompts;
}

std::vector<std::string> prompt_texts(const models::Model& model, std::span<const ContrastPrompt> prompts, bool chat) {
  const bool templated = has_template(model, chat);
  const auto format =
      templated ? by_template([&] { return models::chat_format_of(model.tokenizer()); }) : models::ChatFormat();
  return mapped(prompts, [&](const ContrastPrompt& prompt) {
    if (!templated) {
      const std::string system = prompt.system.empty() ? "" : prompt.system + "\n";
      return system + prompt.prompt + (prompt.reply.empty() ? "" : "\n") + prompt.reply;
    }
    std::vector<models::ChatMessage> messages;
    if (!prompt.system.empty()) messages.push_back({"system", prompt.system});
    messages.push_back({"user", prompt.prompt});
    return by_template([&] { return models::render_chat(format, messages, true).text; }) + prompt.reply;
  });
}

std::vector<std::vector<int64_t>> prompt_rows(const models::Model& model, std::span<const ContrastPrompt> prompts,
                                              bool chat) {
  const auto& tokenizer = model.tokenizer();
  const bool templated = has_template(model, chat);
  return mapped(prompt_texts(model, prompts, chat), [&](const std::string& text) {
    return templated ? models::encode_chat(tokenizer, text).ids : tokenizer.encode_prompt(text).ids;
  });
}

void in_batches(const std::vector<std::vector<int64_t>>& rows, const char* phase, const Handles& lent,
                const std::function<void(const models::TokenBatch&)>& pass, int64_t begin) {
  constexpr int64_t kTokens = 2048;
  std::vector<std::vector<int64_t>> batch;
  int64_t tokens = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    batch.push_back(rows[i]);
    tokens += std::ssize(rows[i]);
    if (i + 1 < rows.size() && tokens + static_cast<int64_t>(rows[i + 1].size()) <= kTokens) continue;
    lent.cancel.check(phase);
    pass(begin == 0 ? models::TokenBatch::from_rows(batch)
                    : models::TokenBatch::continuing(batch, std::vector<int64_t>(batch.size(), begin)));
    batch.clear();
    tokens = 0;
    if (lent.progress) lent.progress({phase, static_cast<double>(i + 1), static_cast<double>(rows.size()), ""});
  }
}

models::ControlVector Directions::control_vector(models::LayerRange range) const {
  models::ControlVector vector{about.value("model_hint", std::string()), {}};
  for (size_t l = 0; l < layers.size(); ++l)
    if (layers[l].defined() && range.contains(static_cast<int>(l))) {
      vector.layers[static_cast<int>(l)] = layers[l];
      if (l < separation.size()) vector.origin[static_cast<int>(l)] = separation[l].origin;
    }
  return vector;
}

json Directions::to_json() const {
  json document = {{"method", method},   {"model", model}, {"fingerprint", fingerprint},
                   {"best_layer", best}, {"about", about}, {"layers", json::array()}};
  for (size_t l = 0; l < separation.size(); ++l)
    document["layers"].push_back({{"layer", l},
                                  {"accuracy", separation[l].accuracy},
                                  {"auc", separation[l].auc},
                                  {"effect", separation[l].effect},
                                  {"size", separation[l].size},
                                  {"origin", separation[l].origin}});
  return document;
}

bool same_direction(const Directions& one, const Directions& other) {
  bool shared = false;
  for (size_t l = 0; l < std::min(one.layers.size(), other.layers.size()); ++l) {
    if (!one.layers[l].defined() || !other.layers[l].defined()) continue;
    if (!at::equal(one.layers[l], other.layers[l])) return false;
    shared = true;
  }
  return shared;
}

std::string content_of(const Directions& directions) {
  Sha256 hash;
  for (size_t l = 0; l < directions.layers.size(); ++l) {
    if (!directions.layers[l].defined()) continue;
    const at::Tensor values = directions.layers[l].to(at::kFloat).contiguous();
    hash.update(std::to_string(l) + " " + std::to_string(values.numel()) + "\n");
    hash.update(values.const_data_ptr(), values.nbytes());
  }
  return hash.hex();
}

void save_directions(const std::filesystem::path& path, const Directions& directions) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (size_t l = 0; l < directions.layers.size(); ++l)
    if (directions.layers[l].defined()) tensors.emplace_back("direction." + std::to_string(l), directions.layers[l]);
  write_safetensors(path, tensors,
                    {{"format", kDirectionsFormat},
                     {"layers", std::to_string(directions.layers.size())},
                     {"about", directions.to_json().dump(-1, ' ', false, json::error_handler_t::replace)}});
}

Directions load_directions(const std::filesystem::path& given) {
  const auto path = std::filesystem::is_directory(given) ? given / "direction.safetensors" : given;
  Directions directions;
  if (path.extension() == ".gguf") {
    const auto vector = models::read_control_vector(path);
    directions.method = "control vector";
    directions.about["model_hint"] = vector.model_hint;
    directions.layers.resize(static_cast<size_t>(vector.layers.rbegin()->first) + 1);
    for (const auto& [layer, values] : vector.layers) directions.layers[layer] = values;
    if (!vector.origin.empty()) directions.separation.resize(directions.layers.size());
    for (const auto& [layer, from] : vector.origin) directions.separation[layer].origin = from;
    // Such a file does not say which layer is best: the middle one of those that it has.
    directions.best = std::next(vector.layers.begin(), static_cast<std::ptrdiff_t>(vector.layers.size() / 2))->first;
    return directions;
  }
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorClass::kCorruption, {path.string(), got, "the directions that emend direct fit writes", ""});
  };
  const SafetensorsFile file(path);
  const auto& metadata = file.metadata();
  if (!metadata.contains("format") || metadata.at("format") != kDirectionsFormat || !metadata.contains("about"))
    refuse("a file of another kind");
  try {
    const json about = parse_json(metadata.at("about"), path.string() + ": about");
    directions.method = about.at("method");
    directions.model = about.at("model");
    directions.fingerprint = about.at("fingerprint");
    directions.best = about.at("best_layer");
    directions.about = about.at("about");
    if (!directions.about.is_object()) refuse("about, which is no object");
    for (const char* key : {"preset", "model_hint"})
      if (directions.about.contains(key) && !directions.about[key].is_string())
        refuse(std::string(key) + ", which is no text");
    for (const auto& l : about.at("layers"))
      directions.separation.push_back(
          {l.at("accuracy"), l.at("auc"), l.at("effect"), l.at("size"), l.value("origin", 0.0)});
  } catch (const json::exception& error) {
    refuse(std::string("a description that cannot be read (") + reason_of(error) + ")");
  }
  directions.layers.resize(directions.separation.size());
  if (directions.best < 0 || static_cast<size_t>(directions.best) >= directions.layers.size())
    refuse("best_layer " + std::to_string(directions.best) + " of " + counted(directions.layers.size(), "layer"));
  for (const auto& [name, info] : file.tensors()) {
    size_t layer = 0;
    while (layer < directions.layers.size() && name != "direction." + std::to_string(layer)) ++layer;
    if (layer == directions.layers.size() || info.shape.size() != 1 || info.dtype != at::kFloat)
      refuse("tensor \"" + name + "\"");
    directions.layers[layer] = file.tensor(name).clone();
    if (!at::isfinite(directions.layers[layer]).all().item<bool>()) refuse(name + " with values that are not finite");
  }
  if (file.tensors().empty()) refuse("no direction");
  return directions;
}

}  // namespace emend::workflow
