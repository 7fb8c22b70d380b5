#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/utf8.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "../options.h"

namespace emend::tools {
namespace {

struct TokenizeArguments {
  ModelOptions model;
  std::string file;
  std::vector<std::string> texts;
  bool add_special = false;
};

// A folder that has a tokenizer but no model is fine here.
std::unique_ptr<models::Tokenizer> tokenizer_of(const ModelOptions& options) {
  if (!options.model.empty() && std::filesystem::is_directory(options.model))
    return models::load_tokenizer(options.model);
  auto tokenizer = open_named(options)->load_tokenizer();
  if (!tokenizer)
    throw Error(ErrorClass::kNotFound,
                {options.model, "the checkpoint has no tokenizer", "tokenizer files beside the weights", ""});
  return tokenizer;
}

std::vector<std::string> read_strings(const std::string& path) {
  const nlohmann::json document =
      read_json(path, {.error_class = ErrorClass::kCorruption, .expected = "a JSON array of strings", .advice = ""});
  const auto refuse = [](const ErrorParts& parts) { throw Error(ErrorClass::kCorruption, parts); };
  std::vector<std::string> strings;
  if (!document.is_array()) refuse({path, "not a JSON array", "a JSON array of strings", ""});
  for (const auto& item : document) {
    if (!item.is_string())
      refuse({path, "item " + std::to_string(strings.size()) + " is " + item.type_name(), "a string", ""});
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

void print_pieces(const models::Tokenizer& tokenizer, const std::string& text, bool add_special) {
  const auto encoding = tokenizer.encode(text, add_special);
  for (size_t i = 0; i < encoding.size(); ++i)
    std::cout << encoding.ids[i] << '\t' << encoding.offsets[i].first << '-' << encoding.offsets[i].second << '\t'
              << printable(tokenizer.token_text(encoding.ids[i]), false) << '\n';
}

int run_tokenize(const TokenizeArguments& options, const Common& common) {
  if (options.file.empty() && options.texts.empty())
    refuse({"tokenize", "nothing to tokenize", "--file or --text", ""});
  const auto tokenizer = tokenizer_of(options.model);
  const auto texts = options.file.empty() ? options.texts : read_strings(options.file);
  auto ids = nlohmann::json::array();
  for (const auto& text : texts) {
    if (common.json) {
      ids.push_back(tokenizer->encode_ids(text, options.add_special));
    } else {
      if (&text != &texts.front()) std::cout << '\n';
      print_pieces(*tokenizer, text, options.add_special);
    }
  }
  if (common.json) std::cout << ids.dump() << '\n';
  return 0;
}

}  // namespace

VerbRun setup_tokenize(Options& o) {
  auto& options = o.arguments<TokenizeArguments>();
  o.add("--model", &options.model.model, "model folder, GGUF file or ORG/NAME; default: the bundled default model",
        {.type = "MODEL"})
      .add("--file", &options.file, "JSON array of strings", {.type = "FILE"})
      .add("--text", &options.texts, "a string (repeatable)", {.type = "TEXT", .excludes = "--file"})
      .add("--add-special", &options.add_special, "add the tokens that the model expects around a text (BOS, …)");
  return [&options](Common& common) { return run_tokenize(options, common); };
}

}  // namespace emend::tools
