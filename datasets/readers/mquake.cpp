// MQuAKE: each row is an instance of several edits with multi-hop questions that depend on all of them.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_mquake(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"requested_rewrite"}) && rows.front().value("requested_rewrite", nlohmann::json()).is_array();
}

std::vector<std::string> with_aliases(Fields& fields, const char* key, const char* alias_key) {
  std::vector<std::string> answers = fields.answers(key);
  for (std::string& alias : fields.answers(alias_key))
    if (std::ranges::find(answers, alias) == answers.end()) answers.push_back(std::move(alias));
  return answers;
}

std::vector<Hop> read_hops(Fields& fields, const char* key) {
  std::vector<Hop> hops;
  if (!fields.has(key)) return hops;
  const nlohmann::json& list = fields.list(key);
  for (size_t i = 0; i < list.size(); ++i) {
    Fields hop = fields.within(list[i], std::string(key) + "[" + std::to_string(i) + "]");
    hops.push_back({hop.text_or("question"), hop.text_or("cloze"), with_aliases(hop, "answer", "answer_alias")});
    (void)hop.rest(false);
  }
  return hops;
}

ParsedRow read_mquake(Fields& fields, const ReadOptions&) {
  ParsedRow row;
  FactGroup group;
  group.kind = "mquake";
  group.case_id = fields.integer_or("case_id", kNoCaseId);
  const nlohmann::json& rewrites = fields.list("requested_rewrite");
  if (rewrites.empty()) row.skipped = "\"requested_rewrite\" is empty";
  for (size_t i = 0; i < rewrites.size(); ++i) {
    Fields rewrite = fields.within(rewrites[i], "requested_rewrite[" + std::to_string(i) + "]");
    Fact fact;
    row.skipped = read_core(rewrite, "prompt", "target_new", fact);
    if (!row.skipped.empty()) return row;  // a chain with a hole is of no use
    fact.case_id = kNoCaseId;
    set_true_answers(fact, rewrite.answers("target_true"));
    fact.relation_id = rewrite.text_or("relation_id");
    fact.paraphrase_prompts = rewrite.texts("question");
    for (const char* key : {"target_new", "target_true"}) keep_id(rewrite, key, fact);
    fact.extra.update(rewrite.rest());
    group.facts.push_back(row.facts.size());
    row.facts.push_back(std::move(fact));
  }
  group.questions = fields.texts("questions");
  group.answers = with_aliases(fields, "answer", "answer_alias");
  group.new_answers = with_aliases(fields, "new_answer", "new_answer_alias");
  group.single_hops = read_hops(fields, "single_hops");
  group.new_single_hops = read_hops(fields, "new_single_hops");
  fields.keep({"orig"});
  group.extra = fields.rest();
  row.group = std::move(group);
  return row;
}

}  // namespace

const FactReader mquake_reader{
    "mquake", "MQuAKE instances: requested_rewrite (a list), questions, answer, new_answer, single_hops", is_mquake,
    read_mquake};

}  // namespace emend::datasets::detail
