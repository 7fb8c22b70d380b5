// What every verb shares: how it is declared, what it is given, and how errors become exit codes.
#pragma once

#include <emend/core/option.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/run_directory.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace emend::tools {

using workflow::command_text;
using workflow::dump_json;
using workflow::require_new;

/// Options that all verbs have, and the handles made from them: `cancel` is set by SIGINT and SIGTERM, `log` is made
/// before the verb runs, `progress` draws on standard error and is empty when quiet.
struct Common : workflow::Handles {
  bool json = false;     ///< one JSON document on standard output instead of text
  bool quiet = false;    ///< only warnings and errors on standard error
  std::string log_file;  ///< JSON lines

  /// What the verb found, on standard output: `document`, or `text` for people.
  void print(const nlohmann::ordered_json& document, const std::string& text) const;
};

/// A verb declares its options and returns what to do once they are parsed.
/// The function returns the exit status; errors are thrown.
using VerbRun = std::function<int(Common&)>;
using VerbSetup = VerbRun (*)(Options& options);

struct Verb {
  const char* name;
  const char* summary;
  VerbSetup setup;
  const char* group;  ///< its heading in the list of verbs
};

/// In the order of verbs.def.
[[nodiscard]] const std::vector<Verb>& verbs();

/// A verb with its options, --json, --quiet and --log-file among them, into which a command line is parsed.
struct Command {
  explicit Command(const Verb& verb);
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  Common common;
  Options options;
  VerbRun run;
};

/// Parses `words` into the options of the command. Returns what is wrong with them, or nothing.
[[nodiscard]] std::string parse_words(Command& command, const std::vector<std::string>& words);

/// For the processes that a launcher (torchrun, mpirun, srun) started together: joins the group that the environment
/// describes and runs `work` in it, with `common.sharing` set; a process on its own just runs it.
/// The first process speaks; the others show errors only, with their rank before them. A process that is lost after an
/// interruption counts as interrupted: a launcher sends the signal to all. Returns what `work` returns. Throws what it
/// throws, and what devices::join_processes throws.
int run_together(Common& common, const std::function<int()>& work);

/// An option whose place is written beside what the command is for, wherever that is: logs and caches.
[[nodiscard]] bool writes_beside(std::string_view name);

/// Places to write are followed through links and "..", so that every verb writes where its user would look.
/// Throws Error(kNotFound) for a file to read that is not there or is a folder; Error(kCorruption) for an empty one;
/// Error(kIo) for a file in the place of a folder, or around it; Error(kInvalidArgument) for a place to write that is
/// read by the same command, lies inside of its model, or is a device, a pipe or a link to nothing.
void settle_places(Options& options);

/// Stands behind an option that the verb at hand lacks, before the name of a verb that has it. Advice that needs such
/// an option is left out of errors.
inline constexpr const char* kOfOther = " of emend ";

/// Runs a verb with handles made from the options in `common`: interruptions, memory that ends, and exceptions that
/// become exit statuses. SIGINT and SIGTERM ask it to end, and end the process once asked before. Returns its exit
/// status, or that of the error it threw, which is logged.
///   before_files  what has to be known before a file is opened
int run_guarded(const VerbRun& run, Common& common, const std::function<void()>& before_files);

// What is made from the declarations of the options: help, completion for shells, man pages.

/// Usage, options under their headings with defaults and choices, examples; lines of at most 98 characters.
[[nodiscard]] std::string help_text(const Verb& verb, const Options& options, const std::string& usage);
/// The verbs under their headings.
[[nodiscard]] std::string verbs_text();
/// The full help of every verb, for the golden test of options.
[[nodiscard]] std::string all_help();
/// A script that completes verbs, options and choices. `shell` is bash, zsh or fish.
[[nodiscard]] std::string completion_script(const std::string& shell);
/// In the language of man(7): of the program, and of a verb.
[[nodiscard]] std::string man_page();
[[nodiscard]] std::string man_page(const Verb& verb);

}  // namespace emend::tools
