// The report's texts and tables.
#include <emend/evaluation/detail/case_values.h>
#include <emend/evaluation/detail/html.h>
#include <emend/evaluation/detail/report_sections.h>
#include <emend/evaluation/evaluation.h>

#include <algorithm>
#include <cmath>

namespace emend::evaluation::detail {
namespace {

using nlohmann::json;

constexpr size_t kCardsShown = 12, kCardsMost = 60, kRowsMost = 1500;

std::string tag(const std::string& name, const std::string& attributes, const std::string& inside) {
  return "<" + name + (attributes.empty() ? "" : " " + attributes) + ">" + inside + "</" + name + ">";
}

std::string full_prompt(const json& line) {
  std::string prompt = text(line, "prompt");
  const std::string subject = text(line, "subject");
  if (const size_t slot = prompt.find("{}"); slot != std::string::npos) prompt.replace(slot, 2, subject);
  return prompt;
}

std::string target_of(const json& line) {
  for (const char* key : {"target", "target_new"}) {
    const json& value = member(line, {key});
    if (value.is_string()) return value.get<std::string>();
    if (value.is_object()) return text(value, "str");
  }
  return "";
}

/// Why a case did not work out; empty if it did.
std::string reason_of(const json& line, const std::string& status) {
  // An edit that stopped at the norm limit or at the last step is written all the same; the metrics below judge it.
  static const std::vector<std::string> good = {"",       "ok",        "applied", "done",     "success",
                                                "edited", "converged", "clamped", "max_steps"};
  if (std::find(good.begin(), good.end(), status) == good.end()) {
    for (const char* key : {"reason", "error", "message"})
      if (const std::string said = text(line, key); !said.empty()) return status + ": " + said;
    return status;
  }
  const auto after = target_probabilities(line, "post");
  if (after.fresh && after.old && !(*after.fresh > *after.old))
    return "applied, but the new answer is not the more probable one (new " + probability(*after.fresh) + ", old " +
           probability(*after.old) + ")";
  const auto values = case_values("easyedit", case_metrics(line, "post", "easyedit"));
  if (!after.old && values.count("rewrite_acc") && values.at("rewrite_acc") < 1)
    return "applied, but the model does not say the target in full (" + fixed(100 * values.at("rewrite_acc"), 0) +
           " % of its tokens)";
  return "";
}

/// Paired number with its exact value for machines.
std::string value_cell(const std::optional<double>& value, const std::string& id, int digits) {
  std::string attributes = "data-metric=\"" + escape(id) + "\"";
  if (value) attributes += " data-value=\"" + json(*value).dump() + "\"";
  return tag("td", attributes, fixed(value, digits));
}

/// "efficacy success (ES)", "Reliability"
std::string readable(const MetricField& field) {
  if (field.paper_name.size() > 3) return field.paper_name;
  std::string name = field.key;
  std::replace(name.begin(), name.end(), '_', ' ');
  return name + " (" + field.paper_name + ")";
}

int digits_for(const std::string& unit) {
  return unit == "nat" ? 4 : unit == "perplexity" ? 2 : 1;
}

struct Row {
  std::string key, name, definition, unit;
  bool higher_is_better = true;
  const json *before, *after, *before_table, *after_table;
};

/// The numbers that a family's table shows: its declared fields, then the keys of locality and portability.
std::vector<Row> rows_of(const MetricInfo& info, const json& before, const json& after) {
  std::vector<Row> rows;
  for (const auto& field : info.fields) {
    const json &pre = member(before, {field.key}), &post = member(after, {field.key});
    if (pre.is_null() && post.is_null()) continue;
    rows.push_back({field.key, field.paper_name, field.definition, field.unit, field.higher_is_better, &pre, &post,
                    &before, &after});
  }
  for (const char* group : {"locality", "portability"}) {
    const json &pre = member(before, {group}), &post = member(after, {group});
    const json& keys = post.is_object() && !post.empty() ? post : pre;
    if (!keys.is_object()) continue;
    for (const auto& item : keys.items()) {
      if (!item.value().is_number()) continue;
      std::string name = item.key();
      if (name.ends_with("_acc")) name.resize(name.size() - 4);
      std::replace(name.begin(), name.end(), '_', ' ');
      rows.push_back({item.key(), std::string(group) + ": " + name,
                      "The " + std::string(group) + " key of this name in the facts file.", "%", true,
                      &member(pre, {item.key()}), &member(post, {item.key()}), &pre, &post});
    }
  }
  return rows;
}

std::string metric_row(const std::string& family, const Row& row) {
  const auto before = as_number(*row.before), after = as_number(*row.after);
  const int digits = digits_for(row.unit);
  std::string change = "–", style;
  if (before && after) {
    const double difference = *after - *before;
    change = (difference > 0 ? "+" : "") + fixed(difference, digits);
    if (std::fabs(difference) >= 0.05)
      style = (difference > 0) == row.higher_is_better ? "class=\"up\"" : "class=\"down\"";
  }
  const json& table = row.after->is_null() ? *row.before_table : *row.after_table;
  std::string interval = fixed(as_number(member(table, {"ci95", row.key})), digits);
  if (const json& range = member(table, {row.key + "_ci95"}); range.is_array() && range.size() == 2)
    interval = fixed(as_number(range[0]), digits) + " … " + fixed(as_number(range[1]), digits);
  else if (interval != "–")
    interval = "± " + interval;
  std::optional<double> n = as_number(member(table, {"counts", row.key}));
  if (!n) n = as_number(member(table, {"n"}));
  const std::string id = family + "." + row.key;
  return tag("tr", "",
             tag("td", "",
                 tag("abbr", "title=\"" + escape(row.definition) + "\"", escape(row.name)) +
                     " <span class=\"soft small hide-narrow\">" + escape(row.key) + "</span>") +
                 value_cell(before, id + ".pre", digits) + value_cell(after, id + ".post", digits) +
                 tag("td", style, change) + tag("td", "class=\"soft hide-narrow\"", interval) +
                 tag("td", "class=\"soft hide-narrow\"", escape(row.unit)) +
                 tag("td", "class=\"soft\"", n ? fixed(n, 0) : "–"));
}

std::string model_name(const RunReport& run) {
  return std::filesystem::path(as_text(member(run.results, {"model", "path"}), "a model")).filename().string();
}

std::string verdict(const RunReport& run, const std::vector<CaseState>& cases) {
  const auto facts = number(run.results, "facts").value_or(static_cast<double>(cases.size()));
  const auto failed_cases = std::count_if(cases.begin(), cases.end(), [](const CaseState& c) { return c.failed(); });
  std::string out = tag("b", "", fixed(facts, 0) + (facts == 1 ? " fact" : " facts")) + " written with " +
                    tag("b", "", escape(text(run.results, "editor", "an editor"))) + " into " +
                    tag("b", "", escape(model_name(run))) + ". ";
  if (!cases.empty())
    out += failed_cases == 0
               ? "In all of them the new answer is now the more probable one, or said in full. "
               : tag("span", "class=\"reason\"",
                     std::to_string(failed_cases) + " of " + std::to_string(cases.size()) + " did not work out") +
                     " (below). ";
  const auto before = as_number(member(run.results, {"metrics", "counterfact", "pre", "score"})),
             after = as_number(member(run.results, {"metrics", "counterfact", "post", "score"}));
  if (before && after) out += "The CounterFact score went from " + fixed(*before) + " to " + fixed(*after) + ". ";
  if (const auto seconds = as_number(member(run.results, {"seconds", "total"})))
    out += "It took " + duration(*seconds) + ".";
  return out;
}

std::string card(const CaseState& state, const json& words, bool with_texts) {
  const json& line = *state.line;
  const auto before = target_probabilities(line, "pre"), after = target_probabilities(line, "post");
  auto p_before = number(words, "probability_before"), p_after = number(words, "probability_after");
  if (!p_before) p_before = before.fresh;
  if (!p_after) p_after = after.fresh;
  std::string out =
      "<p>" +
      tag("b", "", escape(shorten(with_texts ? text(words, "prompt", full_prompt(line)) : full_prompt(line), 240))) +
      " <span class=\"soft\">→ " +
      escape(shorten(target_of(line).empty() ? text(words, "target") : target_of(line), 120)) + "</span></p>";
  if (state.failed()) out += tag("p", "class=\"reason\"", escape(shorten(state.reason, 300)));
  if (with_texts) {
    for (const char* when : {"before", "after"})
      out += "<div class=\"said\"><span class=\"tag\">" + std::string(when) + "</span><span><span class=\"" + when +
             "\">…" + escape(shorten(text(words, when), 240)) + "</span></span></div>";
  }
  const auto meter = [](const char* name, double p, const char* style) {
    return "<div class=\"prob\"><span>" + std::string(name) + "</span><span class=\"meter\"><i" + style +
           " style=\"width:" + fixed(100 * std::clamp(p, 0.0, 1.0), 1) + "%\"></i></span><span>p " +
           escape(probability(p)) + "</span></div>";
  };
  if (p_before) out += meter("before", *p_before, " class=\"old\"");
  if (p_after) out += meter("after", *p_after, "");
  return tag("div", state.failed() ? "class=\"card failed\"" : "class=\"card\"", out);
}

}  // namespace

std::vector<CaseState> case_states(const RunReport& run) {
  std::vector<CaseState> states;
  for (const auto& line : run.cases) {
    const std::string status = text(line, "status");
    states.push_back({&line, status.empty() ? "applied" : status, reason_of(line, status)});
  }
  std::stable_sort(states.begin(), states.end(),
                   [](const CaseState& a, const CaseState& b) { return a.failed() && !b.failed(); });
  return states;
}

// Of a fine-tuning.
std::string training_verdict(const RunReport& run) {
  const json& steps = member(run.results, {"steps"});
  const json& rows = member(run.results, {"rows"});
  std::string out = tag("b", "", std::to_string(steps.is_array() ? steps.size() : 0) + " steps") + " on " +
                    escape(text(rows, "used")) + " rows into " + tag("b", "", escape(model_name(run))) + ".";
  if (steps.is_array() && !steps.empty())
    out += " Loss: first step " + fixed(number(steps.front(), "loss"), 3) + ", last step " +
           fixed(number(steps.back(), "loss"), 3) + ".";
  return out;
}

std::string heading(const RunReport& run, const std::vector<CaseState>& cases) {
  if (run.results.contains("tune"))
    return "<header><h1>What this training did</h1><p>" + training_verdict(run) + "</p></header>";
  std::string out = "<header><h1>What this edit did</h1><p>" + verdict(run, cases) + "</p>";
  std::string tiles;
  for (const auto& info : metric_families()) {
    const json &pre = member(run.results, {"metrics", info.name, "pre"}),
               &post = member(run.results, {"metrics", info.name, "post"});
    const json& shown = post.is_null() ? pre : post;
    if (shown.is_null()) continue;
    int count = 0;
    for (const auto& field : info.fields) {
      const auto value = number(shown, field.key);
      if (!value || ++count > 4) continue;
      const auto before = post.is_null() ? std::nullopt : number(pre, field.key);
      tiles +=
          tag("div", "class=\"tile\"",
              tag("abbr", "class=\"soft small\" title=\"" + escape(field.definition) + "\"", escape(readable(field))) +
                  tag("b", "", fixed(value, digits_for(field.unit))) +
                  tag("span", "class=\"soft small\"",
                      before ? "before " + fixed(before, digits_for(field.unit)) : escape(field.unit)));
    }
    if (!tiles.empty()) break;  // one family is enough here; the tables have the rest
  }
  if (!tiles.empty()) out += tag("div", "class=\"tiles\"", tiles);
  return out + "</header>";
}

std::string changes_section(const RunReport& run, const std::vector<CaseState>& cases) {
  const json& list = member(run.extras, {"continuations"});
  std::map<std::string, const json*> words;
  if (list.is_array())
    for (const auto& one : list) words.emplace(text(one, "case_id"), &one);
  static const json nothing = json::object();
  std::vector<std::string> cards;
  for (const auto& state : cases) {
    const auto found = words.find(text(*state.line, "case_id"));
    const bool has_words = found != words.end() && !found->first.empty();
    const auto p = target_probabilities(*state.line, "post");
    if (has_words || state.failed() || p.fresh)
      cards.push_back(card(state, has_words ? *found->second : nothing, has_words));
    if (cards.size() == kCardsMost) break;
  }
  if (cases.empty() && list.is_array())  // a report without cases
    for (const auto& one : list)
      if (cards.size() < kCardsMost) cards.push_back(card({&nothing, "", ""}, one, true));
  if (cards.empty()) return "";
  std::string shown, more;
  for (size_t i = 0; i < cards.size(); ++i) (i < kCardsShown ? shown : more) += cards[i];
  std::string out =
      "<section><h2>In words</h2><p class=\"soft\">What the model writes after each prompt, and how probable it finds "
      "the new answer. "
      "Edits that did not work out come first.</p>" +
      tag("div", "class=\"cards\"", shown);
  if (!more.empty())
    out += tag("details", "",
               tag("summary", "", "Show " + std::to_string(cards.size() - kCardsShown) + " more") +
                   tag("div", "class=\"cards\"", more));
  const size_t all = std::max(cases.size(), list.is_array() ? list.size() : size_t{0});
  if (all > cards.size())
    out +=
        "<p class=\"soft small\">" + std::to_string(all - cards.size()) + " more in cases.jsonl and report.json.</p>";
  return out + "</section>";
}

std::string metrics_section(const RunReport& run) {
  std::string out;
  for (const auto& info : metric_families()) {
    const json &before = member(run.results, {"metrics", info.name, "pre"}),
               &after = member(run.results, {"metrics", info.name, "post"});
    if (before.is_null() && after.is_null()) continue;
    std::string rows, definitions;
    for (const auto& row : rows_of(info, before, after)) {
      rows += metric_row(info.name, row);
      definitions += tag("dt", "", escape(row.name)) + tag("dd", "", escape(row.definition));
    }
    if (rows.empty()) continue;
    out += "<div class=\"card\" style=\"margin-bottom:12px\"><h3>" + escape(info.name) +
           "</h3><p class=\"soft small\">" + escape(info.protocol) +
           "</p><div class=\"scroll\"><table><thead><tr><th>metric</th><th>before</th><th>after</th><th>change</th>"
           "<th class=\"hide-narrow\">95 % interval</th><th "
           "class=\"hide-narrow\">unit</th><th>n</th></tr></thead><tbody>" +
           rows + "</tbody></table></div>" +
           tag("details", "class=\"small\"", "<summary>Definitions</summary>" + tag("dl", "", definitions)) + "</div>";
  }
  return out.empty() ? "" : "<section><h2>Measured</h2>" + out + "</section>";
}

std::string cases_section(const RunReport& run, const std::vector<CaseState>& cases) {
  if (cases.empty()) return "";
  std::string rows;
  const size_t shown = std::min(cases.size(), kRowsMost);
  for (size_t i = 0; i < shown; ++i) {
    const json& line = *cases[i].line;
    const auto before = target_probabilities(line, "pre"), after = target_probabilities(line, "post");
    const auto values = case_values("counterfact", case_metrics(line, "post", "counterfact"));
    const auto percent = [&](const char* key) {
      return values.count(key) ? fixed(100 * values.at(key), 0) : std::string("–");
    };
    const auto p = [](const std::optional<double>& value) {
      return value ? escape(probability(*value)) : std::string("–");
    };
    rows += tag("tr", "",
                tag("td", "", escape(text(line, "case_id", std::to_string(i)))) +
                    tag("td", "class=\"text\"", escape(shorten(full_prompt(line), 90))) +
                    tag("td", "class=\"text\"", escape(shorten(target_of(line), 40))) +
                    tag("td", cases[i].failed() ? "class=\"text reason\"" : "class=\"text\"",
                        escape(shorten(cases[i].failed() ? cases[i].reason : cases[i].status, 160))) +
                    tag("td", "", escape(text(line, "steps", "–"))) +
                    tag("td", "", number(line, "loss") ? escape(significant(*number(line, "loss"))) : "–") +
                    tag("td", "", p(before.fresh)) + tag("td", "", p(after.fresh)) +
                    tag("td", "", percent("paraphrase_success")) + tag("td", "", percent("neighborhood_success")));
  }
  std::string out = "<section><h2>Every edit</h2><details><summary>" + std::to_string(cases.size()) +
                    (cases.size() == 1 ? " edit" : " edits") +
                    "</summary><div class=\"scroll\"><table><thead><tr><th>case</th><th class=\"text\">prompt</th><th "
                    "class=\"text\">new answer</th>"
                    "<th class=\"text\">state</th><th>steps</th><th>loss</th><th>p before</th><th>p "
                    "after</th><th>paraphrases %</th><th>neighbours %</th>"
                    "</tr></thead><tbody>" +
                    rows + "</tbody></table></div>";
  if (shown < cases.size())
    out += "<p class=\"soft small\">" + std::to_string(cases.size() - shown) + " more in cases.jsonl.</p>";
  return out + "</details></section>";
}

std::string reproduce_section(const RunReport& run) {
  const auto entry = [](const std::string& name, const std::string& value) {
    return value.empty() ? "" : tag("dt", "", escape(name)) + tag("dd", "", escape(value));
  };
  std::string list = entry("emend", text(run.results, "emend")) +
                     entry("model", as_text(member(run.results, {"model", "path"}))) +
                     entry("family", as_text(member(run.results, {"model", "family"}))) +
                     entry("fingerprint", as_text(member(run.results, {"model", "fingerprint"})));
  if (const auto parameters = as_number(member(run.results, {"model", "parameters"})))
    list += entry("parameters", grouped(static_cast<int64_t>(*parameters)));
  list += entry("editor", text(run.results, "editor")) + entry("engine", text(run.results, "engine")) +
          entry("dtype", text(run.results, "dtype")) + entry("seed", text(run.results, "seed")) +
          entry("started", text(run.extras, "started")) + entry("folder", text(run.extras, "directory"));
  for (const char* group : {"versions", "machine"})
    if (const json& object = member(run.extras, {group}); object.is_object())
      for (const auto& item : object.items())
        list += entry(item.key(), item.value().is_string() ? item.value().get<std::string>() : item.value().dump());
  std::string changed;
  if (const json& weights = member(run.results, {"weights_changed"}); weights.is_array())
    for (const auto& name : weights) changed += (changed.empty() ? "" : ", ") + as_text(name);
  list += entry("weights changed", changed);
  std::string out = "<section><h2>To do it again</h2>";
  if (const std::string command = text(run.extras, "command"); !command.empty()) out += tag("pre", "", escape(command));
  out += tag("dl", "", list);
  if (const json& hparams = member(run.results, {"hparams"}); hparams.is_object() && !hparams.empty())
    out += tag("details", "",
               "<summary>Hyper-parameters</summary>" +
                   tag("pre", "", escape(hparams.dump(2, ' ', false, json::error_handler_t::replace))));
  if (const json& notes = member(run.extras, {"notes"}); notes.is_array())
    for (const auto& note : notes) out += tag("p", "class=\"soft\"", escape(as_text(note)));
  return out + "</section>";
}

}  // namespace emend::evaluation::detail
