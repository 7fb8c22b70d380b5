#include "cli.h"

#include <emend/core/text.h>

#include <algorithm>

#include "version.h"

namespace emend::tools {
namespace {

constexpr size_t kWidth = 98, kColumn = 32;

// `text` in lines that begin in column `indent`; the first line stands behind `head`.
std::string wrapped(const std::string& head, const std::string& text, size_t indent) {
  std::string out = head, line(indent, ' ');
  if (!head.empty() && width_of(head) + 2 > indent) {
    out += "\n";
  } else {
    line = std::string(indent - width_of(head), ' ');
  }
  size_t used = indent;
  bool begun = false;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (begun && used + 1 + width_of(word) > kWidth) {
      out += line + "\n";
      line = std::string(indent, ' ');
      used = indent;
      begun = false;
    }
    line += (begun ? " " : "") + word;
    used += (begun ? 1 : 0) + width_of(word);
    begun = true;
  }
  return out + line + "\n";
}

bool is_positional(const Option& option) {
  return !option.names.empty() && option.names[0] != '-' && option.spellings().size() == 1;
}

// "--type" for the options that have a name with hyphens, the longest one; else the name of the argument.
std::string long_name(const Option& option) {
  return option.spellings().back();
}

std::string type_of(const Option& option) {
  if (option.is_flag()) return "";
  if (!option.type.empty()) return option.type;
  if (!option.choices.empty()) return "NAME";
  const bool number = !std::holds_alternative<std::string*>(option.value) &&
                      !std::holds_alternative<std::vector<std::string>*>(option.value);
  return number ? "N" : "TEXT";
}

std::string meaning_of(const Option& option) {
  std::string text = option.meaning;
  if (!option.only.empty() && lower(option.group) != option.only[0]) text = join(option.only) + ": " + text;
  const bool said =
      std::ranges::all_of(option.choices, [&](const auto& choice) { return text.find(choice) != std::string::npos; });
  if (!said) text += " {" + join(option.choices) + "}";
  if (option.required) text += " (required)";
  const std::string value = option.shown.empty() ? option.text() : option.shown;
  if (!value.empty()) text += " [" + value + "]";
  return text;
}

// The groups in the order of their first option.
std::vector<std::string> groups_of(const Options& options) {
  std::vector<std::string> groups = {""};
  for (const Option& option : options.all())
    if (std::ranges::find(groups, option.group) == groups.end()) groups.push_back(option.group);
  return groups;
}

void each_of(const Options& options, const std::string& group, const std::function<void(const Option&)>& show) {
  for (const Option& option : options.all())
    if (option.group == group) show(option);
}

std::string arguments_of(const Options& options) {
  std::string text;
  for (const Option& option : options.all())
    if (option.names[0] != '-') {
      const std::string name = option.spellings()[0] + (option.most > 1 || option.least > 1 ? "…" : "");
      text += option.required ? " " + name : " [" + name + "]";
    }
  return text;
}

// With a backslash before each of these characters.
std::string escaped(const std::string& text, std::string_view characters) {
  std::string out;
  for (const char c : text) out += characters.find(c) == characters.npos ? std::string(1, c) : std::string("\\") + c;
  return out;
}

// For single quotes of zsh, which know no backslash.
std::string zsh_text(const std::string& text, std::string_view characters) {
  return replace_all(escaped(text, characters), "'", "'\\''");
}

// What may stand without an option's name; empty: files.
std::string words_of(const Options& options) {
  for (const Option& option : options.all())
    if (option.names[0] != '-' && !option.choices.empty()) return join(option.choices, " ");
  return "";
}

// Whether what follows the option is a path.
bool takes_path(const Option& option) {
  static const std::vector<std::string> kPaths = {"FILE", "DIR", "PATH", "MODEL", "FILE|NAME"};
  return std::ranges::find(kPaths, option.type) != kPaths.end();
}

// Of a verb: "convert facts" is a spelling of convert-facts, but completes as one word.
void each_command(const std::function<void(const Verb&, const Options&)>& use) {
  for (const Verb& verb : verbs()) use(verb, Command(verb).options);
}

std::string hyphened(const Options& options) {
  std::string names = "--help";
  for (const Option& option : options.all())
    for (const auto& name : option.spellings())
      if (name.starts_with("--")) append_item(names, name, " ");
  return names;
}

std::string bash_script() {
  std::string cases, choices;
  each_command([&](const Verb& verb, const Options& options) {
    cases += "    " + std::string(verb.name) + ") words='" + hyphened(options) + "' ;;\n";
    for (const Option& option : options.all())
      if (!option.choices.empty())
        choices += "    " + std::string(verb.name) + ":" + long_name(option) + ") words='" + join(option.choices, " ") +
                   "' ;;\n";
    if (const std::string some = words_of(options); !some.empty())
      choices += "    " + std::string(verb.name) + ":" + verb.name + ") words='" + some + "' ;;\n";
  });
  return "# bash completion for emend and memit_edit: source it, or put it into "
         "~/.local/share/bash-completion/completions/emend\n"
         "_emend() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]} words=''\n"
         "  [[ ${COMP_WORDS[0]##*/} == memit_edit ]] && verb=edit\n"
         "  if [[ $COMP_CWORD == 1 && ${COMP_WORDS[0]##*/} == emend ]]; then\n"
         "    COMPREPLY=($(compgen -W 'help " +
         join(verbs(), " ", &Verb::name) +
         "' -- \"$current\")); return\n"
         "  fi\n"
         "  if [[ $COMP_CWORD == 2 && ( $verb == help || $verb == man ) ]]; then\n"
         "    COMPREPLY=($(compgen -W '" +
         join(verbs(), " ", &Verb::name) +
         "' -- \"$current\")); return\n"
         "  fi\n"
         "  case $verb:$before in\n" +
         choices +
         "  esac\n"
         "  if [[ -n $words ]]; then COMPREPLY=($(compgen -W \"$words\" -- \"$current\")); return; fi\n"
         "  case $verb in\n" +
         cases +
         "  esac\n"
         "  [[ $current == -* ]] && COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "}\n"
         "complete -o default -F _emend emend memit_edit\n";
}

std::string zsh_script() {
  std::string list, cases;
  each_command([&](const Verb& verb, const Options& options) {
    list += "    '" + std::string(verb.name) + ":" + zsh_text(verb.summary, ":\\") + "'\n";
    cases += "    " + std::string(verb.name) + ") _arguments";
    for (const Option& option : options.all()) {
      if (option.spellings().back()[0] != '-') continue;
      const std::string values = option.is_flag()          ? ""
                                 : !option.choices.empty() ? ":value:(" + join(option.choices, " ") + ")"
                                 : takes_path(option)      ? ":file:_files"
                                                           : ":value:";
      cases += " \\\n      '*" + long_name(option) + "[" + zsh_text(option.meaning, "[]:\\") + "]" + values + "'";
    }
    const std::string words = words_of(options);
    cases += " \\\n      '*:" + (words.empty() ? std::string("file:_files") : "value:(" + words + ")") + "' ;;\n";
  });
  return "#compdef emend memit_edit\n"
         "# zsh completion for emend and memit_edit: put it as _emend into a folder of $fpath\n"
         "_emend() {\n"
         "  local -a verbs=(\n" +
         list +
         "  )\n"
         "  local verb=edit\n"
         "  if [[ ${words[1]:t} == emend ]]; then\n"
         "    if (( CURRENT == 2 )); then _describe verb verbs; return; fi\n"
         "    verb=${words[2]}; shift words; (( CURRENT-- ))\n"
         "  fi\n"
         "  case $verb in\n" +
         cases +
         "  esac\n"
         "}\n"
         "if [[ ${funcstack[1]} == _emend ]]; then _emend \"$@\"; else compdef _emend emend memit_edit; fi\n";
}

std::string fish_script() {
  std::string text = "# fish completion for emend and memit_edit: put it into ~/.config/fish/completions/emend.fish\n";
  const auto options_of = [&](const std::string& command, const Options& options) {
    for (const Option& option : options.all()) {
      if (!long_name(option).starts_with("--")) continue;
      text += "complete -c " + command + " -l " + long_name(option).substr(2);
      if (!option.is_flag()) text += takes_path(option) ? " -r -F" : " -x";
      if (!option.choices.empty()) text += " -a '" + join(option.choices, " ") + "'";
      text += " -d '" + escaped(option.meaning, "'\\") + "'\n";
    }
  };
  each_command([&](const Verb& verb, const Options& options) {
    text += "complete -c emend -n __fish_use_subcommand -f -a " + std::string(verb.name) + " -d '" +
            escaped(verb.summary, "'\\") + "'\n";
    if (const std::string words = words_of(options); !words.empty())
      text +=
          "complete -c emend -n '__fish_seen_subcommand_from " + std::string(verb.name) + "' -f -a '" + words + "'\n";
    if (&verb == &verbs().front()) options_of("memit_edit", options);
    options_of("emend -n '__fish_seen_subcommand_from " + std::string(verb.name) + "'", options);
  });
  return text;
}

// A line of text in a man page.
std::string roff(const std::string& text) {
  const std::string out = replace_all(replace_all(text, "\\", "\\e"), "-", "\\-");
  return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

}  // namespace

std::string help_text(const Verb& verb, const Options& options, const std::string& usage) {
  std::string text = std::string(verb.summary) + "\nUsage: " + usage + arguments_of(options) + " [OPTIONS]\n";
  for (const auto& group : groups_of(options)) {
    text += "\n" + (group.empty() ? "Options" : group) + ":\n";
    if (group.empty()) text += wrapped("  -h,--help", "print this help", kColumn);
    each_of(options, group, [&](const Option& option) {
      const std::string type = type_of(option);
      const std::string head = "  " + option.names + (type.empty() || is_positional(option) ? "" : " " + type);
      text += wrapped(head, meaning_of(option), kColumn);
    });
  }
  if (!options.footer.empty()) text += "\n";
  std::istringstream footer(options.footer);
  for (std::string line, more; std::getline(footer, line);) {
    // A sentence that sources have broken is one line.
    while (!line.starts_with(' ') && width_of(line) > kWidth && !line.ends_with('.') && std::getline(footer, more))
      line += " " + more;
    const size_t column = line.rfind("  ");
    const size_t indent = column == std::string::npos ? 0 : column + 2;
    const std::string head = line.substr(0, line.find_last_not_of(' ', indent == 0 ? 0 : column) + 1);
    text += width_of(line) <= kWidth ? line + "\n" : wrapped(indent == 0 ? "" : head, line.substr(indent), indent);
  }
  return text;
}

std::string verbs_text() {
  std::string text = "emend: change what a language model knows\nUsage: emend VERB [OPTIONS]\n", group;
  for (const Verb& verb : verbs()) {
    if (group != verb.group) text += "\n" + (group = verb.group) + ":\n";
    text += wrapped("  " + std::string(verb.name), verb.summary, 24);
  }
  return text + "\nemend help VERB says more; emend --version is the version.\n";
}

std::string completion_script(const std::string& shell) {
  return shell == "bash" ? bash_script() : shell == "zsh" ? zsh_script() : fish_script();
}

std::string man_page() {
  std::string text = ".TH emend 1 \"\" \"emend " EMEND_VERSION_TEXT
                     "\"\n.SH NAME\nemend \\- change what a language model "
                     "knows\n.SH SYNOPSIS\n.B emend\nVERB [OPTIONS]\n",
              group;
  for (const Verb& verb : verbs()) {
    if (group != verb.group) text += ".SH \"" + (group = verb.group) + "\"\n";
    text += ".TP\n.BR " + roff("emend-" + std::string(verb.name)) + " (1)\n" + roff(verb.summary) + "\n";
  }
  return text;
}

std::string man_page(const Verb& verb) {
  const Command command(verb);
  const std::string name = "emend-" + std::string(verb.name);
  std::string text = ".TH \"" + name + "\" 1 \"\" \"emend " EMEND_VERSION_TEXT "\"\n.SH NAME\n" + roff(name) + " \\- " +
                     roff(verb.summary) + "\n.SH SYNOPSIS\n.B " + roff("emend " + std::string(verb.name)) +
                     roff(arguments_of(command.options)) + " [OPTIONS]\n";
  for (const auto& group : groups_of(command.options)) {
    text += ".SH " + (group.empty() ? "OPTIONS" : "\"" + group + "\"") + "\n";
    each_of(command.options, group, [&](const Option& option) {
      text += ".TP\n.B " + roff(option.names) + (type_of(option).empty() ? "" : " " + roff(type_of(option))) + "\n" +
              roff(meaning_of(option)) + "\n";
    });
  }
  if (command.options.footer.empty()) return text;
  text += ".SH NOTES\n.nf\n";
  std::istringstream lines(command.options.footer);
  for (std::string line; std::getline(lines, line);) text += roff(line) + "\n";
  return text + ".fi\n";
}

}  // namespace emend::tools
