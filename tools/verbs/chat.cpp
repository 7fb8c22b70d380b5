#include <emend/core/error.h>
#include <emend/models/chat.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <unistd.h>

#include <iostream>

#include "../model_options.h"
#include "../packs.h"
#include "../sampling_options.h"

namespace emend::tools {
namespace {

struct Options {
  ModelOptions model;
  std::string system, format;
  std::vector<std::string> packs;
  models::GenerateOptions generate;
};

// One answer, printed as it grows.
std::string answer(const models::Model& model, const std::string& text, const models::GenerateOptions& base) {
  const auto& tokenizer = model.tokenizer();
  models::StreamDecoder decoder(tokenizer);
  std::string reply;
  models::GenerateOptions generate = base;
  generate.on_token = [&](int64_t, int64_t id) {
    const std::string piece = decoder.push(id);
    reply += piece;
    std::cout << piece << std::flush;
  };
  (void)models::generate(model, {tokenizer.encode_ids(text, false)}, generate);
  reply += decoder.finish();
  std::cout << '\n' << std::flush;
  return reply;
}

}  // namespace

VerbRun setup_chat(CLI::App& command) {
  auto options = std::make_shared<Options>();
  options->generate.max_new_tokens = 256;
  add_model_options(command, options->model);
  add_pack_option(command, options->packs, "apply this edit pack first (repeatable)");
  command.add_option("--system", options->system, "system message")->type_name("TEXT");
  std::string formats;
  for (const auto& name : models::chat_format_names()) formats += (formats.empty() ? "" : ", ") + name;
  command
      .add_option("--chat-format", options->format,
                  "how turns are written; default: told by the model's template (" + formats + ")")
      ->type_name("NAME");
  add_sampling_options(command, options->generate);
  return [options](Common& common) {
    auto model = load_named(options->model, common);
    Packs packs(model);
    packs.apply(model, options->packs);
    const auto& tokenizer = model.tokenizer();
    const auto format = options->format.empty() ? models::detect_chat_format(tokenizer.chat_template())
                                                : models::chat_format(options->format);
    models::GenerateOptions generate = options->generate;
    generate.stop_ids = tokenizer.eos_ids();
    generate.cancel = common.cancel;
    std::vector<models::ChatMessage> messages;
    if (!options->system.empty()) messages.push_back({"system", options->system});
    const bool terminal = ::isatty(0);
    if (terminal && !common.quiet) std::cerr << "Type a message; an empty line or Ctrl-D ends the chat.\n";
    for (std::string line; (terminal ? (std::cerr << "> " << std::flush, true) : true) &&
                           std::getline(std::cin, line) && !line.empty();) {
      messages.push_back({"user", packs.runtime().prefix(line) + line});
      messages.push_back({"assistant", answer(model, models::render_chat(format, messages, true).text, generate)});
    }
    return 0;
  };
}

}  // namespace emend::tools
