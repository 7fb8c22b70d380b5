// KnowEdit: wiki_recent, wiki_counterfact and ZsRE (flat rows with dictionaries of probes), WikiBio (a text and the
// sentence to write after it) and ConvSent (opinions about an entity).
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool has_probe_lists(const std::vector<nlohmann::json>& rows, const char* key) {
  for (const nlohmann::json& row : rows) {
    const auto groups = row.find(key);
    if (groups == row.end() || !groups->is_object()) continue;
    if (groups->empty()) return true;
    for (const nlohmann::json& group : *groups)
      if (group.is_array()) return true;
  }
  return false;
}

bool is_knowedit(const std::vector<nlohmann::json>& rows) {
  if (any_has(rows, {"ent", "pos", "neg"}) || any_has(rows, {"text", "labels", "concept"})) return true;
  const bool flat = any_has(rows, {"prompt", "subject", "target_new"}) && !any_has(rows, {"case_id"});
  return flat && (has_probe_lists(rows, "locality") || has_probe_lists(rows, "portability"));
}

/// "This is a Wikipedia passage about rick mahler. Rick Mahler …": the first mention of the concept is the subject.
ParsedRow read_biography(Fields& fields) {
  Fact fact;
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("concept"));
  fact.prompt = fields.text("text");
  const size_t at = fact.prompt.find(fact.subject);
  if (at == std::string::npos)
    fields.fail("text", "without the concept \"" + shorten(fact.subject, 40) + "\"", "a text that names it",
                "write it as in \"concept\"");
  if (count_of(fact.prompt, "{}") > 0) fields.fail("text", "a text with {}", "plain text");
  fact.prompt.replace(at, fact.subject.size(), "{}");
  std::vector<std::string> sentences = fields.answers("labels");
  if (sentences.empty()) return {.skipped = "\"labels\" is blank"};
  fact.target_new = std::move(sentences.front());
  if (sentences.size() > 1) fact.extra["labels"] = fields.value()["labels"];
  fact.locality = read_probes(fields, "locality");
  fact.portability = read_probes(fields, "portability");
  fact.extra["kind"] = "wikibio";
  return one_fact(std::move(fact), fields);
}

/// The first opinion of the chosen side becomes what the model says when asked; all opinions stay in extra.
ParsedRow read_sentiment(Fields& fields, const ReadOptions& options) {
  Fact fact;
  fact.case_id = fields.integer_or("case_id", kNoCaseId);
  fact.subject = trim(fields.text("ent"));
  fact.prompt = "What do you think of {}?";
  std::vector<std::string> opinions = fields.answers(options.sentiment.c_str());
  if (opinions.empty()) return {.skipped = "\"" + options.sentiment + "\" holds no text"};
  fact.target_new = std::move(opinions.front());
  fact.paraphrase_prompts = {"What do you feel about " + fact.subject + "?", "How do you view " + fact.subject + "?"};
  fact.extra = fields.value();
  fact.extra.erase("ent");
  fact.extra["kind"] = "convsent";
  ParsedRow row;
  row.facts.push_back(std::move(fact));
  return row;
}

ParsedRow read_knowedit(Fields& fields, const ReadOptions& options) {
  if (fields.has("concept") && fields.has("labels")) return read_biography(fields);
  if (fields.has("ent")) return read_sentiment(fields, options);
  return read_flat(fields, options);
}

/// True if `fact` can be written as read_biography reads it.
bool is_biography(const Fact& fact) {
  return fact.extra.value("kind", nlohmann::json()) == "wikibio" &&
         fact.full_prompt().find(fact.subject) == fact.prompt.find("{}");
}

nlohmann::ordered_json write_knowedit(const Fact& fact) {
  nlohmann::ordered_json row;
  if (is_biography(fact)) {
    row["text"] = fact.full_prompt();
    row["labels"] = fact.extra.value("labels", nlohmann::json(fact.target_new));
    if (row["labels"].is_array()) row["labels"][0] = fact.target_new;
    row["concept"] = fact.subject;
  } else {
    row["subject"] = fact.subject;
    row["prompt"] = write_prompt(fact);
    row["target_new"] = fact.target_new;
  }
  const auto truth = true_answers(fact);
  if (!truth.empty()) row["ground_truth"] = truth;
  if (!fact.paraphrase_prompts.empty()) row["rephrase_prompt"] = write_answers(fact.paraphrase_prompts);
  auto locality = fact.locality;
  if (fact.target_true && !locality.contains("neighborhood"))
    for (const std::string& prompt : fact.neighborhood_prompts)
      locality["neighborhood"].push_back({prompt, {*fact.target_true}});
  row["portability"] = write_probes(fact.portability);
  row["locality"] = write_probes(locality);
  if (!fact.relation_id.empty()) row["relation_id"] = fact.relation_id;
  write_extra(fact, row);
  return row;
}

}  // namespace

const FactReader knowedit_reader{"knowedit", "KnowEdit: wiki_recent, wiki_counterfact, ZsRE, WikiBio, ConvSent",
                                 is_knowedit, read_knowedit, write_knowedit};

}  // namespace emend::datasets::detail
