// completion and man: what shells and man(1) need to know, made from the declarations of the options.
#include <emend/core/error.h>
#include <emend/core/text.h>

#include <algorithm>

#include "../cli.h"

namespace emend::tools {

VerbRun setup_completion(Options& o) {
  auto& shell = o.arguments<std::string>();
  o.add("SHELL", &shell, "bash, zsh or fish", {.choices = {"bash", "zsh", "fish"}, .required = true});
  o.footer =
      "Examples:\n"
      "  source <(emend completion bash)\n"
      "  emend completion zsh > ~/.zfunc/_emend        with fpath+=~/.zfunc in ~/.zshrc\n"
      "  emend completion fish > ~/.config/fish/completions/emend.fish";
  return [&shell](Common& common) {
    const std::string script = completion_script(shell);
    common.print({{"script", script}}, script);
    return 0;
  };
}

VerbRun setup_man(Options& o) {
  auto& name = o.arguments<std::string>();
  o.add("VERB", &name, "whose page; emend: the list of all verbs", {.required = true});
  o.footer = "Example:\n  emend man edit | man -l -";
  return [&name](Common& common) {
    const auto verb = std::ranges::find(verbs(), name, &Verb::name);
    if (name == "emend" || verb != verbs().end()) {
      const std::string page = name == "emend" ? man_page() : man_page(*verb);
      common.print({{"page", page}}, page);
      return 0;
    }
    refuse({"man", "no verb \"" + name + "\"", "one of " + join(verbs(), ", ", &Verb::name),
            did_you_mean(name, verbs(), "", [](const Verb& verb) { return std::string(verb.name); })});
  };
}

}  // namespace emend::tools
