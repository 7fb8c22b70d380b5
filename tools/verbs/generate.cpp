// generate and chat: what a model says, once and in turns.
#include <dlfcn.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/models/chat.h>
#include <emend/models/config.h>
#include <emend/models/control_vector.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/preflight.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <csignal>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>

#include "../options.h"

namespace emend::tools {
namespace {

// A control vector that acts while a verb generates.
struct SteerArguments {
  std::string vector, layers;
  models::SteerOptions how;

  // Reads the vector's file and the layers, so that what is wrong with them is known before a model is loaded. What it
  // returns attaches them to one (nothing without a vector).
  [[nodiscard]] std::function<std::vector<hooks::HookHandle>(const models::Model&)> read(const Log& log) const {
    if (vector.empty()) return [](const models::Model&) { return std::vector<hooks::HookHandle>(); };
    auto options = how;
    options.layers = models::LayerRange::parse(layers);
    auto read = models::read_control_vector(vector);
    models::require_directions(read, options.layers, vector);
    return [read = std::move(read), options, name = vector, log](const models::Model& model) {
      if (const auto other = models::other_kind(read.model_hint, model); !other.empty())
        log.warning("steer.model", name + " was " + other);
      return models::attach_steering(model, read, options, name);
    };
  }
};

struct GenerateArguments {
  ModelOptions model;
  std::vector<std::string> prompts, ids;
  PackOptions packs;
  std::string prompt_file;
  bool ignore_eos = false;
  SteerArguments steer;
  models::GenerateOptions generate;
};

struct ChatArguments {
  ModelOptions model;
  std::string system, format;
  PackOptions packs;
  SteerArguments steer;
  models::GenerateOptions generate;
};

void add_sampling_options(Options& o, models::GenerateOptions& generate) {
  o.group("Sampling")
      .add("--max-new-tokens", &generate.max_new_tokens, "tokens to add", {.limits = kPositive})
      .add("--temperature", &generate.temperature, "0 is greedy", {.limits = kNonNegative})
      .add("--top-k", &generate.top_k, "keep the k likeliest tokens; 0: all", {.limits = kNonNegative})
      .add("--top-p", &generate.top_p, "keep the likeliest tokens of this total probability",
           {.limits = {.min = 0, .max = 1, .above = true}})
      .add("--min-p", &generate.min_p, "drop tokens below this share of the likeliest", {.limits = {0, 1}})
      .add("--repetition-penalty", &generate.repetition_penalty, "1: none", {.limits = kPositive})
      .add("--seed", &generate.seed, "random seed")
      .add("--prefill-chunk", &generate.prefill_chunk, "prompt tokens per pass", {.limits = kPositive});
}

void add_steer_options(Options& o, SteerArguments& options) {
  const std::string needs = "--control-vector";
  o.group("Steering")
      .add("--control-vector", &options.vector,
           "control vector (GGUF), as emend direct fit, repeng, EasySteer and llama.cpp write them", {.type = "FILE"})
      .add("--strength", &options.how.strength, "times the vector; negative: the other way", {.needs = needs})
      .add("--layers", &options.layers, "A-B: only behind these blocks, from 0; default: all of the vector's",
           {.type = "A-B", .needs = needs})
      .add("--steer", &options.how.by,
           "add, or set the coordinate along the vector to the strength: clamp; at-least, at-most: where it is below, "
           "above",
           {.choices = {"add", "clamp", "at-least", "at-most"}, .needs = needs})
      .add("--decay", &options.how.decay, "the effect falls to nothing over so many tokens of an answer; 0: it stays",
           {.limits = kNonNegative, .needs = needs});
}

// Refuses layers that the model lacks.
std::shared_ptr<const models::Checkpoint> open_steered(const ModelOptions& options, const SteerArguments& steer) {
  auto checkpoint = open_named(options);
  workflow::require_layers(models::LayerRange::parse(steer.layers).last, *checkpoint, "--layers");
  return checkpoint;
}

// "5,17 3" as token ids.
std::vector<int64_t> parse_ids(const std::string& text) {
  const auto refuse = [&](const std::string& what) {
    emend::refuse({"--ids", "\"" + text + "\"" + what, "token ids such as 5,17,3", ""});
  };
  std::vector<int64_t> ids;
  for (const auto& item : list_items(text)) {
    const size_t before = ids.size();
    std::istringstream words(item);
    for (std::string word; words >> word;) {
      ids.push_back(number_in<int64_t>(word).value_or(-1));
      if (ids.back() < 0) refuse("");
    }
    if (ids.size() == before) refuse(" has an empty item");
  }
  return ids;
}

void warn_of_length(const std::vector<std::vector<int64_t>>& rows, const models::Model& model, int64_t more,
                    const Log& log) {
  int64_t longest = 0;
  more = std::min<int64_t>(more, int64_t{1} << 40);
  for (const auto& row : rows) longest = std::max(longest, std::ssize(row) + more);
  if (longest > model.max_positions() && model.config().long_text_is_noise())
    log.warning("generate.window", "the text may grow to " + std::to_string(longest) +
                                       " tokens; what comes behind the " + std::to_string(model.max_positions()) +
                                       " that the model was made for is noise (" + setting("max_new_tokens") + ")");
}

// Continues prompts that are ids; works without a tokenizer.
int continue_ids(const GenerateArguments& options, const std::vector<std::vector<int64_t>>& rows,
                 const models::Model& model, const Packs& packs, models::GenerateOptions generate,
                 const Common& common) {
  for (const auto& row : rows) {
    models::require_room(model, row, "--ids");
    for (const int64_t id : row)
      if (id < 0 || id >= model.vocab_size())
        refuse({"--ids", "id " + std::to_string(id), "0 to " + std::to_string(model.vocab_size() - 1),
                "take the ids of emend tokenize with this model"});
    if (model.has_tokenizer() && !packs.runtime().prefix(model.tokenizer().decode(row, true)).empty())
      refuse({"--ids", "an edit that puts text in front of the prompt, which ids have no place for",
              "the prompt as text", "use --prompt"});
  }
  warn_of_length(rows, model, generate.max_new_tokens, common.log);
  if (!options.ignore_eos)
    generate.stop_ids = model.has_tokenizer() ? model.tokenizer().eos_ids() : model.config().eos_ids;
  const auto outputs = models::generate(model, rows, generate);
  auto document = nlohmann::ordered_json::array();
  std::string text;
  for (size_t i = 0; i < rows.size(); ++i) {
    document.push_back({{"ids", outputs[i]}, {"prompt_ids", rows[i]}});
    if (model.has_tokenizer()) document.back()["text"] = model.tokenizer().decode_more(outputs[i], true);
    if (rows.size() > 1 || !outputs[i].empty())  // a line a row
      text += join(outputs[i], " ", [](int64_t id) { return std::to_string(id); }) + "\n";
  }
  common.print(document, text);
  return 0;
}

std::vector<std::string> prompts_of(const GenerateArguments& options) {
  std::vector<std::string> prompts = options.prompts;
  if (!options.prompt_file.empty()) {
    std::string text = read_file(options.prompt_file);
    if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    prompts.push_back(std::move(text));
  }
  if (prompts.empty()) refuse({"generate", "no prompt", "--prompt TEXT, --prompt-file FILE or --ids LIST", ""});
  return prompts;
}

// Where a prompt comes from: the file's is the last.
std::string source_of(const GenerateArguments& options, size_t prompt) {
  return prompt < options.prompts.size() ? "--prompt" : options.prompt_file;
}

// What needs no weights: texts that no model can continue.
void require_texts(const GenerateArguments& options, const std::vector<std::string>& prompts,
                   const models::Checkpoint& checkpoint) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (const auto at = first_invalid_utf8(prompts[i]))
      refuse({source_of(options, i), "no UTF-8 at byte " + std::to_string(*at), "UTF-8 text", "convert it first"});
    if (!prompts[i].empty()) continue;
    const auto tokenizer = checkpoint.load_tokenizer();
    if (tokenizer && tokenizer->prefix_ids().empty())  // others begin with a token of their own
      refuse({source_of(options, i), "an empty text", "at least one token", ""});
  }
}

int continue_texts(const GenerateArguments& options, const std::vector<std::string>& prompts,
                   const models::Model& model, const Packs& packs, models::GenerateOptions generate,
                   const Common& common) {
  const auto& tokenizer = model.tokenizer();
  std::vector<std::vector<int64_t>> rows;
  for (const auto& prompt : prompts) {
    const std::string where = source_of(options, rows.size());
    rows.push_back(tokenizer.encode_prompt(packs.runtime().prefix(prompt) + prompt).ids);
    if (rows.back().empty()) refuse({where, "an empty text", "at least one token", ""});
    models::require_room(model, rows.back(), where);
  }
  if (!options.ignore_eos) generate.stop_ids = tokenizer.eos_ids();
  warn_of_length(rows, model, generate.max_new_tokens, common.log);
  const bool stream = !common.json && prompts.size() == 1;
  models::StreamDecoder decoder(tokenizer, /*skip_special=*/true, /*at_start=*/false);
  if (stream) {
    std::cout << printable(prompts[0]) << std::flush;
    generate.on_token = [&](int64_t, int64_t id) { std::cout << printable(decoder.push(id)) << std::flush; };
  }
  const auto outputs = models::generate(model, rows, generate);
  if (stream) {
    std::cout << printable(decoder.finish()) << '\n';
    return 0;
  }
  auto document = nlohmann::ordered_json::array();
  std::string all;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string text = tokenizer.decode_more(outputs[i], true);
    document.push_back({{"ids", outputs[i]}, {"prompt", prompts[i]}, {"text", text}});
    all += prompts[i] + text + "\n";
  }
  common.print(document, all);
  return 0;
}

int run_generate(const GenerateArguments& options, const Common& common) {
  const bool texts = options.ids.empty() || !options.prompts.empty() || !options.prompt_file.empty();
  if (texts && !options.ids.empty()) refuse({"generate", "both texts and --ids", "one of them", ""});
  const auto prompts = texts ? prompts_of(options) : std::vector<std::string>();
  const auto rows = mapped(options.ids, parse_ids);
  const auto steered = options.steer.read(common.log);
  const auto checkpoint = open_steered(options.model, options.steer);
  require_texts(options, prompts, *checkpoint);
  const auto given = Packs::load(*checkpoint, options.packs.files, options.packs.apply);
  auto model = load_named(checkpoint, options.model, common);
  const Packs packs(model, given);
  const auto steering = steered(model);
  models::GenerateOptions generate = options.generate;
  generate.cancel = common.cancel;
  return texts ? continue_texts(options, prompts, model, packs, generate, common)
               : continue_ids(options, rows, model, packs, generate, common);
}

constexpr const char* kChatHelp =
    "/help     this list\n"
    "/history  what was said\n"
    "/undo     forget the last message and its answer\n"
    "/reset    forget all of them\n"
    "/exit     end the chat, as Ctrl-D does\n";

class Chat {
 public:
  Chat(const models::Model& model, const Packs& packs, const ChatArguments& options, const Common& common)
      : model_(model),
        packs_(packs),
        generate_(options.generate),
        format_(models::chat_format_of(model.tokenizer(), options.format, common.log)),
        json_(common.json) {
    generate_.stop_ids = model.tokenizer().eos_ids();
    generate_.cancel = common.cancel;
    if (!options.system.empty()) messages_.push_back({"system", options.system});
    first_ = messages_.size();
  }

  /// False if that was the end.
  bool take(const std::string& line) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) return true;
    if (line[0] == '/') return command(line);
    if (const auto at = first_invalid_utf8(line)) {
      std::cerr << "this line is no UTF-8 at byte " << *at << ", and was not sent\n";
      return true;
    }
    messages_.push_back({"user", packs_.runtime().prefix(line) + line});
    const auto ids = models::encode_chat(model_.tokenizer(), models::render_chat(format_, messages_, true).text).ids;
    const int64_t most = model_.config().rotary_depends_on_length() ? kEndless : model_.max_positions();
    if (std::ssize(ids) >= most) {
      messages_.pop_back();
      std::cerr << "with this the conversation has " << counted(ids.size(), "token") << ", and the model reads at most "
                << most << "; /undo and /reset make room\n";
      return true;
    }
    messages_.push_back({"assistant", answer(ids, std::min(generate_.max_new_tokens, most - std::ssize(ids)))});
    return true;
  }

 private:
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  bool command(const std::string& line) {
    static const std::vector<std::string> kCommands = {"/help", "/history", "/undo", "/reset", "/exit"};
    const std::string name = line.substr(0, line.find_last_not_of(" \t\r") + 1);
    if (name == "/undo") messages_.resize(std::max(first_, messages_.size() - std::min<size_t>(2, messages_.size())));
    if (name == "/reset") messages_.resize(first_);
    if (name == "/help") std::cerr << kChatHelp;
    if (name == "/history")
      for (const auto& message : messages_) std::cerr << message.role << ": " << printable(message.content) << '\n';
    if (std::ranges::find(kCommands, name) == kCommands.end())
      std::cerr << "no command " << printable(name, false) << "; " << did_you_mean(name, kCommands, "/help lists them")
                << '\n';
    return name != "/exit";
  }

  // Printed as it grows; with --json a line of JSON when it is whole.
  std::string answer(const std::vector<int64_t>& ids, int64_t tokens) {
    const auto& tokenizer = model_.tokenizer();
    models::StreamDecoder decoder(tokenizer);
    std::string reply;
    models::GenerateOptions generate = generate_;
    generate.max_new_tokens = tokens;
    generate.on_token = [&](int64_t, int64_t id) {
      const std::string piece = decoder.push(id);
      reply += piece;
      if (!json_) std::cout << printable(piece) << std::flush;
    };
    (void)models::generate(model_, {ids}, generate);
    const std::string tail = decoder.finish();
    reply += tail;
    if (!json_) std::cout << printable(tail);
    std::cout << (json_ ? workflow::dump_json({{"role", "assistant"}, {"content", reply}}, -1) : "") << std::endl;
    return reply;
  }

  const models::Model& model_;
  const Packs& packs_;
  models::GenerateOptions generate_;
  models::ChatFormat format_;
  bool json_;
  std::vector<models::ChatMessage> messages_;
  size_t first_ = 0;  // messages that /reset keeps
};

// Lines of standard input; at a terminal with arrow keys and earlier lines, where libedit is installed.
class Lines {
 public:
  Lines() : terminal_(::isatty(0) != 0) {
    const char* term = std::getenv("TERM");
    if (!terminal_ || !::isatty(1) || !term || !*term || std::string_view(term) == "dumb") return;
    void* library = ::dlopen("libedit.so.2", RTLD_NOW);
    if (!library) return;
    std::setlocale(LC_CTYPE, "");
    read_ = reinterpret_cast<char* (*)(const char*)>(::dlsym(library, "readline"));
    keep_ = reinterpret_cast<int (*)(const char*)>(::dlsym(library, "add_history"));
  }
  [[nodiscard]] bool terminal() const { return terminal_; }
  /// False at the end.
  bool next(std::string& line) const {
    if (read_ && keep_) {
      const std::unique_ptr<char, decltype(&std::free)> text(read_unless_interrupted(), &std::free);
      if (!text) return false;
      line = text.get();
      if (!line.empty()) keep_(line.c_str());
      return true;
    }
    if (terminal_) std::cerr << "> " << std::flush;
    return static_cast<bool>(std::getline(std::cin, line));
  }

 private:
  // libedit reads once more after a signal, so a signal is followed by others until it gives up and resets the
  // terminal.
  [[nodiscard]] char* read_unless_interrupted() const {
    struct sigaction own {
    }, before[3];
    own.sa_handler = [](int) {
      const itimerval soon{{}, {0, 10000}};
      ::setitimer(ITIMER_REAL, &soon, nullptr);
    };
    const int signals[] = {SIGINT, SIGTERM, SIGALRM};
    for (int i = 0; i < 3; ++i) ::sigaction(signals[i], &own, &before[i]);
    char* text = read_("> ");
    const itimerval never{};
    ::setitimer(ITIMER_REAL, &never, nullptr);
    for (int i = 0; i < 3; ++i) ::sigaction(signals[i], &before[i], nullptr);
    return text;
  }

  bool terminal_;
  char* (*read_)(const char*) = nullptr;
  int (*keep_)(const char*) = nullptr;
};

int run_chat(const ChatArguments& options, const Common& common) {
  if (const auto at = first_invalid_utf8(options.system))
    refuse({"--system", "no UTF-8 at byte " + std::to_string(*at), "UTF-8 text", "convert it first"});
  const auto steered = options.steer.read(common.log);
  const auto checkpoint = open_steered(options.model, options.steer);
  const auto given = Packs::load(*checkpoint, options.packs.files, options.packs.apply);
  auto model = load_named(checkpoint, options.model, common);
  const Packs packs(model, given);
  const auto steering = steered(model);
  Chat chat(model, packs, options, common);
  const Lines lines;
  if (lines.terminal() && !common.quiet) std::cerr << "Type a message; /help lists commands, Ctrl-D ends the chat.\n";
  for (std::string line; lines.next(line) && chat.take(line);) {
  }
  return 0;
}

}  // namespace

VerbRun setup_generate(Options& o) {
  auto& options = o.arguments<GenerateArguments>();
  add_model_options(o, options.model);
  o.add("--prompt", &options.prompts, "text to continue (repeatable)", {.type = "TEXT"})
      .add("--prompt-file", &options.prompt_file, "file with one long prompt", {.type = "FILE"})
      .add("--ids", &options.ids, "token ids to continue, such as 5,17,3 (repeatable); no tokenizer is needed",
           {.type = "LIST"});
  add_pack_options(o, options.packs);
  add_steer_options(o, options.steer);
  add_sampling_options(o, options.generate);
  o.group("Sampling").add("--ignore-eos", &options.ignore_eos, "go on after the end-of-text token");
  o.footer = "Example:\n  emend generate --prompt 'The Eiffel Tower is in' --pack run/edit.safetensors";
  return [&options](Common& common) { return run_generate(options, common); };
}

VerbRun setup_chat(Options& o) {
  auto& options = o.arguments<ChatArguments>();
  options.generate.max_new_tokens = 256;
  add_model_options(o, options.model);
  add_pack_options(o, options.packs);
  add_steer_options(o, options.steer);
  o.add("--system", &options.system, "system message", {.type = "TEXT"})
      .add("--chat-format", &options.format, "how turns are written; default: told by the model's template",
           {.type = "NAME", .choices = models::chat_format_names()});
  add_sampling_options(o, options.generate);
  o.footer =
      "Commands: /help, /history, /undo, /reset, /exit. With --json every answer is a line of JSON.\n"
      "Example:\n  emend chat --pack run/edit.safetensors";
  return [&options](Common& common) { return run_chat(options, common); };
}

}  // namespace emend::tools
