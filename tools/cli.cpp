#include "cli.h"

#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/core/text.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <system_error>

#include "programs.h"
#include "text_table.h"
#include "version.h"

namespace emend::tools {

#define EMEND_VERB(file, setup, name, summary) VerbRun setup(Options& options);
#include "verbs.def"
#undef EMEND_VERB

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> list = {
#define EMEND_VERB(file, setup, name, summary) {name, summary, setup},
#include "verbs.def"
#undef EMEND_VERB
  };
  return list;
}

namespace {

// The only global of the programs: a signal handler can reach nothing else.
CancelToken* interrupted = nullptr;

extern "C" void on_signal(int signal) {
  if (interrupted && !interrupted->requested()) {
    interrupted->request();
    const char text[] = "\ninterrupted: finishing the current step and saving; press Ctrl-C again to stop at once\n";
    [[maybe_unused]] const auto n = ::write(2, text, sizeof text - 1);
    return;
  }
  ::_exit(128 + signal);
}

void install_signal_handlers(CancelToken& cancel) {
  interrupted = &cancel;
  struct sigaction action {};
  action.sa_handler = on_signal;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
}

void open_handles(Common& common) {
  std::vector<std::shared_ptr<LogSink>> sinks = {
      make_terminal_sink(common.quiet ? LogLevel::kWarning : LogLevel::kInfo, wants_colour(2))};
  common.log = Log(sinks);  // which says what is wrong with the other one
  if (!common.log_file.empty()) sinks.push_back(make_json_lines_sink(common.log_file));
  common.log = Log(std::move(sinks));
  if (!common.quiet) common.progress = make_progress(2);
}

// What the accelerators hold, for errors about them.
void report_memory(const Common& common) {
  for (const auto& info : devices::visible_devices()) {
    if (info.device.is_cpu()) continue;
    const auto stats = devices::device_memory_stats(info.device);
    if (stats.peak == 0) continue;
    common.log.warning("memory", devices::to_string(info.device) + " holds " + devices::format_bytes(stats.allocated) +
                                     " (at most " + devices::format_bytes(stats.peak) + ") of " +
                                     devices::format_bytes(info.total_bytes) +
                                     "; `emend plan` with the same options counts before it loads");
  }
}

int report(const Common& common, const Error& error) {
  if (error.error_class() == ErrorClass::kDevice) report_memory(common);
  common.log.event(LogLevel::kError, "error", error.what(),
                   {{"class", to_string(error.error_class())}, {"exit", exit_code(error.error_class())}});
  return exit_code(error.error_class());
}

int run_guarded(const VerbRun& run, Common& common) {
  spell_settings(option_spelling);
  try {
    install_signal_handlers(common.cancel);
    open_handles(common);
    return run(common);
  } catch (const Error& error) {
    return report(common, error);
  } catch (const c10::OutOfMemoryError& error) {
    return report(common,
                  Error(ErrorClass::kDevice, {"memory", error.what_without_backtrace(), "",
                                              "use a smaller --batch-size, another --device-map, or see emend plan"}));
  } catch (const std::bad_alloc&) {
    return report(common, Error(ErrorClass::kDevice, {"memory", "the machine has no memory left", "",
                                                      "use a smaller --batch-size or a smaller model"}));
  } catch (const std::filesystem::filesystem_error& error) {
    return report(common, Error(ErrorClass::kIo, {error.path1().string(), error.code().message(), "a place to work in",
                                                  "check the path, its permissions and the space"}));
  } catch (const std::system_error& error) {
    return report(common,
                  Error(ErrorClass::kDevice, {"system", error.what(), "the threads and memory that the work needs",
                                              "raise the limits of the process (ulimit -a)"}));
  } catch (const c10::Error& error) {
    common.log.error("error", std::string("internal error: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    common.log.error("error", std::string("internal error: ") + error.what());
  }
  return 1;
}

CLI::Option* add_option(CLI::App& app, const Option& option) {
  if (const auto* flag = std::get_if<bool*>(&option.value)) return app.add_flag(option.names, **flag, option.meaning);
  const auto* count = std::get_if<CountOrAuto>(&option.value);
  if (!count)
    return std::visit(
        [&](const auto& slot) -> CLI::Option* {
          if constexpr (requires { app.add_option("", *slot); })
            return app.add_option(option.names, *slot, option.meaning);
          return nullptr;
        },
        option.value);
  const auto parse = [count = *count, name = option.names](const std::string& text) {
    if (text != "auto" && (text.empty() || text.size() > 15 || text.find_first_not_of("0123456789") != text.npos))
      throw CLI::ValidationError(name, "\"" + text + "\"; expected a number of " + count.unit + " from 0 on, or auto");
    *count.value = text == "auto" ? count.automatic : std::stoll(text);
  };
  return app.add_option_function<std::string>(option.names, parse, option.meaning)->default_str(option.text());
}

CLI::Validator validator(const Option& option) {
  const Limits& limits = option.limits;
  if (limits == kNonNegative) return CLI::NonNegativeNumber;
  if (limits == kPositive) return CLI::PositiveNumber;
  if (std::holds_alternative<double*>(option.value)) return CLI::Range(limits.min, limits.max);
  return CLI::Range(static_cast<int64_t>(limits.min), static_cast<int64_t>(limits.max));
}

// The only place that knows how the parser is told.
void bind(CLI::App& app, const Options& options) {
  for (const Option& option : options.all()) {
    CLI::Option* bound = add_option(app, option);
    if (!option.group.empty() || option.hidden) bound->group(option.hidden ? "" : option.group);
    if (!option.type.empty()) bound->type_name(option.type);
    if (!option.choices.empty()) bound->check(CLI::IsMember(option.choices));
    if (option.limits != Limits()) bound->check(validator(option));
    if (option.list) bound->delimiter(',');
    if (option.required) bound->required();
    if (option.most > 0) bound->expected(option.least, option.most);
  }
  const auto find = [&](const std::string& name) { return app.get_option(name); };
  for (const Option& option : options.all()) {
    if (!option.needs.empty()) find(option.spellings()[0])->needs(find(option.needs));
    if (!option.excludes.empty()) find(option.spellings()[0])->excludes(find(option.excludes));
  }
  app.footer(options.footer);
}

void describe(CLI::App& app) {
  app.set_version_flag("--version", EMEND_VERSION_TEXT);
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();
}

// The exit status if there is nothing to run. CLI11 reports `--help` and `--version` as exceptions with status 0;
// everything else is a usage error.
std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      app.exit(error, std::cout, std::cerr);
      return 0;
    }
    std::cerr << app.get_name() << ": " << error.what() << "; run with --help for the options\n";
    return 2;
  }
}

// emend with all its verbs.
struct Program {
  Program() {
    describe(app);
    app.require_subcommand(1);
    for (const Verb& verb : verbs()) {
      CLI::App* sub = app.add_subcommand(verb.name, verb.summary);
      sub->option_defaults()->always_capture_default();
      commands.emplace_back(sub, std::make_unique<Command>(verb));
      bind(*sub, commands.back().second->options);
    }
  }

  CLI::App app{"emend: change what a language model knows", "emend"};
  std::vector<std::pair<CLI::App*, std::unique_ptr<Command>>> commands;
};

int run_guarded(Command& command, int argc, char** argv) {
  command.common.command_line.assign(argv, argv + argc);
  return run_guarded(command.run, command.common);
}

// "convert facts" is the verb convert-facts, and so for any verb with a hyphen; a folder named facts is ./facts.
std::vector<char*> join_verb(int argc, char** argv, std::string& joined) {
  std::vector<char*> out(argv, argv + argc);
  if (argc < 3) return out;
  joined = std::string(argv[1]) + "-" + argv[2];
  const auto& all = verbs();
  if (std::none_of(all.begin(), all.end(), [&](const Verb& verb) { return joined == verb.name; })) return out;
  out.erase(out.begin() + 1);
  out[1] = joined.data();
  return out;
}

}  // namespace

void Common::print(const nlohmann::ordered_json& document, const std::string& text) const {
  std::cout << (json ? dump_json(document) + "\n" : text);
}

Command::Command(const Verb& verb) : run(verb.setup(options)) {
  options.group("Output")
      .add("--json", &common.json, "one JSON document on standard output")
      .add("--quiet", &common.quiet, "no progress, only warnings and errors")
      .add("--log-file", &common.log_file, "also write the log as JSON lines", {.type = "FILE"});
}

std::string parse_words(Command& command, const std::vector<std::string>& words) {
  CLI::App app;
  bind(app, command.options);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

void require_new(const std::string& path, bool force) {
  if (std::filesystem::exists(path) && !force)
    throw Error(ErrorClass::kInvalidArgument,
                {path, "it exists already", "a new path", "choose another, or replace it with --force"});
  remove_abandoned_of(path);
}

int run_emend(int argc, char** argv) {
  Program program;
  std::string storage;
  std::vector<char*> words = join_verb(argc, argv, storage);
  if (const auto status = parse(program.app, static_cast<int>(words.size()), words.data())) return *status;
  for (const auto& [sub, command] : program.commands)
    if (sub->parsed()) return run_guarded(*command, argc, argv);
  return 2;
}

int run_memit_edit(int argc, char** argv) {
  CLI::App app("memit_edit: change facts in the weights of a language model", "memit_edit");
  describe(app);
  Command edit(verbs().front());
  bind(app, edit.options);
  if (const auto status = parse(app, argc, argv)) return *status;
  return run_guarded(edit, argc, argv);
}

std::string all_help() {
  std::string text;
  const Program program;
  for (const auto& [sub, command] : program.commands) text += sub->help("emend") + "\n";
  return text;
}

}  // namespace emend::tools
