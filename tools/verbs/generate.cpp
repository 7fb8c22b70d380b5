#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <cerrno>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../model_options.h"
#include "../packs.h"
#include "../sampling_options.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  std::vector<std::string> prompts, ids, packs;
  std::string prompt_file;
  bool ignore_eos = false;
  models::GenerateOptions generate;
};

std::vector<std::string> prompts_of(const Options& options) {
  std::vector<std::string> prompts = options.prompts;
  if (!options.prompt_file.empty()) {
    std::string text = read_file(options.prompt_file);
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    prompts.push_back(std::move(text));
  }
  if (prompts.empty())
    throw Error(ErrorClass::kInvalidArgument,
                {"generate", "no prompt", "--prompt TEXT, --prompt-file FILE or --ids LIST", ""});
  return prompts;
}

// "5,17 3" as token ids.
std::vector<int64_t> parse_ids(const std::string& text) {
  std::vector<int64_t> ids;
  const char* at = text.c_str();
  for (;;) {
    while (*at == ' ' || *at == ',') ++at;
    if (*at == '\0') break;
    char* end = nullptr;
    errno = 0;
    ids.push_back(std::strtoll(at, &end, 10));
    if (end == at || errno != 0 || (*end != '\0' && *end != ',' && *end != ' ') || ids.back() < 0)
      throw Error(ErrorClass::kInvalidArgument, {"--ids", "\"" + text + "\"", "token ids such as 5,17,3", ""});
    at = end;
  }
  if (ids.empty()) throw Error(ErrorClass::kInvalidArgument, {"--ids", "no ids", "token ids such as 5,17,3", ""});
  return ids;
}

// Continues prompts that are ids; works without a tokenizer.
int continue_ids(const Options& options, const models::Model& model, const Common& common) {
  std::vector<std::vector<int64_t>> rows;
  for (const auto& text : options.ids) rows.push_back(parse_ids(text));
  models::GenerateOptions generate = options.generate;
  if (!options.ignore_eos && model.has_tokenizer()) generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = common.cancel;
  const auto outputs = models::generate(model, rows, generate);
  auto document = nlohmann::json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    document.push_back({{"prompt_ids", rows[i]}, {"ids", outputs[i]}});
    if (model.has_tokenizer()) document.back()["text"] = model.tokenizer().decode(outputs[i], true);
    for (const int64_t id : outputs[i])
      if (!common.json) std::cout << id << (&id == &outputs[i].back() ? "\n" : " ");
  }
  if (common.json) std::cout << document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  return 0;
}

}  // namespace

VerbRun setup_generate(CLI::App& command) {
  auto options = std::make_shared<Options>();
  add_model_options(command, options->model);
  command.add_option("--prompt", options->prompts, "text to continue (repeatable)")->type_name("TEXT");
  command.add_option("--prompt-file", options->prompt_file, "file with one long prompt")->type_name("FILE");
  command
      .add_option("--ids", options->ids, "token ids to continue, such as 5,17,3 (repeatable); no tokenizer is needed")
      ->type_name("LIST");
  add_pack_option(command, options->packs, "apply this edit pack first (repeatable)");
  add_sampling_options(command, options->generate);
  command.add_flag("--ignore-eos", options->ignore_eos, "go on after the end-of-text token")->group("Sampling");
  return [options](Common& common) {
    if (!options->ids.empty() && options->prompts.empty() && options->prompt_file.empty()) {
      auto model = load_named(options->model, common);
      Packs packs(model);
      packs.apply(model, options->packs);
      return continue_ids(*options, model, common);
    }
    if (!options->ids.empty())
      throw Error(ErrorClass::kInvalidArgument, {"generate", "both texts and --ids", "one of them", ""});
    const auto prompts = prompts_of(*options);
    auto model = load_named(options->model, common);
    Packs packs(model);
    packs.apply(model, options->packs);
    const auto& tokenizer = model.tokenizer();
    std::vector<std::vector<int64_t>> rows;
    for (const auto& prompt : prompts) {
      rows.push_back(tokenizer.encode_ids(packs.runtime().prefix(prompt) + prompt, true));
      if (rows.back().empty())
        throw Error(ErrorClass::kInvalidArgument, {"--prompt", "an empty text", "at least one token", ""});
    }
    models::GenerateOptions generate = options->generate;
    if (!options->ignore_eos) generate.stop_ids = tokenizer.eos_ids();
    generate.cancel = common.cancel;
    const bool stream = !common.json && prompts.size() == 1;
    models::StreamDecoder decoder(tokenizer);
    if (stream) {
      std::cout << prompts[0] << std::flush;
      generate.on_token = [&](int64_t, int64_t id) { std::cout << decoder.push(id) << std::flush; };
    }
    const auto outputs = models::generate(model, rows, generate);
    if (stream) {
      std::cout << decoder.finish() << '\n';
      return 0;
    }
    auto document = nlohmann::json::array();
    for (size_t i = 0; i < prompts.size(); ++i) {
      const std::string text = tokenizer.decode(outputs[i], true);
      document.push_back({{"prompt", prompts[i]}, {"text", text}, {"ids", outputs[i]}});
      if (!common.json) std::cout << prompts[i] << text << "\n";
    }
    if (common.json) std::cout << document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    return 0;
  };
}

}  // namespace emend::tools
