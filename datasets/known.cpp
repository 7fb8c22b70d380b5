#include <emend/core/error.h>
#include <emend/datasets/detail/rows.h>
#include <emend/datasets/fact.h>
#include <emend/datasets/known.h>

namespace emend::datasets {

void KnownFact::set_prompt(const std::string& text) {
  subject_at = text.find("{}");
  prompt = with_subject(text, subject);
}

std::vector<KnownFact> parse_known_facts(std::string_view text, const std::string& name) {
  std::vector<KnownFact> facts;
  detail::RowReader rows(text, name);
  detail::Row row;
  while (rows.next(row)) {
    detail::Fields fields(row.value, rows.where(row));
    KnownFact fact;
    fact.known_id = fields.integer_or("known_id", std::ssize(facts));
    fact.subject = fields.text("subject");
    fact.attribute = detail::trim(fields.text("attribute"));
    fact.set_prompt(fields.text("prompt"));
    fact.relation_id = fields.text_or("relation_id");
    fact.line = row.line;
    if (detail::count_of(fact.prompt, fact.subject) == 0)
      fields.fail("prompt",
                  "\"" + shorten(fact.prompt) + "\", without the subject \"" + shorten(fact.subject, 40) + "\"",
                  "a prompt that names the subject", "spell both alike");
    facts.push_back(std::move(fact));
  }
  if (facts.empty())
    throw Error(ErrorClass::kCorruption,
                {name, "no rows from row 0 on", "at least one known fact", "check the file and the offset"});
  return facts;
}

}  // namespace emend::datasets
