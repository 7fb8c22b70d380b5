#include "cli.h"

#include <ATen/Parallel.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/devices/host_memory.h>
#include <emend/devices/runtime.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "programs.h"
#include "version.h"

namespace emend::tools {

#define EMEND_VERB_GROUP(heading)
#define EMEND_VERB(file, setup, name, summary) VerbRun setup(Options& options);
#include "verbs.def"
#undef EMEND_VERB
#undef EMEND_VERB_GROUP

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> list = [] {
    std::vector<Verb> all;
    const char* group = "";
#define EMEND_VERB_GROUP(heading) group = heading;
#define EMEND_VERB(file, setup, name, summary) all.push_back({name, summary, setup, group});
#include "verbs.def"
#undef EMEND_VERB
#undef EMEND_VERB_GROUP
    return all;
  }();
  return list;
}

namespace {

// The parser would take a word in brackets apart ("[INST] … [/INST]") and drop the empty items of a list. No word of a
// command line has a zero byte, so one at its end hides both from the parser; items() takes it off again.
std::vector<std::string> shielded(std::vector<std::string> words) {
  for (auto& word : words)
    if (word.ends_with(']') || word.ends_with('}')) word += '\0';
  return words;
}

// The values that a word stands for.
std::vector<std::string> items(const Option& option, std::string word) {
  if (word.ends_with('\0')) word.pop_back();
  return option.list ? list_items(word) : std::vector{word};
}

std::string fault_of_word(const Option& option, const std::string& word) {
  const auto values = items(option, word);
  for (const auto& value : values) {
    if (value.empty() && values.size() > 1) return "\"" + word + "\"; expected a list without empty items";
    const std::string choice = option.choices.empty() ? "" : CLI::IsMember(option.choices)(value);
    const std::string fault = choice.empty() ? fault_of(option, value) : choice;
    if (!fault.empty()) return fault;
  }
  return "";
}

bool repeats(const Option& option) {
  return std::visit(
      [](const auto& slot) {
        return requires {
          slot->emplace_back();
        };
      },
      option.value);
}

CLI::Option* add_option(CLI::App& app, const Option& option) {
  if (const auto* flag = std::get_if<bool*>(&option.value)) return app.add_flag(option.names, **flag);
  const auto take = [&option](const std::vector<std::string>& words) {
    std::vector<std::string> values;
    for (const auto& word : words)
      for (auto& item : items(option, word)) values.push_back(std::move(item));
    assign(option, values);
  };
  if (repeats(option)) return app.add_option_function<std::vector<std::string>>(option.names, take);
  return app.add_option_function<std::string>(option.names, [take](const std::string& word) { take({word}); });
}

// The only place that knows how the parser is told.
void declare(CLI::App& app, const Options& options, const std::vector<std::string>& words) {
  const auto is_argument = [](const Option& option) { return !option.names.starts_with('-'); };
  const bool arguments = std::ranges::any_of(options.all(), is_argument);
  for (const Option& option : options.all()) {
    CLI::Option* bound = add_option(app, option);
    // One value each time, or the arguments behind it would be taken for more.
    if (arguments && !is_argument(option)) bound->allow_extra_args(false);
    if (!option.is_flag()) bound->check([&option](const std::string& word) { return fault_of_word(option, word); });
    if (option.required && (option.unless.empty() || std::ranges::find(words, option.unless) == words.end()))
      bound->required();
    if (option.most > 0) bound->expected(option.least, option.most);
  }
  const auto find = [&](const std::string& name) { return app.get_option(name); };
  for (const Option& option : options.all()) {
    if (!option.needs.empty()) find(option.spellings()[0])->needs(find(option.needs));
    if (!option.excludes.empty()) find(option.spellings()[0])->excludes(find(option.excludes));
  }
}

// What is wrong with options that can be read: one does nothing for the action that was named, or two are at odds.
std::string at_odds(const CLI::App& app, const Options& options) {
  const std::string action = action_of(options);
  for (const Option& option : options.all()) {
    const std::string name = option.spellings()[0], both = contradiction(option);
    if (!both.empty()) return name + ": " + both;
    if (is_of(option, action) || app.get_option(name)->count() == 0) continue;
    return name + ": goes with " + join(option.only, " or ") + ", not with " + action + "; leave it out";
  }
  return "";
}

// In our words, where the parser's are about its own counting.
std::string complaint(const CLI::ParseError& error, const CLI::App& app, const Options& options) {
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ArgumentMismatch)) return error.what();
  for (const Option& option : options.all()) {
    const auto times = app.get_option(option.spellings()[0])->count();
    if (repeats(option) || option.is_flag() || times < 2) continue;
    return option.spellings()[0] + " is given " + (times == 2 ? "twice" : std::to_string(times) + " times") +
           "; give it once";
  }
  return error.what();
}

// With our own help: CLI11's does not wrap lines.
void describe(CLI::App& app, std::function<std::string()> help) {
  app.set_version_flag("--version", EMEND_VERSION_TEXT);
  app.formatter_fn(
      [help = std::move(help)](const CLI::App*, const std::string&, CLI::AppFormatMode) { return help(); });
}

// The first option that nobody expected, and what it may have meant.
std::string unknown_option(const std::vector<std::string>& words, const Options& options) {
  std::vector<std::string> names = {"--help", "--version"};
  for (const Option& option : options.all())
    for (const auto& name : option.spellings()) names.push_back(name);
  for (const auto& word : words) {
    const std::string name = word.substr(0, word.find('='));
    if (!name.starts_with("--") || name.size() == 2 || std::ranges::find(names, name) != names.end()) continue;
    const std::string close = did_you_mean(name, names);
    return "no option " + name + (close.empty() ? "" : "; " + close);
  }
  return "";
}

// What is wrong with the words; nothing once they are in the options. Throws what CLI11 throws for --help and
// --version.
std::string fault_of_words(CLI::App& app, const Options& options, const std::vector<std::string>& words) try {
  app.parse(shielded({words.rbegin(), words.rend()}));
  return at_odds(app, options);
} catch (const CLI::ParseError& error) {
  const auto is = [&](CLI::ExitCodes code) { return error.get_exit_code() == static_cast<int>(code); };
  if (is(CLI::ExitCodes::Success)) throw;
  const std::string unknown =
      is(CLI::ExitCodes::ExtrasError) || is(CLI::ExitCodes::RequiredError) || is(CLI::ExitCodes::ArgumentMismatch)
          ? unknown_option(words, options)
          : "";
  return unknown.empty() ? complaint(error, app, options) : unknown;
}

// The exit status if there is nothing to run.
std::optional<int> parse(CLI::App& app, const Options& options, const std::vector<std::string>& words,
                         const std::string& program) {
  try {
    const std::string fault = fault_of_words(app, options, words);
    if (fault.empty()) return std::nullopt;
    std::cerr << program << ": " << printable(fault) << "; run with --help for the options\n";
    return 2;
  } catch (const CLI::ParseError& help) {
    return app.exit(help, std::cout, std::cerr);
  }
}

// A setting as the options of this verb spell it, or as those of the first verb that has it.
std::string spelled(const Options& options, std::string_view name) {
  const std::string option = option_spelling(name);
  if (options.find(option)) return option;
  for (const Verb& verb : verbs())
    if (Command(verb).options.find(option)) return option + kOfOther + verb.name;
  return option;
}

int run_command(Command& command, const std::vector<std::string>& command_line) {
  command.common.command_line = command_line;
  spell_settings([&options = command.options](std::string_view name) { return spelled(options, name); });
  return run_guarded(command.run, command.common, [&] { settle_places(command.options); });
}

// "convert facts" is the verb convert-facts, and so for any verb with a hyphen; a folder named facts is ./facts.
// "help edit" is "edit --help".
std::vector<std::string> verb_words(std::vector<std::string> words) {
  if (!words.empty() && words[0] == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  if (words.size() > 1 && std::ranges::find(verbs(), words[0] + "-" + words[1], &Verb::name) != verbs().end()) {
    words[0] += "-" + words[1];
    words.erase(words.begin() + 1);
  }
  return words;
}

}  // namespace

void Common::print(const nlohmann::ordered_json& document, const std::string& text) const {
  std::cout << (json ? dump_json(document) + "\n" : printable(text));
}

// Of 64 cores a container may grant four; LibTorch asks for as many threads as the machine has.
static void use_threads(int64_t chosen) {
  const int granted = devices::usable_processors();
  if (chosen > 0)
    at::set_num_threads(static_cast<int>(chosen));
  else if (!std::getenv("OMP_NUM_THREADS") && at::get_num_threads() > granted)
    at::set_num_threads(granted);
}

Command::Command(const Verb& verb) : run(verb.setup(options)) {
  if (std::ranges::any_of(options.all(), [](const Option& o) { return o.names == "--model" && o.group == "Model"; })) {
    auto& threads = options.arguments<int64_t>();
    options.group("Model").add("--threads", &threads, "threads on the CPU; 0: as many as there are cores to use",
                               {.limits = {0, 1024}});
    run = [&threads, verb_run = std::move(run)](Common& common) {
      use_threads(threads);
      return verb_run(common);
    };
  }
  options.group("Output")
      .add("--json", &common.json, "one JSON document on standard output")
      .add("--quiet", &common.quiet, "no progress, only warnings and errors")
      .add("--log-file", &common.log_file, "also write the log as JSON lines", {.type = "FILE"});
}

std::string parse_words(Command& command, const std::vector<std::string>& words) {
  CLI::App app;
  declare(app, command.options, words);
  return fault_of_words(app, command.options, words);
}

static std::string name_of(const std::string& word) {
  return word.substr(0, word.find('='));
}

// Words of a command line without the options whose names `leave` picks, and without their values.
static std::vector<std::string> without(const std::vector<std::string>& words, const Options& options,
                                        const std::function<bool(const std::string&)>& leave) {
  std::vector<std::string> kept;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string name = name_of(words[i]);
    const Option* option = name.starts_with("--") ? options.find(name) : nullptr;
    if (!option || !leave(name)) {
      kept.push_back(words[i]);
      continue;
    }
    if (option->is_flag() || name != words[i]) continue;
    ++i;  // its value
    while (repeats(*option) && i + 1 < words.size() && !words[i + 1].starts_with("--")) ++i;
  }
  return kept;
}

static int run_verb(const Verb& verb, const std::vector<std::string>& words, const std::string& usage,
                    const std::vector<std::string>& command_line) {
  CLI::App app;
  Command command(verb);
  describe(app, [&] { return help_text(verb, command.options, usage); });
  declare(app, command.options, words);
  if (const auto status = parse(app, command.options, words, usage)) return *status;
  std::vector<std::string> earlier;
  try {
    if (command.options.earlier) earlier = command.options.earlier();
  } catch (const Error& error) {
    command.run = [error](Common&) -> int { throw error; };
  }
  if (earlier.empty()) return run_command(command, command_line);
  // What stands in the earlier line goes under what was given, without what names places to write elsewhere: the folder
  // may be somebody else's.
  const auto among = [](const std::vector<std::string>& given, const std::string& name) {
    return std::ranges::count(given, name, name_of) > 0;
  };
  std::vector<std::string> left_out;
  const auto before =
      without(verb_words({earlier.begin() + 1, earlier.end()}), command.options, [&](const std::string& name) {
        if (writes_beside(name) && !among(words, name)) left_out.push_back(name);
        return writes_beside(name);
      });
  if (!left_out.empty())
    command.run = [left_out, run = std::move(command.run)](Common& common) {
      const bool one = left_out.size() == 1;
      common.log.warning("resume.places",
                         join(left_out, ", ") + " of the line that it began with " + (one ? "is" : "are") +
                             " not taken over, as the folder may be somebody else's; give " +
                             (one ? "it again to use the same place" : "them again to use the same places"));
      return run(common);
    };
  for (const auto& line : {std::vector(before.begin() + (before[0] == verb.name ? 1 : 0), before.end()), words}) {
    CLI::App again;
    declare(again, command.options, words);
    if (const auto status = parse(again, command.options, line, usage)) return *status;
  }
  // What is told of the run: the line that it began with, and what is not as it was then.
  const auto now =
      without(words, command.options, [](const auto& name) { return name == "--out" || name == "--resume"; });
  auto line = without(before, command.options, [&](const std::string& name) { return among(now, name); });
  line.insert(line.begin(), earlier[0]);
  line.insert(line.end(), now.begin(), now.end());
  return run_command(command, line);
}

// A closed one of descriptors 0 to 2 would be given to the next file that is opened, and output would go into that.
static void hold_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd <= 2) fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (fd > 2) ::close(fd);
}

// What could not be printed is an error, unless its reader has gone (emend list | head).
static int printed(int status) {
  std::cout.flush();
  pollfd out{1, POLLOUT, 0};
  if (std::cout || (::poll(&out, 1, 0) > 0 && (out.revents & POLLERR) != 0)) return status;
  std::cerr << "error: standard output: not everything could be written; expected a place with room; make some, or "
               "send it elsewhere\n";
  return status == 0 ? exit_code(ErrorClass::kIo) : status;
}

static int emend_words(int argc, char** argv) {
  const std::vector<std::string> command_line(argv, argv + argc);
  auto words = verb_words({command_line.begin() + std::min(argc, 1), command_line.end()});
  for (const Verb& verb : verbs())
    if (!words.empty() && words[0] == verb.name)
      return run_verb(verb, {words.begin() + 1, words.end()}, "emend " + words[0], command_line);
  if (!words.empty() && words[0].starts_with("-")) {
    CLI::App app;
    describe(app, verbs_text);
    if (const auto status = parse(app, {}, words, "emend")) return *status;
  }
  const std::string close =
      words.empty() ? "" : did_you_mean(words[0], verbs(), "", [](const Verb& verb) { return std::string(verb.name); });
  std::cerr << "emend: " << (words.empty() ? "a verb is missing" : "no verb \"" + printable(words[0], false) + "\"")
            << (close.empty() ? "" : "; " + close) << "; emend --help lists them\n";
  return 2;
}

int run_emend(int argc, char** argv) {
  hold_standard_streams();
  devices::reuse_host_memory();
  return printed(emend_words(argc, argv));
}

int run_memit_edit(int argc, char** argv) {
  hold_standard_streams();
  devices::reuse_host_memory();
  const std::vector<std::string> command_line(argv, argv + argc);
  return printed(run_verb(verbs().front(), {command_line.begin() + std::min(argc, 1), command_line.end()}, "memit_edit",
                          command_line));
}

std::string all_help() {
  std::string text = verbs_text();
  for (const Verb& verb : verbs())
    text += "\n" + help_text(verb, Command(verb).options, "emend " + std::string(verb.name));
  return text;
}

}  // namespace emend::tools
