// What is made from the declarations of the options: help, completion for shells, man pages.
#pragma once

#include <string>

#include "cli.h"

namespace emend::tools {

/// Usage, options under their headings with defaults and choices, examples; lines of at most 98 characters.
[[nodiscard]] std::string help_text(const Verb& verb, const Options& options, const std::string& usage);
/// The verbs under their headings.
[[nodiscard]] std::string verbs_text();

/// A script that completes verbs, options and choices. `shell` is bash, zsh or fish.
[[nodiscard]] std::string completion_script(const std::string& shell);
/// In the language of man(7): of the program, and of a verb.
[[nodiscard]] std::string man_page();
[[nodiscard]] std::string man_page(const Verb& verb);

}  // namespace emend::tools
