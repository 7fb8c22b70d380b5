// FastEdit: {"prompt": "… {} …", "subject": "…", "target": "…", "queries": ["…"]}.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_fastedit(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"prompt", "subject", "target"}) && !any_has(rows, {"target_new"});
}

ParsedRow read_fastedit(Fields& fields, const ReadOptions&) {
  ParsedRow row;
  Fact fact;
  if (!read_core(fields, "prompt", "target", fact, row)) return row;
  fact.paraphrase_prompts = fields.texts("queries");
  fact.extra.update(fields.rest());
  row.facts.push_back(std::move(fact));
  return row;
}

nlohmann::ordered_json write_fastedit(const Fact& fact) {
  nlohmann::ordered_json row = {{"prompt", fact.prompt},
                                {"subject", fact.subject},
                                {"target", fact.target_new},
                                {"queries", fact.paraphrase_prompts}};
  write_extra(fact, row);
  return row;
}

}  // namespace

const FactReader fastedit_reader{"fastedit", "FastEdit rows: prompt, subject, target, queries", is_fastedit,
                                 read_fastedit, write_fastedit};

}  // namespace emend::datasets::detail
