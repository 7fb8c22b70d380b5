// ConflictEdit (pairs of edits that contradict each other by design) and RoundEdit (an edit that is to be undone by a
// second one).
#include <emend/datasets/detail/reader.h>

namespace emend::datasets::detail {
namespace {

bool is_conflictedit(const std::vector<nlohmann::json>& rows) {
  return any_has(rows, {"edits", "triples"}) || any_has(rows, {"edit", "true_objects"});
}

/// {"relation": {prompt, query, …}, "subject": {label}, "object": {label}, "new_object": {label}}
bool read_edit(const Fields& parent, const nlohmann::json& value, const std::string& path, ParsedRow& row) {
  Fields edit = parent.within(value, path);
  Fields relation = edit.object("relation"), subject = edit.object("subject"), new_object = edit.object("new_object");
  Fact fact;
  fact.case_id = kNoCaseId;
  fact.subject = trim(subject.text("label"));
  fact.prompt = slot_prompt(relation.text("prompt"), fact.subject, relation, "prompt");
  const std::vector<std::string> targets = new_object.answers("label");
  if (targets.empty()) {
    row.skipped = "\"" + path + ".new_object.label\" is blank";
    return false;
  }
  fact.target_new = targets.front();
  const auto keep = [&](Fields& from, const char* key, const char* name) {
    if (const auto& value = from.raw(key); !value.is_null()) fact.extra[name] = value;
  };
  if (!edit.raw("object").is_null()) {
    Fields object = edit.object("object");
    set_true_answers(fact, object.answers("label"));
    keep(object, "id", "target_true_id");
    (void)object.rest(false);
  }
  fact.relation_id = relation.text_or("id");
  std::string query = relation.text_or("query");
  if (const size_t slot = query.find("{}"); slot != std::string::npos)
    fact.paraphrase_prompts.push_back(query.replace(slot, 2, fact.subject));
  keep(relation, "label", "relation_label");
  keep(subject, "id", "subject_id");
  keep(new_object, "id", "target_new_id");
  for (const Fields* part : {&edit, &relation, &subject, &new_object}) (void)part->rest(false);
  row.facts.push_back(std::move(fact));
  return true;
}

ParsedRow read_conflictedit(Fields& fields, const ReadOptions&) {
  ParsedRow row;
  FactGroup group;
  group.case_id = fields.integer_or("case_id", kNoCaseId);
  if (fields.has("edits")) {
    group.kind = "conflict-" + fields.text_or("type", "pair");
    group.sequential = true;
    const nlohmann::json& edits = fields.list("edits");
    if (edits.empty()) row.skipped = "\"edits\" is empty";
    for (size_t i = 0; i < edits.size(); ++i)
      if (!read_edit(fields, edits[i], "edits[" + std::to_string(i) + "]", row)) return row;
  } else {
    group.kind = "round";
    if (!fields.has("edit")) fields.fail("edit", "missing", "an object");
    if (!read_edit(fields, fields.raw("edit"), "edit", row)) return row;
    const nlohmann::json& objects = fields.list("true_objects");
    for (size_t i = 0; i < objects.size(); ++i) {
      Fields object = fields.within(objects[i], "true_objects[" + std::to_string(i) + "]");
      for (std::string& label : object.answers("label")) group.answers.push_back(std::move(label));
      object.keep({"id"});
      (void)object.rest(false);
    }
  }
  for (size_t i = 0; i < row.facts.size(); ++i) group.facts.push_back(i);
  fields.keep({"triples", "prerequisites", "rule", "type"});
  group.extra = fields.rest();
  row.group = std::move(group);
  return row;
}

}  // namespace

const FactReader conflictedit_reader{"conflictedit", "ConflictEdit (edits, triples) and RoundEdit (edit, true_objects)",
                                     is_conflictedit, read_conflictedit};

}  // namespace emend::datasets::detail
