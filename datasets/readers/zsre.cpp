// zsRE in MEND's form. The file holds no target of its own: MEMIT edits the true answer in (answers[0]), EasyEdit the
// counterfactual one (alt). ReadOptions::zsre_target chooses; results of the two are not comparable, so the choice is
// recorded.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_zsre(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"src", "answers"}) || any_has(rows, {"src", "alt"});
}

ParsedRow read_zsre(Fields& fields, const ReadOptions& options) {
  const bool alt = options.zsre_target == "alt";
  Fact fact;
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("subject"));
  fact.prompt = slot_prompt(fields.text("src"), fact.subject, fields, "src");
  std::vector<std::string> answers = fields.answers("answers");
  const std::vector<std::string> alternatives = fields.answers("alt");
  if (alt ? alternatives.empty() : answers.empty())
    return {.skipped = alt ? "\"alt\" is blank" : "\"answers\" holds no text"};
  fact.target_new = alt ? alternatives.front() : answers.front();
  if (fields.value().contains("answers")) fact.extra["answers"] = fields.value()["answers"];
  if (fields.value().contains("alt")) fact.extra["alt"] = fields.value()["alt"];
  if (alt) set_true_answers(fact, std::move(answers));
  fact.paraphrase_prompts = fields.texts("rephrase");
  const std::string locality = fields.text_or("loc");
  std::vector<std::string> locality_answers = fields.answers("loc_ans");
  if (!says_nothing(locality) && !locality_answers.empty())
    fact.locality["loc"].push_back({locality, std::move(locality_answers)});
  read_one_hop(fields, fact);
  fields.keep({"pred", "cond"});
  return one_fact(std::move(fact), fields);
}

/// True if the new answer is what `alt` says.
bool edits_alt(const Fact& fact) {
  return fact.target_true || (fact.extra.contains("alt") && Fields(fact.extra, "").answers("answers").empty());
}

nlohmann::ordered_json write_zsre(const Fact& fact) {
  nlohmann::ordered_json row;
  row["subject"] = fact.subject;
  row["src"] = write_prompt(fact);
  row["pred"] = fact.extra.value("pred", nlohmann::ordered_json(""));
  row["rephrase"] =
      fact.paraphrase_prompts.empty() ? nlohmann::ordered_json("") : write_answers(fact.paraphrase_prompts);
  auto truth = true_answers(fact);
  if (truth.empty() && !fact.extra.contains("alt")) truth = {fact.target_new};
  const bool alt = edits_alt(fact);
  row["alt"] = alt ? nlohmann::ordered_json(fact.target_new) : fact.extra.value("alt", nlohmann::ordered_json(""));
  auto& answers = row["answers"] = fact.extra.value("answers", nlohmann::ordered_json(truth));
  if (!alt && answers.is_array() && !answers.empty()) answers[0] = fact.target_new;
  const auto locality = fact.locality.find("loc");
  row["loc"] = locality == fact.locality.end() ? "" : locality->second.front().prompt;
  row["loc_ans"] =
      locality == fact.locality.end() ? nlohmann::ordered_json("") : write_answers(locality->second.front().answers);
  write_one_hop(fact, row);
  for (const auto& [key, value] : fact.extra.items())
    if (!row.contains(key) && key != "recalled_relation") row[key] = value;
  return row;
}

}  // namespace

const FactReader zsre_reader{"zsre", "zsRE rows in MEND's form: subject, src, alt, answers, rephrase, loc, loc_ans",
                             is_zsre, read_zsre, write_zsre};

}  // namespace emend::datasets::detail
