// Chat templates: what the language means, what is refused, and what a hostile template cannot do. That the texts are
// those of jinja2 is the matter of tests/integration/jinja_python_test.cpp.
#include <emend/core/error.h>
#include <emend/models/chat.h>
#include <emend/models/detail/jinja.h>
#include <emend/models/tokenizer/gguf_vocabulary.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/error_of.h"
#include "support/tiny_tokenizer.h"

namespace emend::models {
namespace jinja_test {

using nlohmann::ordered_json;

std::string rendered(const std::string& source, const ordered_json& variables = ordered_json::object()) {
  return detail::Jinja(source).render(variables);
}

std::string refused(const std::string& source, ErrorClass expected = ErrorClass::kUnsupported,
                    const ordered_json& variables = ordered_json::object()) {
  SCOPED_TRACE(source.substr(0, 200));
  return testing::error_of([&] { (void)rendered(source, variables); }, expected);
}

TEST(Jinja, BlanksAroundTags) {
  EXPECT_EQ(rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(rendered("a  {%- if true -%}  b  {%- endif %}  c"), "ab  c");
  EXPECT_EQ(rendered("a\n  {%+ if true +%}\nb{% endif %}"), "a\n  \nb");
  EXPECT_EQ(rendered("a {{- ' b ' -}} c"), "a b c");
  EXPECT_EQ(rendered("a\n  {# gone #}\nb"), "a\nb");
}

TEST(Jinja, TitlesAreThoseOfPythonAndOfTheFilter) {
  EXPECT_EQ(rendered("{{ 'user of they\\'re x2y'.title() }} {{ 'éa bB' | title }}"), "User Of They'Re X2Y Éa Bb");
  EXPECT_EQ(rendered("{{ \"they're x2y foo_bar 1st (a-b\" | title }}"), "They're X2y Foo_bar 1st (A-B");
}

TEST(Jinja, GeneratorsAreTrueAndHaveNoLength) {
  const std::string of = "{% if l | select('equalto', 9) %}true{% endif %}";
  EXPECT_EQ(rendered(of, {{"l", {1, 2}}}), "true");
  EXPECT_EQ(rendered("{{ l | select is sequence }}", {{"l", {1, 2}}}), "False");
  EXPECT_EQ(rendered("{% if l | select('equalto', 9) | list %}true{% endif %}{{ l | map('string') | join }}",
                     {{"l", {1, 2}}}),
            "12");
  for (const char* wrong :
       {"{{ l | map('string') | length }}", "{{ l | select }}", "{{ l | select | tojson }}", "{{ (l | select)[0] }}",
        "{{ (l | select)[1:] }}", "{{ l | select | last }}", "{{ (l | select) + [1] }}"})
    EXPECT_NE(refused(wrong, ErrorClass::kUnsupported, {{"l", {1, 2}}}).find("generator"), std::string::npos) << wrong;
}

TEST(Jinja, WhatAnotherTextWouldComeOfIsRefused) {
  (void)refused("{{ missing | int }}");
  (void)refused(
      "{% for x in [1, 2] %}{% set z %}a{% if x == 1 %}{% continue %}{% endif %}b{% endset %}{{ z }}{% endfor %}");
}

TEST(Jinja, LoopsHaveTheirOwnVariables) {
  EXPECT_EQ(rendered("{% for a in [1] %}{% for b in [1] %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}{{ loop.depth "
                     "}}{% endfor %}"),
            "101");
  EXPECT_EQ(
      rendered("{% for a in [1, 2] %}{% for b in [] %}{% else %}{% continue %}{% endfor %}rest{{ a }}{% endfor %}|"),
      "|");
  const std::string counted =
      "{% for x in l if x > 1 %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% else %}none{% endfor %}";
  EXPECT_EQ(rendered(counted, {{"l", {1, 2, 3}}}), "12,23");
  EXPECT_EQ(rendered(counted, {{"l", {0}}}), "none");
  EXPECT_EQ(rendered("{% set n = 0 %}{% for x in [1, 2] %}{% set n = n + x %}{% endfor %}{{ n }}"), "0");
  EXPECT_EQ(rendered("{% set s = namespace(n=0) %}{% for x in [1, 2] %}{% set s.n = s.n + x %}{% endfor %}{{ s.n }}"),
            "3");
  EXPECT_EQ(rendered("{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif "
                     "%}{{ x }}{% endfor %}"),
            "13");
  EXPECT_EQ(rendered("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}"), "a1b2");
}

TEST(Jinja, ValuesArePythons) {
  EXPECT_EQ(rendered("{{ [true, none, 1.0, 'it\\'s', (1,)] }}{{ none }}"), "[True, None, 1.0, \"it's\", (1,)]None");
  EXPECT_EQ(rendered("{{ -7 // 2 }} {{ -7 % 3 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 1e20 }}"), "-4 2 2.0 1024 1e+20");
  EXPECT_EQ(rendered("{{ t[0] }}{{ t[-1] }}{{ t[1:] }}{{ t | length }}", {{"t", "é日x"}}), "éx日x3");
  EXPECT_EQ(rendered("{{ x }}{{ x is defined }}{{ x or 'd' }}"), "Falsed");
  EXPECT_EQ(rendered("{{ d | tojson }}", {{"d", {{"a", "é<\n"}, {"b", {1, nullptr}}}}}),
            "{\"a\": \"é<\\n\", \"b\": [1, null]}");
  EXPECT_EQ(rendered("{% macro m(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(b=2, a=3) }}"), "1x32");
}

TEST(Jinja, ErrorsHaveTheirLine) {
  for (const char* source : {"\n{% include 'a' %}",
                             "\n{% if x %}",
                             "\n{{ 'a",
                             "\n{{ (1 }}",
                             "\n{{ a b }}",
                             "\n{# ",
                             "\n{{ 1 + }}",
                             "\n{% break %}",
                             "\n{{ f(*a) }}",
                             "\n{{ x.y }}",
                             "\n{{ 1 + 'a' }}",
                             "\n{{ 1 | nofilter }}",
                             "\n{{ 1 is notest }}",
                             "\n{{ nofunction() }}",
                             "\n{{ 1 // 0 }}",
                             "\n{{ 'a' | trim(wrong=1) }}",
                             "\n{{ 1 < 'a' }}",
                             "\n{{ '%d' % 1 }}",
                             "\n{{ 9223372036854775807 + 1 }}",
                             "\n{% for x in none %}{% endfor %}",
                             "\n{% set x.y = 1 %}",
                             "\n{{ [1].append(2) }}",
                             "\n{% for a, b in [1, 2] %}{% endfor %}",
                             "\n{{ '99999999999999999999' | int }}",
                             "\n{{ 0 ** -1 }}",
                             "\n{{ (-8) ** 0.5 }}",
                             "\n{{ 'Straße' | upper }}",
                             "\n{{ 'ΑΣ' | lower }}"}) {
    const std::string what = refused(source);
    EXPECT_TRUE(what.starts_with("chat template:2: ")) << source << ": " << what;
  }
  EXPECT_EQ(refused("a\n{{ raise_exception('no ' ~ 'tools') }}", ErrorClass::kInvalidArgument),
            "chat template:2: no tools");
  EXPECT_LT(refused("{{ raise_exception('x' * 9999999) }}", ErrorClass::kInvalidArgument).size(), 1000U);
  refused("{{ x }}", ErrorClass::kInvalidArgument, {{"x", "\xFF"}});
  refused("\xFF");
}

TEST(Jinja, ErrorsNameTheFileOfTheTemplate) {
  const testing::TemporaryFolder folder("templates");
  const auto message = [](const Tokenizer& tokenizer) {
    return testing::error_of([&] { (void)chat_format_of(tokenizer); }, ErrorClass::kUnsupported);
  };
  constexpr const char* kBad = "a\n{% include 'x' %}";
  write_file(folder.path() / "tokenizer.json", testing::byte_level_json().dump());
  for (const auto& [file, content, place] :
       {std::tuple("tokenizer_config.json", ordered_json{{"chat_template", kBad}}.dump(),
                   "tokenizer_config.json: chat_template"),
        {"chat_template.json", ordered_json{{"chat_template", kBad}}.dump(), "chat_template.json: chat_template"},
        {"chat_template.jinja", kBad, "chat_template.jinja"}}) {
    write_file(folder.path() / file, content);
    const std::string what = message(*load_tokenizer(folder.path()));
    EXPECT_TRUE(what.starts_with((folder.path() / place).string() + ":2: ")) << what;
  }
  GgufVocabulary vocabulary;
  vocabulary.source = "model.gguf";
  vocabulary.model = "gpt2";
  vocabulary.tokens = {"a"};
  vocabulary.chat_template = kBad;
  const std::string what = message(*tokenizer_from_gguf(vocabulary));
  EXPECT_TRUE(what.starts_with("model.gguf: tokenizer.chat_template:2: ")) << what;
}

// Each ends soon, with an error.
TEST(Jinja, HostileTemplatesEnd) {
  const auto repeated = [](const std::string& text, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  const std::string endless = "{% for a in range(99999) %}{% for b in range(99999) %}";
  std::string keys, attributes;
  for (int i = 0; i < 40'000; ++i) {
    keys += "'" + std::to_string(i) + "':1,";
    attributes += "{% set s.a" + std::to_string(i) + " = 1 %}";
  }
  const std::vector<std::string> sources = {
      "{% set a = 'a' * 16000000 %}{% set b = 'a' * 8000000 ~ 'b' %}{{ b in a }}",
      "{% set a = 'a' * 16000000 %}{% set b = 'a' * 8000000 ~ 'b' %}{{ a.replace(b, 'x') }}",
      "{% set a = 'a' * 1000000 %}{% set b = 'a' * 500000 ~ 'b' %}{{ a.split(b) }}",
      "{% set a = 'a' * 1000000 %}{% set b = 'b' * 1000000 ~ 'a' %}{{ a.strip(b) }}",
      "{% set d = {" + keys + "} %}",
      "{% set s = namespace() %}" + attributes,
      endless + "{% endfor %}{% endfor %}",
      "{{ 'a' * 999999999 }}",
      "{{ [0] * 999999999999 }}",
      "{{ range(999999999) }}",
      "{% set s = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
      "{% set s = namespace(x=[]) %}{% for i in range(9999) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}",
      "{% set s = namespace(x=['a']) %}{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}",
      "{% set s = namespace(x=['a']) %}{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x == s.x }}",
      "{% set s = namespace(x=['a']) %}{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x | tojson "
      "}}",
      "{% set s = namespace() %}{% set s.s = s %}{{ s }}",
      "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
      "{% set s = namespace() %}{% for i in [1] %}{% macro m() %}{{ i }}{% endmacro %}{% set s.m = m %}{% endfor %}{{ "
      "s.m() }}",
      "{% for i in range(9999) %}" + std::string(20'000, 'a') + "{% endfor %}",
      "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{{ t | length }}{% endfor %}",
      "{{ " + repeated("(", 100'000) + "1" + repeated(")", 100'000) + " }}",
      "{{ " + repeated("[", 100'000) + repeated("]", 100'000) + " }}",
      "{{ " + repeated("-", 100'000) + "1 }}",
      "{{ " + repeated("not ", 100'000) + "1 }}",
      "{{ 1" + repeated(" + 1", 100'000) + " }}",
      "{{ x" + repeated(".x", 100'000) + " }}",
      "{{ x" + repeated(" | trim", 100'000) + " }}",
      "{{ 1" + repeated(" if 1 else 1", 100'000) + " }}",
      repeated("{% if 1 %}", 50'000),
      "{% set " + repeated("(", 100'000) + "a" + repeated(")", 100'000) + " = 1 %}",
      "{{ 1 is " + repeated("eq(", 100'000) + repeated(")", 100'000) + " }}",
      std::string(2 << 20, 'a'),
  };
  for (const auto& source : sources) (void)refused(source);
}

TEST(Jinja, CopiesAndThreadsShareATemplate) {
  const detail::Jinja first("{% set s = namespace(n=n) %}{% set s.n = s.n + 1 %}{{ s.n }}");
  const detail::Jinja copy = first;
  EXPECT_EQ(first.render({{"n", 1}}), "2");
  EXPECT_EQ(copy.render({{"n", 5}}), "6");
  EXPECT_EQ(first.render({{"n", 1}}), "2");
}

}  // namespace jinja_test
}  // namespace emend::models
