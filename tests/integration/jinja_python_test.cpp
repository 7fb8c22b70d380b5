// Chat templates are rendered as by jinja2 in the environment of transformers: own templates for the parts of the
// language, and the default model's.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/models/checkpoint.h>
#include <emend/models/detail/jinja.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/default_model.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace emend::models {
namespace jinja_python_test {

using emend::testing::TemporaryFolder;
using nlohmann::ordered_json;

// Prints the template, the conversation and both texts where they differ. An error has the text null.
constexpr const char* kScript = R"(
import json, sys
from transformers.utils.chat_template_utils import _compile_jinja_template
bad = 0
jobs = json.load(open(sys.argv[1]))
for job in jobs:
    try:
        want = _compile_jinja_template(job["template"]).render(**job["variables"])
    except Exception as error:
        want = None
    if want != job["text"]:
        bad += 1
        if bad < 6: print(ascii(job["template"]), ascii(job["variables"]["messages"]), ascii(want), ascii(job["text"]), job["error"], sep="\n")
print("checked", len(jobs), "bad", bad)
)";

const std::vector<std::string>& templates() {
  static const std::vector<std::string> all = {
      // Blanks and line breaks
      "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n{% endfor %}\n",
      "{% for m in messages %}\n  {%- if m.role == 'user' %}\n[U] {{ m.content }}\n  {%- else -%}\n[O]{{ m.content }}\n"
      "  {% endif %}\n{% endfor %}x\n\n",
      "a  {#- gone -#}  b {# kept #}\n  {# line #}\n  c {%+ if true %} d {%+ endif +%}\n e",
      "  {% if messages %}\n  x {% endif %} y\n\t{%- set a = 1 %}\n{{- a }} z",
      "{{ 'a' -}}   b   {{- 'c' }}\r\nd\r{% if true %}\r\ne{% endif %}",
      "{% set a %}\n {{ messages[0].content if messages }} \n{% endset %}[{{ a }}]",
      "{%- set a | trim | upper %}  {{ 'x' }}y {% endset %}[{{ a }}]",
      "{% generation %}{{ messages | length }}{% endgeneration %}\n{% if true %}\n{% generation %}a{% endgeneration "
      "%}\n{% endif %}",
      "{{ \"}}\" }}{{ {'a': {'b': 1}}['a']['b'] }}{{ '%}' }}{% if '%}' %}x{% endif %}",
      // Loops
      "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}"
      "{{ loop.last }}{{ loop.length }};{% else %}none{% endfor %}",
      "{% for m in messages %}{{ m.role }}{% break %}{% else %}none{% endfor %}",
      "{% for m in messages %}{% continue %}{% else %}none{% endfor %}",
      "{% macro m(z='d') %}[{{ z }}]{% endmacro %}{{ m(absent) }}{{ m() }}{{ m(z=absent) }}",
      "{% set d = {'a': 1, 'b': 2, 'a': 3} %}{{ d }}{{ 'ǆx' | capitalize }}{{ 'ǆx' | upper }}{{ 'x' | int(7) }}{{ "
      "'inf' | int }}",
      "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}",
      "{% for m in messages %}{{ loop.previtem.role if not loop.first else '-' }}>{{ loop.nextitem.role if "
      "loop.nextitem "
      "is defined else '-' }};{% endfor %}",
      "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index "
      "== 3 "
      "%}{% break %}{% endif %}{% endfor %}",
      "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}{{ "
      "v }}"
      "{% endfor %}",
      "{% for a in [1, 2] %}{% for b in 'xy' %}{{ loop.index }}{{ a }}{{ b }}{% endfor %}{{ loop.index }}{% endfor %}",
      "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}|{% for m in messages[1:] %}{{ m.content }}{% endfor %}|"
      "{% for m in messages[:-1] %}{{ m.role }}{% endfor %}",
      "{% for c in missing %}x{% else %}empty{% endfor %}{% for k in {'a': 1} %}{{ k }}{% endfor %}",
      "{% for a in [1, 2] %}{% for b in 'xy' %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}{{ loop.depth }}{% endfor "
      "%}",
      "{{ \"they're x2y foo_bar 1st (a-b [c\" | title }}{{ \"they're x2y foo_bar\".title() }}",
      "{% if messages | selectattr('role', 'equalto', 'nobody') %}always{% endif %}{% if messages | "
      "selectattr('role', 'equalto', 'nobody') | list %}never{% endif %}{{ messages | map(attribute='role') | join }}",
      "{% for a in [1, 2] %}{% for b in [] %}{% else %}{% continue %}{% endfor %}rest{{ a }}{% endfor %}|",
      // Variables
      "{% set n = 0 %}{% for m in messages %}{% set n = n + 1 %}{{ n }}{% endfor %}{{ n }}",
      "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen "
      "~ "
      "m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
      "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% if true %}{% set a = 2 %}{% endif %}{{ a }}",
      "{% set t = (1,) %}{{ t }}{{ () }}{{ (1, 'a') }}{{ [1, [none, true]] }}{{ {'a': 'it\\'s', 'b': \"q\\\"\"} }}",
      "{{ missing }}{{ messages[99] }}{{ missing is defined }}{{ bos_token is defined }}{{ tools is none }}{{ missing "
      "or 'd' }}",
      "{{ missing.attribute }}",
      "{{ messages[0].nothing.more }}",
      "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}ok",
      // Macros
      "{% macro turn(role, content='none', end='\\n') %}<{{ role }}>{{ content }}{{ end }}{% endmacro %}"
      "{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}{{ turn('a', end='!') }}{{ turn(role='b') }}",
      "{% macro down(n) %}{{ n }}{% if n > 0 %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(5) }}",
      "{% set who = 'x' %}{% macro m() %}{{ who }}{% set who = 'z' %}{% endmacro %}{% set who = 'y' %}{{ m() }}{{ who "
      "}}",
      "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, 2) | upper }}",
      // Operators
      "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.5 "
      "// 2 }}",
      "{{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 'a' * 3 }} {{ [0] * 2 }} {{ 'a' ~ 1 ~ "
      "none }}",
      "{{ 1 < 2 < 3 }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ [1] == [1] }} {{ 1 == true }} {{ '1' == 1 }} {{ (1, 2) < (1, "
      "3) }}",
      "{{ 'a' in 'cat' }} {{ 'x' not in ['x'] }} {{ 'role' in messages[0] }} {{ not 1 == 2 }} {{ 0 or '' or [] }} {{ 1 "
      "and 'b' }}",
      "{{ 'x' if messages }}{{ 'y' if false }}|{{ 1 if false else 2 if false else 3 }}",
      "{{ 'a' + 1 }}",
      "{{ 1e3 }} {{ 1.5 }} {{ 1e16 }} {{ 1e-5 }} {{ 0.1 + 0.2 }} {{ 1_000 }} {{ 123456789.123 }} {{ 1e22 }}",
      "{{ 'a\\n\\t\\'\\x41\\u00e9\\\\' }}{{ 'a' 'b' }}{{ \"\\q\" }}",
      // Texts
      "{% for m in messages %}{{ m.content.strip() }}|{{ m.content | trim }}|{{ m.content.lstrip() }}|{{ "
      "m.content.rstrip('\\n .') "
      "}}|{{ m.content[0] }}|{{ m.content[-1] }}|{{ m.content[1:3] }}|{{ m.content[::-1] }}|{{ m.content | length "
      "}};{% endfor %}",
      "{% for m in messages %}{{ m.content.split() }}{{ m.content.split(' ', 1) }}{{ m.content.rsplit(' ', 1) }}"
      "{{ m.content.split('</think>')[-1] }}{{ m.content.rsplit() }}{{ "
      "m.content.split(none, 1) }}{% endfor %}",
      "{{ 'aXbX'.replace('X', '--') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'abc' | replace('b', 1) }}"
      "{{ 'a-b'.startswith('a') }}{{ 'a-b'.endswith(('c', 'b')) }}",
      "{{ 'hELLO wORLD' | capitalize }} {{ "
      "'äÖ'.upper() }} "
      "{{ 'ÄÖ' | lower }} {{ ','.join(['a', 'b']) }} {{ ', '.join('xyz') }}",
      "{% for m in messages %}{{ m.content | indent(2) }}/{{ m.content | indent(1, true) }}/{{ m.content | "
      "indent(width=3, "
      "blank=true) }};{% endfor %}",
      "{{ 'xaxbx'.strip('x') }}",
      // Filters
      "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}\n{{ [] | tojson(indent=2) }}{{ {} | tojson }}{{ "
      "'é\\n\"<' | tojson }}"
      "{{ [1, 1.5, none, true] | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': [1, {}]} | tojson(indent=4) }}",
      "{{ messages | map(attribute='role') | join(', ') }} {{ messages | map(attribute='x', default='?') | join }} {{ "
      "['a', 'b'] | "
      "map('upper') | list }}",
      "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ messages | "
      "rejectattr('role', "
      "'in', ['user', 'system']) | list | length }}{{ messages | selectattr('content') | list | length }}",
      "{{ [1, 2, 3, 4] | select('odd') | list }}{{ [1, 2, 3, 4] | reject('gt', 2) | list }}{{ [0, 1, ''] | select | "
      "list }}",
      "{{ missing | default('d') }}{{ '' | default('d') }}{{ '' | default('d', true) }}{{ none | d('x') }}{{ false | "
      "d('y', boolean=true) }}",
      "{{ {'b': 1, 'A': 2} | dictsort }}{{ {'b': 1, 'a': 2} | dictsort(by='value') }}{{ {'a': 1} | items | list }}{{ "
      "{'a': 1}.keys() | list }}"
      "{{ {'a': 1}.values() | list }}{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b') }}{{ {'a': 1}.get('b', 7) }}",
      "{{ [3, 1, 2] | sort }}{{ ['b', 'A', 'a'] | sort }}{{ [3, 1] | sort(reverse=true) }}{{ messages | "
      "sort(attribute='role') | "
      "map(attribute='role') | list }}",
      "{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [] | first "
      "}}{{ 'abc' | last }}"
      "{{ [1, 2] | reverse | list }}{{ 'abc' | reverse }}",
      "{{ '42' | int + 1 }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ 3.9 | int }}{{ 1 | "
      "string + 'a' }}"
      "{{ 'abc' | list }}{{ 'a' | safe }}{{ '3.7' | int }}",
      "{{ range(3) | list }}{{ range(1, 10, 3) | list }}{{ range(3, 0, -1) | list }}{{ dict(a=1, b=2) }}{{ dict({'a': "
      "1}, a=2) }}",
      "{{ messages | nofilter }}",
      // Tests
      "{% for v in [1, 1.5, 'a', none, true, [1], {'a': 1}, missing] %}{{ v is string }}{{ v is mapping }}{{ v is "
      "iterable }}{{ v is sequence }}"
      "{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is none }}{{ v is defined }}{{ v is "
      "undefined }}"
      "{{ v is true }}{{ v is false }}{{ v is not none }};{% endfor %}",
      "{{ 2 is even }}{{ 3 is odd }}{{ 3 is eq 3 }}{{ 3 is equalto 4 }}{{ 3 is ne 3 }}{{ 3 is gt 2 }}{{ 3 is lt(2) "
      "}}{{ 3 is ge 3 }}"
      "{{ 'a' is in ['a'] }}{{ 'a' is not in 'b' }}",
      // Whole templates of other shapes
      "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set head = "
      "messages[0]['content'] | "
      "trim + '\\n\\n' %}{% else %}{% set rest = messages %}{% set head = '' %}{% endif %}{% for m in rest %}{% if "
      "(m['role'] == 'user') != "
      "(loop.index0 % 2 == 0) %}{{ raise_exception('turns take turns') }}{% endif %}{{ '<' ~ m['role'] ~ '>' ~ (head "
      "if loop.first else '') "
      "~ m['content'] | trim ~ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
      "{%- set last = namespace(at=-1) %}\n{%- for m in messages[::-1] %}\n    {%- set at = (messages|length - 1) - "
      "loop.index0 %}\n    {%- if "
      "last.at < 0 and m.role == \"user\" %}\n        {%- set last.at = at %}\n    {%- endif %}\n{%- endfor %}\n{%- "
      "for m in messages %}\n"
      "    {%- set content = m.content %}\n    {%- if '</think>' in content and loop.index0 < last.at %}\n        {%- "
      "set content = "
      "content.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n    {{- '[' + m.role + ']\\n' + content + "
      "'[/]\\n' }}\n{%- endfor %}\n"
      "{%- if add_generation_prompt %}\n    {{- '[assistant]\\n' }}\n    {%- if enable_thinking is defined and "
      "enable_thinking is false %}\n"
      "        {{- '[think]' }}\n    {%- endif %}\n{%- endif %}\n",
      "{{ strftime_now('%Y') | length }}{{ strftime_now('%d %b %Y') }}",
      "{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}{{ "
      "part['text'] }}{%- endfor -%}"
      "{%- endif -%}{%- endmacro -%}{%- for m in messages -%}{{ text(m.content) }}{{ text([{'text': m.role}]) }}{%- "
      "endfor -%}",
  };
  return all;
}

std::vector<ordered_json> conversations() {
  const auto turns = [](const std::vector<std::pair<const char*, const char*>>& list) {
    ordered_json messages = ordered_json::array();
    for (const auto& [role, content] : list) messages.push_back({{"role", role}, {"content", content}});
    return messages;
  };
  return {turns({{"user", "Hello there"}}),
          turns({{"system", "Be brief. "},
                 {"user", " Grüße,\t\"Ann\"\n"},
                 {"assistant", "It's 日本."},
                 {"user", "a\n\nb c"}}),
          turns({{"user", "1"}, {"assistant", "<think>\nhm\n</think>\n\nYes  no"}, {"user", "\u3000x\u00a0"}}),
          turns({})};
}

void compare(const std::vector<std::string>& all) {
  ordered_json jobs = ordered_json::array();
  for (const auto& source : all)
    for (const auto& messages : conversations())
      for (const bool open : {false, true}) {
        ordered_json job = {{"template", source}, {"text", nullptr}, {"error", ""}};
        job["variables"] = {{"messages", messages}, {"add_generation_prompt", open},
                            {"tools", nullptr},     {"documents", nullptr},
                            {"bos_token", "<s>"},   {"eos_token", "</s>"}};
        try {
          job["text"] = detail::Jinja(source).render(job["variables"]);
        } catch (const Error& error) {
          job["error"] = error.what();
        }
        jobs.push_back(job);
      }
  const TemporaryFolder work("emend-jinja-python");
  work.write("jobs.json", jobs.dump());
  work.write("check.py", kScript);
  const auto [status, output] =
      emend::testing::run_shell(emend::testing::test_python().string() + " " + (work.path() / "check.py").string() +
                                " " + (work.path() / "jobs.json").string());
  EXPECT_EQ(status, 0) << output;
  EXPECT_NE(output.find("checked " + std::to_string(jobs.size()) + " bad 0\n"), std::string::npos) << output;
}

TEST(JinjaPython, OwnTemplates) {
  EMEND_NEEDS_PYTHON();
  compare(templates());
}

TEST(JinjaPython, TheDefaultModelsTemplate) {
  EMEND_NEEDS_PYTHON();
  EMEND_NEEDS_DEFAULT_MODEL();
  const auto tokenizer = open_checkpoint(emend::testing::default_model_path().string())->load_tokenizer();
  ASSERT_FALSE(tokenizer->chat_template().empty());
  compare({tokenizer->chat_template()});
}

}  // namespace jinja_python_test
}  // namespace emend::models
