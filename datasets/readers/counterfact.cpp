// CounterFact as ROME and MEMIT publish it, with the fields that later work added: portability questions, unrelated
// relations, distracting neighbourhoods and alternative subjects. Multi-CounterFact has the same rows.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_counterfact(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"requested_rewrite"}) && rows.front().value("requested_rewrite", nlohmann::json()).is_object();
}

ParsedRow read_counterfact(Fields& fields, const ReadOptions&) {
  Fact fact;
  Fields rewrite = fields.object("requested_rewrite");
  if (auto why = read_core(rewrite, "prompt", "target_new", fact); !why.empty()) return {.skipped = std::move(why)};
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  set_true_answers(fact, rewrite.answers("target_true"));
  fact.relation_id = rewrite.text_or("relation_id");
  keep_id(rewrite, "target_new", fact);
  keep_id(rewrite, "target_true", fact);
  read_prompt_lists(fields, fact);
  read_one_hop(fields, fact);
  if (fields.has("unrelated_relation")) {
    Fields unrelated = fields.object("unrelated_relation");
    const std::string question = unrelated.text_or("question");
    std::vector<std::string> answers = unrelated.answers("object");
    if (!says_nothing(question) && !answers.empty())
      fact.locality["unrelated_relation"].push_back({question, std::move(answers)});
    if (unrelated.has("relation_id")) fact.extra["unrelated_relation_id"] = unrelated.text_or("relation_id");
  }
  if (const std::string alias = trim(fields.text_or("alternative_subject")); !alias.empty()) {
    Fact renamed = fact;
    renamed.subject = alias;
    fact.portability["Subject_Aliasing"].push_back({renamed.full_prompt(), {fact.target_new}});
    fact.extra["alternative_subject"] = alias;
  }
  fields.keep({"pararel_idx"});
  if (const nlohmann::json rest = rewrite.rest(); !rest.empty()) fact.extra["requested_rewrite_extra"] = rest;
  return one_fact(std::move(fact), fields);
}

nlohmann::ordered_json target(const std::string& text, const Fact& fact, const char* id_key) {
  nlohmann::ordered_json value = {{"str", text}};
  if (fact.extra.contains(id_key)) value["id"] = fact.extra[id_key];
  return value;
}

nlohmann::ordered_json write_counterfact(const Fact& fact) {
  nlohmann::ordered_json row;
  row["case_id"] = fact.case_id;
  if (fact.extra.contains("pararel_idx")) row["pararel_idx"] = fact.extra["pararel_idx"];
  nlohmann::ordered_json& rewrite = row["requested_rewrite"];
  rewrite["prompt"] = fact.prompt;
  rewrite["relation_id"] = fact.relation_id;
  rewrite["target_new"] = target(fact.target_new, fact, "target_new_id");
  if (fact.target_true) rewrite["target_true"] = target(*fact.target_true, fact, "target_true_id");
  rewrite["subject"] = fact.subject;
  if (fact.extra.contains("requested_rewrite_extra"))
    for (const auto& [key, value] : fact.extra["requested_rewrite_extra"].items()) rewrite[key] = value;
  write_prompt_lists(fact, row);
  write_one_hop(fact, row);
  if (const auto unrelated = fact.locality.find("unrelated_relation"); unrelated != fact.locality.end()) {
    row["unrelated_relation"] = {{"relation_id", fact.extra.value("unrelated_relation_id", nlohmann::ordered_json(""))},
                                 {"object", write_answers(unrelated->second.front().answers)},
                                 {"question", unrelated->second.front().prompt}};
  }
  static const std::vector<std::string> kPlaced = {"target_new_id", "target_true_id", "requested_rewrite_extra",
                                                   "recalled_relation", "unrelated_relation_id"};
  for (const auto& [key, value] : fact.extra.items())
    if (!row.contains(key) && std::ranges::find(kPlaced, key) == kPlaced.end()) row[key] = value;
  return row;
}

}  // namespace

const FactReader counterfact_reader{"counterfact",
                                    "CounterFact rows: requested_rewrite, paraphrase_prompts, neighborhood_prompts, …",
                                    is_counterfact, read_counterfact, write_counterfact};

}  // namespace emend::datasets::detail
