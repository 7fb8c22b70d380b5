// Fixes in the text of a facts file: what is not mended stays as it is, byte for byte.
#include <emend/core/error.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/lint.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace emend::datasets {
namespace {

using Json = nlohmann::ordered_json;

/// The facts of a row as `reader` sees it; none of a row that is none.
std::vector<Fact> facts_of(const detail::FactReader& reader, const nlohmann::json& row, const ReadOptions& options) {
  try {
    detail::Fields fields(row, "");
    auto parsed = reader.read(fields, options);
    for (const Fact& fact : parsed.facts) validate(fact);
    return parsed.skipped.empty() ? std::move(parsed.facts) : std::vector<Fact>();
  } catch (const Error&) {
    return {};
  }
}

/// `text`, a row, with one of its strings replaced where it stands; unchanged if it is not found once.
std::string with_string(std::string text, const std::string& key, const Json& before, const Json& after) {
  for (const bool ascii : {false, true})
    for (const char* colon : {": ", ":"}) {
      const std::string name = Json(key).dump() + colon;
      const std::string old = name + before.dump(-1, ' ', ascii);
      if (detail::count_of(text, old) == 1)
        return text.replace(text.find(old), old.size(), name + after.dump(-1, ' ', ascii));
    }
  return text;
}

/// A row of which prompt, subject and answer are those of `fact`; its other members, and their order, stay.
std::string mended(const detail::FactReader& reader, const std::string& text, const Fact& fact,
                   const ReadOptions& options) {
  const auto is_fact = [&](const Json& row) {
    const auto read = facts_of(reader, nlohmann::json(row), options);
    const auto texts = [](const Fact& one) { return std::tie(one.prompt, one.subject, one.target_new); };
    return read.size() == 1 && texts(read[0]) == texts(fact);
  };
  const Json original = Json::parse(text);
  Json written = reader.write(fact), row = original;
  std::string same_form = text;
  for (const Json& step : Json::diff(original, written)) {
    const Json::json_pointer place(step["path"].get<std::string>());
    if (step["op"] != "replace" || !step["value"].is_string() || !original[place].is_string()) continue;
    same_form = with_string(same_form, place.back(), original[place], step["value"]);
    row[place] = step["value"];
  }
  if (!is_fact(row)) {  // an answer in another form than that in which it is written
    row = written;
    if (!original.contains("case_id")) row.erase("case_id");
  }
  if (!is_fact(row))
    throw Error(ErrorClass::kUnsupported,
                {fact.where(), "a row of format " + std::string(reader.name) + " in which the fix has no place",
                 "a row with one answer", "correct it by hand"});
  if (Json::accept(same_form) && Json::parse(same_form) == row) return same_form;
  return row.dump();
}

}  // namespace

std::optional<std::string> fix_text(std::string_view text, const FactSet& facts, const std::vector<Finding>& findings,
                                    const ReadOptions& options) {
  const auto& readers = detail::fact_readers();
  const auto& reader = **std::ranges::find(readers, facts.format, &detail::FactReader::name);
  std::multimap<size_t, const Finding*> fixes;
  for (const Finding& finding : findings)
    if (finding.fact < facts.facts.size() && finding.fixable()) fixes.emplace(finding.fact, &finding);
  if (!fixes.empty() && !reader.write)
    throw Error(ErrorClass::kUnsupported, {facts.path, "facts of format " + facts.format + " cannot be written",
                                           "a format of single facts", "convert the file to jsonl first"});
  std::string result;
  detail::RowReader rows(text, facts.path);
  detail::Row row;
  size_t next = 0, begin = std::string_view::npos, end = 0;
  while (rows.next(row)) {
    if (row.end == 0) return std::nullopt;
    if (begin == std::string_view::npos) result = text.substr(0, begin = row.begin);
    // A row goes with what stands before it; the first that stays begins where the first began.
    const std::string_view between = result.size() > begin ? text.substr(end, row.begin - end) : "";
    std::string own(text.substr(row.begin, row.end - row.begin));
    end = row.end;
    if (const size_t count = facts_of(reader, row.value, options).size(); count > 0) {
      const auto [first, last] = fixes.equal_range(next);
      Fact fact = facts.facts.at(next);
      next += count;
      if (std::any_of(first, last, [](const auto& fix) { return fix.second->remove; })) continue;
      for (auto fix = first; fix != last; ++fix) fix->second->edit(fact);
      if (first != last) own = mended(reader, own, fact, options);
    }
    result.append(between).append(own);
  }
  return result.append(text.substr(end));
}

}  // namespace emend::datasets
