#include "cli.h"

#include <emend/core/error.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iostream>

#include "version.h"

namespace emend::tools {

#define EMEND_VERB(name, setup, summary) VerbRun setup(CLI::App& command);
#include "verbs.def"
#undef EMEND_VERB

std::string command_text(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> list = {
#define EMEND_VERB(name, setup, summary) {name, summary, setup},
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
  } catch (const c10::Error& error) {
    common.log.error("error", std::string("internal error: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    common.log.error("error", std::string("internal error: ") + error.what());
  }
  return 1;
}

// CLI11 reports `--help` and `--version` as exceptions with status 0; everything else is a usage error.
int finish_parsing(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) {
    app.exit(error, std::cout, std::cerr);
    return 0;
  }
  std::cerr << app.get_name() << ": " << error.what() << "; run with --help for the options\n";
  return 2;
}

void describe(CLI::App& app) {
  app.set_version_flag("--version", EMEND_VERSION_TEXT);
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();
}

int run_single(CLI::App& app, VerbSetup setup, int argc, char** argv) {
  Common common;
  common.command_line.assign(argv, argv + argc);
  describe(app);
  const VerbRun run = setup(app);
  add_common_options(app, common);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return finish_parsing(app, error);
  }
  return run_guarded(run, common);
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

Log Common::log_also_to(const std::string& path) const {
  std::vector<std::shared_ptr<LogSink>> sinks = {
      make_terminal_sink(quiet ? LogLevel::kWarning : LogLevel::kInfo, wants_colour(2)), make_json_lines_sink(path)};
  if (!log_file.empty()) sinks.push_back(make_json_lines_sink(log_file));
  return Log(std::move(sinks));
}

void add_common_options(CLI::App& command, Common& common) {
  const char* group = "Output";
  command.add_flag("--json", common.json, "one JSON document on standard output")->group(group);
  command.add_flag("--quiet", common.quiet, "no progress, only warnings and errors")->group(group);
  command.add_option("--log-file", common.log_file, "also write the log as JSON lines")
      ->group(group)
      ->type_name("FILE");
}

int run_emend(int argc, char** argv) {
  CLI::App app("emend: change what a language model knows", "emend");
  describe(app);
  app.require_subcommand(1);
  std::vector<Common> commons(verbs().size());
  std::vector<VerbRun> runs;
  std::vector<CLI::App*> commands;
  for (size_t i = 0; i < verbs().size(); ++i) {
    CLI::App* command = app.add_subcommand(verbs()[i].name, verbs()[i].summary);
    command->option_defaults()->always_capture_default();
    runs.push_back(verbs()[i].setup(*command));
    add_common_options(*command, commons[i]);
    commands.push_back(command);
  }
  std::string joined;
  std::vector<char*> words = join_verb(argc, argv, joined);
  try {
    app.parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::ParseError& error) {
    return finish_parsing(app, error);
  }
  for (size_t i = 0; i < commands.size(); ++i)
    if (commands[i]->parsed()) {
      commons[i].command_line.assign(argv, argv + argc);
      return run_guarded(runs[i], commons[i]);
    }
  return 2;
}

int run_memit_edit(int argc, char** argv) {
  CLI::App app("memit_edit: change facts in the weights of a language model", "memit_edit");
  for (const Verb& verb : verbs())
    if (std::string(verb.name) == "edit") return run_single(app, verb.setup, argc, argv);
  return 1;
}

std::string all_help() {
  std::string text;
  for (const Verb& verb : verbs()) {
    CLI::App app(verb.summary, std::string("emend ") + verb.name);
    describe(app);
    const VerbRun run = verb.setup(app);
    Common common;
    add_common_options(app, common);
    text += app.help() + "\n";
  }
  return text;
}

}  // namespace emend::tools
