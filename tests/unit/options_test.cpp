// The declared options of every verb: complete, consistent, as frozen in the golden help, and as the documentation
// says.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "benchmarks.h"

namespace emend::tools {
namespace options_test {

namespace fs = std::filesystem;

const Verb& verb_named(const std::string& name) {
  return *std::ranges::find_if(verbs(), [&](const Verb& verb) { return verb.name == name; });
}

bool is_positional(const Option& option) {
  return option.spellings().size() == 1 && option.names[0] != '-';
}

std::vector<std::string> values_of(const Option& option) {
  std::vector<std::string> values;
  std::istringstream text(option.text());
  for (std::string value; std::getline(text, value, ',');) values.push_back(value);
  return values;
}

TEST(Options, EveryOptionHasAMeaningAndANameOfItsOwn) {
  for (const Verb& verb : verbs()) {
    const Command command(verb);
    std::set<std::string> names;
    ASSERT_GE(command.options.all().size(), 3U) << verb.name;
    for (const Option& option : command.options.all()) {
      EXPECT_FALSE(option.meaning.empty()) << verb.name << " " << option.names;
      EXPECT_FALSE(option.spellings().empty()) << verb.name;
      for (const auto& name : option.spellings())
        EXPECT_TRUE(names.insert(name).second) << verb.name << ": " << name << " is declared twice";
    }
    for (const Option& option : command.options.all())
      for (const auto& other : {option.needs, option.excludes})
        EXPECT_TRUE(other.empty() || names.contains(other)) << verb.name << " " << option.names << ": " << other;
  }
}

TEST(Options, DefaultsAreAmongTheChoicesAndWithinTheLimits) {
  for (const Verb& verb : verbs()) {
    const Command command(verb);
    for (const Option& option : command.options.all()) {
      for (const auto& value : values_of(option)) {
        EXPECT_TRUE(option.choices.empty() || std::ranges::find(option.choices, value) != option.choices.end())
            << verb.name << " " << option.names;
        if (option.limits == Limits()) continue;
        EXPECT_GE(std::stod(value), option.limits.min) << verb.name << " " << option.names;
        EXPECT_LE(std::stod(value), option.limits.max) << verb.name << " " << option.names;
      }
    }
  }
}

// What the help says is the default can be said on the command line, and changes nothing.
TEST(Options, DefaultsParse) {
  for (const Verb& verb : verbs()) {
    const Command plain(verb);
    Command command(verb);
    std::vector<std::string> words;
    for (const Option& option : command.options.all()) {
      if (is_positional(option)) {
        for (int i = 0; option.required && i < std::max(1, option.least); ++i)
          words.push_back(option.choices.empty() ? "word" : option.choices[0]);
      } else if (option.required) {
        words.insert(words.end(), {option.spellings().back(), option.choices.empty() ? "word" : option.choices[0]});
      }
    }
    for (const Option& option : command.options.all()) {
      if (is_positional(option) || option.is_flag() || option.text().empty() || !option.needs.empty()) continue;
      if (!is_of(option, words.empty() ? "" : words[0])) continue;
      words.push_back(option.spellings().back());
      const auto values = values_of(option);
      words.insert(words.end(), values.begin(), values.end());
    }
    EXPECT_EQ(parse_words(command, words), "") << verb.name;
    for (size_t i = 0; i < plain.options.all().size(); ++i) {
      const Option& option = plain.options.all()[i];
      if (option.required) continue;
      EXPECT_EQ(command.options.all()[i].text(), option.text()) << verb.name << " " << option.names;
    }
  }
}

TEST(Options, WhatIsWrongIsRefused) {
  const auto refused = [](const char* verb, const std::vector<std::string>& words, const char* why) {
    Command command(verb_named(verb));
    const std::string text = parse_words(command, words);
    EXPECT_NE(text.find(why), std::string::npos) << verb << ": " << text;
  };
  refused("edit", {}, "--facts is required");
  refused("edit", {"--facts", "f", "--save", "pack,nothing"}, "nothing not in {pack,model,gguf,peft,lora,none}");
  refused("edit", {"--facts", "f", "--batch-size", "-1"}, "--batch-size: \"-1\"; expected a whole number from 0 on");
  refused("edit", {"--facts", "f", "--stats-tokens", "many"},
          "--stats-tokens: \"many\"; expected a number of tokens from 0 on, or auto");
  refused("generate", {"--top-p", "1.5"}, "--top-p: \"1.5\"; expected a number above 0 up to 1");
  refused("generate", {"--top-p", "0"}, "--top-p: \"0\"; expected a number above 0");
  refused("tune", {"--data", "f", "--dropout", "1"}, "--dropout: \"1\"; expected a number from 0, below 1");
  refused("tune", {"--data", "f", "--max-length", "1"}, "--max-length: \"1\"; expected a whole number from 2 on");
  refused("tune", {"--data", "f", "--chat-format", "chatml2"}, "--chat-format: chatml2 not in {");
  for (const char* text : {"x", "1e", "0.5", "0x10", "1 ", "99999999999999999999"})
    refused("edit", {"--facts", "f", "--limit", text}, "expected a whole number");
  for (const char* text : {"x", "nan", "inf", "-0.1", "1e999"})
    refused("edit", {"--facts", "f", "--max-divergence", text}, "expected a number from 0 on");
  refused("edit", {"--facts", "f", "--seed", "-1"}, "--seed: \"-1\"; expected a whole number from 0 on");
  refused("edit", {"--facts", ""}, "--facts: an empty text; expected FILE");
  refused("edit", {"--facts", "f", "--out", ""}, "--out: an empty text; expected DIR");
  refused("edit", {"--facts", "f", "--eval", ""}, "--eval: an empty text");
  for (const char* list : {"a,,b", ",a", "a,"})
    for (const char* name : {"--eval", "--eval-at"})
      refused("edit", {"--facts", "f", name, list}, "expected a list without empty items");
  refused("edit", {"--facts", "f", "--save", "pack,,model"}, "--save: \"pack,,model\"; expected a list without empty");
  refused("tune", {"--data", "f", "--layers", "1,,2"}, "--layers: \"1,,2\"; expected a list without empty items");
  refused("tune", {"--data", "f", "--layers", "1,x"}, "--layers: \"x\"; expected a whole number from 0 on");
  refused("revert", {"", "--model", "m"}, "an empty text");
  refused("apply", {"a", "--model", ""}, "an empty text");
  refused("lint", {"f", "--out", "g"}, "--out requires --fix");
  refused("revert", {"id", "--all", "--model", "m"}, "excludes");
  refused("generate", {"--strength", "2"}, "--strength requires --control-vector");
  refused("direct", {"ablate", "d", "--out", "o", "--positive", "f"},
          "--positive: goes with fit, not with ablate; leave it out");
  refused("direct", {"fit", "d", "--out", "o"}, "DIR: goes with steer or ablate or bake or optimise, not with fit");
  refused("cache", {"clear", "--max-size", "5GiB"}, "--max-size: goes with prune, not with clear; leave it out");
  refused("cache", {"--remove"}, "--remove: goes with verify, not with list; leave it out");
  for (const char* form : {"peft", "pack", "model", "lora"})
    refused("export", {"p", "--out", "o", "--to", form, "--type", "F16"}, "--type: goes with gguf, not with");
  for (const char* form : {"gguf", "pack", "model"})
    refused("export", {"p", "--out", "o", "--to", form, "--max-rank", "1"}, "--max-rank: goes with peft or lora, not");
  refused("compare", {"one"}, "RUN: At least 2 required but received 1");
  refused("apply", {"p", "--accept-base", "7c2"}, "--accept-base: \"7c2\"; expected 8 hexadecimal digits or more");
  refused("apply", {"p", "--accept-base", "model-1234"}, "expected 8 hexadecimal digits or more");
  refused("edit", {"--facts", "f", "--set", "v_lr=1", "--set", "layers=[2]", "--set", "v_lr=2"},
          "--set: v_lr=1 and v_lr=2; give one of them");
  refused("edit", {"--facts", "f", "--seed", "1", "--seed", "1"}, "--seed is given twice; give it once");
  refused("convert", {"--model", "a", "--to", "hf", "--out", "b"}, "no option --to");  // not: TARGET is given twice
  refused("edit", {"--facts", "f", "--out", "a", "--out", "b", "--out", "c"}, "--out is given 3 times; give it once");
  refused("edit", {"--facts", "f", "--stats-tokens", "1", "--stats-tokens", "2"}, "--stats-tokens is given twice");
  refused("edit", {"--facts", "f", "--strict", "--min-said", "50%"}, "--strict excludes --min-said");
  refused("edit", {"--facts", "f", "--health-limit", "5"}, "--health-limit requires --health-data");
  refused("edit", {"--facts", "f", "--idf-corpus", "g"}, "--idf-corpus requires --snippets");
  for (const char* name : {"--corpus", "--stats-tokens", "--stats-length", "--stats-cache"})
    for (const char* verb : {"edit", "stats"}) {
      std::vector<std::string> words = {name, "5", "--stats-import", "{layer}"};
      if (verb == std::string("edit")) words.insert(words.end(), {"--facts", "f"});
      refused(verb, words, "excludes");
    }
  refused("trace", {"--prompt", "a", "--subject", "a", "--facts", "f"}, "--facts excludes --prompt");
  refused("trace", {"--prompt", "a"}, "--prompt requires --subject");
  refused("suggest", {"--try-limit", "5"}, "--try-limit requires --try");
  refused("diff", {"a", "b", "--top", "5"}, "--top requires --prompts");
  for (const char* name : {"--over-threads", "--neighbours"})
    refused("bench", {name, "1,4294967296"}, "\"4294967296\"; expected a whole number from 1 to 1024");
  refused("import", {"a", "--out", "b", "--limit", "5"}, "--limit requires --facts");
  refused("doctor", {"--full", "--model", "m"}, "--model excludes --full");
}

TEST(Options, ValuesReachTheirPlaces) {
  Options options;
  struct Values {
    bool flag = false;
    int64_t count = 0, most = 1;
    double share = 0;
    std::vector<std::string> words;
    std::vector<int> numbers;
  };
  auto& values = options.arguments<Values>();
  options.add("-f,--flag", &values.flag, "a flag")
      .add("--count", CountOrAuto{&values.count, -1, "things"}, "a number or auto")
      .add("--share", &values.share, "of all", {.limits = {0, 1}})
      .add("WORDS", &values.words, "positional")
      .add("--numbers", &values.numbers, "a list", {.list = true})
      .add("--most", &values.most, "a number");
  Command command({"toy", "", [](Options&) { return VerbRun(); }, ""});
  command.options = options;
  EXPECT_EQ(
      parse_words(command, {"-f", "--count", "auto", "--share", "0.5", "--numbers", "1,2,3", "a", "b", "--most", "7"}),
      "");
  EXPECT_TRUE(values.flag);
  EXPECT_EQ(values.count, -1);
  EXPECT_EQ(values.share, 0.5);
  EXPECT_EQ(values.words, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(values.numbers, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(values.most, 7);
  // Words in brackets, which a parser may take for a list or for nothing.
  for (const char* word : {"[INST] a, b [/INST]", "{}", "[]", "a,,b"}) {
    EXPECT_EQ(parse_words(command, {word}), "");
    EXPECT_EQ(values.words, std::vector<std::string>{word});
  }
  // Arguments behind an option that may be repeated are none of its values.
  Command apply(verb_named("apply"));
  EXPECT_EQ(parse_words(apply, {"--accept-base", "12345678", "a", "b", "--accept-base=87654321", "--model", "m"}), "");
  EXPECT_EQ(apply.options.at("--accept-base").text(), "12345678,87654321");
  EXPECT_EQ(apply.options.at("PACK").text(), "a,b");
  EXPECT_EQ(options.at("--count").text(), "auto");
  EXPECT_EQ(options.at("--numbers").text(), "1,2,3");
  EXPECT_THROW((void)options.at("--nothing"), std::out_of_range);
}

// As Python gives them: by the names of fields, with their types.
TEST(Options, ValuesByFieldName) {
  Options options;
  std::string action, type = "a";
  std::vector<std::string> words, places;
  int64_t count = 3;
  double share = 0;
  bool flag = false;
  options.add("ACTION", &action, "what", {.choices = {"go", "stop"}, .required = true})
      .add("DIR", &places, "where")
      .field("max_words", &count, "at most", {.limits = {1, 10}, .only = {"go"}})
      .field("type", &type, "of it", {.choices = {"a", "b"}})
      .field("share", &share, "of all", {.needs = "words"})
      .field("words", &words, "some")
      .field("flag", &flag, "or not", {.excludes = "words"});
  set_options(options, "go", {{"max_words", 7}, {"dir", "x"}, {"words", {"p", "q"}}, {"share", 1}, {"type", "b"}});
  EXPECT_EQ(count, 7);
  EXPECT_EQ(share, 1);
  EXPECT_EQ(type, "b");
  EXPECT_EQ(places, std::vector<std::string>{"x"});
  EXPECT_EQ(words, (std::vector<std::string>{"p", "q"}));
  const auto refused = [&](const nlohmann::json& values, const std::string& what, const char* action_named = "go") {
    try {
      set_options(options, action_named, values);
      ADD_FAILURE() << values << " was taken";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  refused({{"max_words", 11}}, "max_words: 11; expected a whole number from 1 to 10");
  refused({{"max_words", "7"}}, "max_words");
  refused({{"max_word", 7}}, "max_words");
  refused({{"max_words", 7}}, "no option of stop", "stop");
  refused({{"type", "c"}}, "one of a, b");
  refused({{"share", 0.5}}, "words with it");
  refused({{"flag", true}, {"words", "p"}}, "words without it");
  refused({{"flag", 1}}, "flag");
}

TEST(Options, HelpFitsAHundredColumnsAndHasExamples) {
  std::istringstream lines(all_help());
  for (std::string line; std::getline(lines, line);)
    EXPECT_LE(std::ranges::count_if(line, [](char c) { return (c & 0xC0) != 0x80; }), 99) << line;
}

// Completion and man pages come from the declarations: no option is missing in any.
TEST(Options, ShellsAndManPagesKnowEveryOption) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = completion_script(shell);
    for (const Verb& verb : verbs()) {
      EXPECT_NE(script.find(verb.name), std::string::npos) << shell << " " << verb.name;
      for (const Option& option : Command(verb).options.all())
        if (const auto name = option.spellings().back(); name.starts_with("--")) {
          EXPECT_NE(script.find(name.substr(2)), std::string::npos) << shell << " " << name;
        }
    }
  }
  for (const Verb& verb : verbs()) EXPECT_TRUE(man_page(verb).starts_with(".TH ")) << verb.name;
  size_t named = 0;
  const std::string page = man_page();
  for (size_t at = page.find("\n.BR emend"); at != std::string::npos; at = page.find("\n.BR emend", at + 1)) ++named;
  EXPECT_EQ(named, verbs().size());
  // Words as they are, quoted as each shell needs it; what may stand without an option's name.
  EXPECT_NE(completion_script("zsh").find("carry a model'\\''s facts"), std::string::npos);
  EXPECT_NE(completion_script("zsh").find("auto\\: until two halves"), std::string::npos);
  EXPECT_NE(completion_script("fish").find("carry a model\\'s facts"), std::string::npos);
  EXPECT_NE(completion_script("fish").find("auto: until two halves"), std::string::npos);
  for (const char* shell : {"bash", "zsh", "fish"})
    EXPECT_NE(completion_script(shell).find("bash zsh fish"), std::string::npos) << shell;
}

// An option that moves, goes or changes its words is seen here: write the new text into the file.
TEST(Options, TheHelpIsTheGoldenOne) {
  const fs::path golden = fs::path(EMEND_SOURCE_DIR) / "tests" / "fixtures" / "help.txt";
  const std::string help = all_help();
  const fs::path now = fs::path(::testing::TempDir()) / "help.txt";
  write_file(now, help);
  EXPECT_TRUE(read_file(golden) == help) << "diff " << golden << " " << now;
}

// Markdown files of the project, whole.
std::vector<std::pair<std::string, std::string>> documents() {
  std::vector<std::pair<std::string, std::string>> found;
  const fs::path top = EMEND_SOURCE_DIR;
  for (const auto& entry : fs::recursive_directory_iterator(top / "docs"))
    if (entry.path().extension() == ".md") found.emplace_back(entry.path().filename(), read_file(entry.path()));
  found.emplace_back("README.md", read_file(top / "README.md"));
  return found;
}

std::set<std::string> names_of(const Verb& verb) {
  const Command command(verb);
  std::set<std::string> names = {"--help", "--version"};
  for (const Option& option : command.options.all())
    for (const auto& name : option.spellings()) names.insert(name);
  return names;
}

TEST(OptionDocs, EveryOptionInACodeSpanExists) {
  std::set<std::string> all;
  for (const Verb& verb : verbs()) all.merge(names_of(verb));
  size_t seen = 0;
  const std::regex span("`(--[a-z][a-z0-9-]+)");
  for (const auto& [name, text] : documents())
    for (std::sregex_iterator match(text.begin(), text.end(), span), end; match != end; ++match, ++seen)
      EXPECT_TRUE(all.contains((*match)[1])) << name << ": " << (*match)[1];
  EXPECT_GT(seen, 50U);
}

// "emend VERB … --option" and "memit_edit … --option" on a line of a code block, continued by a backslash.
TEST(OptionDocs, CommandsHaveOptionsOfTheirVerb) {
  size_t seen = 0;
  const std::regex command(
      R"(\n *(?:build/release/bin/)?(memit_edit|emend ([a-z-]+)( [a-z-]+)?)((?: [^\n#]|\\\n)*[^\n#]*))");
  const std::regex option(R"( (--[a-z][a-z0-9-]+))");
  for (const auto& [name, document] : documents()) {
    const std::string text = std::regex_replace(document, std::regex(R"(\\\n *)"), " ");
    for (std::sregex_iterator match(text.begin(), text.end(), command), end; match != end; ++match) {
      const std::string first = (*match)[1] == "memit_edit" ? "edit" : (*match)[2].str(), second = (*match)[3];
      const auto is = [](const std::string& verb) { return [=](const Verb& one) { return one.name == verb; }; };
      const std::string joined = first + (second.empty() ? "" : "-" + second.substr(1));
      const std::string verb = std::ranges::any_of(verbs(), is(joined)) ? joined : first;
      if (std::ranges::none_of(verbs(), is(verb))) continue;  // prose that begins with the name
      const auto known = names_of(verb_named(verb));
      const std::string rest = (*match)[3].str() + (*match)[4].str();
      for (std::sregex_iterator word(rest.begin(), rest.end(), option); word != end; ++word, ++seen)
        EXPECT_TRUE(known.contains((*word)[1])) << name << ": " << (*match)[0] << ": " << (*word)[1];
    }
  }
  EXPECT_GT(seen, 50U);
}

// The README's table of options: choices that are shown exist.
TEST(OptionDocs, TheTableOfTheReadmeIsRight) {
  const std::string text = read_file(fs::path(EMEND_SOURCE_DIR) / "README.md");
  const Command edit(verb_named("edit"));
  const std::regex row(R"re(\n\| `(--[a-z-]+) ?([^`]*)` \|)re");
  size_t rows = 0;
  for (std::sregex_iterator match(text.begin(), text.end(), row), end; match != end; ++match, ++rows) {
    const auto& all = edit.options.all();
    const auto option = std::ranges::find_if(all, [&](const Option& one) { return one.names == (*match)[1]; });
    ASSERT_NE(option, all.end()) << (*match)[1];
    std::istringstream values(std::regex_replace((*match)[2].str(), std::regex(R"(\\\||,)"), " "));
    for (std::string value; values >> value;)
      EXPECT_TRUE(option->choices.empty() || std::ranges::find(option->choices, value) != option->choices.end())
          << option->names << " has no " << value;
  }
  EXPECT_GE(rows, 8U);
}

// A phase that an editor has not takes no time: nothing is divided by that.
TEST(Bench, APhaseOfNoTimeHasNoRates) {
  EXPECT_EQ(phase_document({2, 1, nullptr}, {0, 1, nullptr}, 1, 4).dump(), R"({"reference_s":2.0,"fast_s":0.0})");
  EXPECT_EQ(phase_document({2, 1, nullptr}, {1, 1, nullptr}, 1, 4)["facts_per_second"], 4.0);
}

// A number below its least is refused for every option, not for those somebody thought of.
TEST(Options, EveryNumberHasALeast) {
  const std::set<std::string> any = {"--strength"};  // below 0: against a direction
  for (const Verb& verb : verbs()) {
    Options options;
    (void)verb.setup(options);
    for (const Option& option : options.all()) {
      const bool number = std::holds_alternative<int*>(option.value) ||
                          std::holds_alternative<int64_t*>(option.value) ||
                          std::holds_alternative<double*>(option.value);
      if (number && !any.contains(option.names)) {
        EXPECT_TRUE(std::isfinite(option.limits.min)) << verb.name << " " << option.names;
      }
    }
  }
}

}  // namespace options_test
}  // namespace emend::tools
