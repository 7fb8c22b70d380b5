// FastEdit: {"prompt": "… {} …", "subject": "…", "target": "…", "queries": ["…"]}.
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_fastedit(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"prompt", "subject", "target"}) && !any_has(rows, {"target_new"});
}

ParsedRow read_fastedit(Fields& fields, const ReadOptions&) {
  Fact fact;
  if (auto why = read_core(fields, "prompt", "target", fact); !why.empty()) return {.skipped = std::move(why)};
  fact.paraphrase_prompts = fields.texts("queries");
  return one_fact(std::move(fact), fields);
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
