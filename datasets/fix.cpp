// Fixes in the text of a facts file: what is not mended stays as it is, byte for byte.
#include <emend/core/error.h>
#include <emend/core/utf8.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/lint.h>

#include <algorithm>
#include <array>
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

using Way = std::vector<std::string>;  // keys and numbers from the outside in

size_t past_space(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

size_t past_string(std::string_view text, size_t at) {
  for (++at; text[at] != '"'; ++at)
    if (text[at] == '\\') ++at;
  return at + 1;
}

size_t past_value(std::string_view text, size_t at) {
  if (text[at] != '{' && text[at] != '[' && text[at] != '"')
    return std::min(text.find_first_of(",]} \t\r\n", at), text.size());
  int depth = 0;
  do {
    if (text[at] == '"') {
      at = past_string(text, at);
      continue;
    }
    depth += text[at] == '{' || text[at] == '[' ? 1 : text[at] == '}' || text[at] == ']' ? -1 : 0;
    ++at;
  } while (depth > 0);
  return at;
}

/// The bytes of the value to which `way` leads in `text`, which is JSON and has it.
std::string_view value_at(std::string_view text, const Way& way) {
  size_t at = past_space(text, 0);
  for (const std::string& step : way) {
    const bool object = text[at] == '{';
    at = past_space(text, at + 1);
    for (size_t i = 0;; ++i) {
      bool here = !object && std::to_string(i) == step;
      if (object) {
        const size_t end = past_string(text, at);
        here = Json::parse(text.substr(at, end - at)) == step;
        at = past_space(text, past_space(text, end) + 1);  // behind the colon
      }
      if (here) break;
      at = past_space(text, past_space(text, past_value(text, at)) + 1);  // behind the comma
    }
  }
  return text.substr(at, past_value(text, at) - at);
}

/// Goes on to the string that is `wanted`, but for blanks around it, in an answer of any form.
bool lead_to(const Json& value, const std::string& wanted, Way& way) {
  const auto within = [&](const std::string& step, const Json& part) {
    way.push_back(step);
    if (lead_to(part, wanted, way)) return true;
    way.pop_back();
    return false;
  };
  if (value.is_string()) return detail::trim(value.get_ref<const std::string&>()) == detail::trim(wanted);
  if (value.is_object()) return value.contains("str") && within("str", value["str"]);
  for (size_t i = 0; value.is_array() && i < value.size(); ++i)
    if (within(std::to_string(i), value[i])) return true;
  return false;
}

/// `text`, a row that `reader` read as `before`, in which prompt, subject and answer are those of `after`; all other
/// bytes stay. Nothing where they have no place in it.
std::optional<std::string> mended(const detail::FactReader& reader, std::string text, const Fact& before,
                                  const Fact& after, const ReadOptions& options) {
  const std::array<std::pair<std::string, std::string>, 4> forms = {{{before.prompt, after.prompt},
                                                                     {before.full_prompt(), after.full_prompt()},
                                                                     {before.subject, after.subject},
                                                                     {before.target_new, after.target_new}}};
  Fact marked = before;  // what is written otherwise for it shows where a row has the three
  for (const auto member : {&Fact::prompt, &Fact::subject, &Fact::target_new}) (marked.*member) += '\x01';
  const Json original = Json::parse(text), written = reader.write(before);
  for (const Json& step : Json::diff(written, reader.write(marked))) {
    Json::json_pointer place(step["path"].get<std::string>());
    if (step["op"] != "replace" || !written[place].is_string()) continue;
    const std::string role = written[place];
    const bool prompt = role == forms[0].first || role == forms[1].first;
    const auto replace = [&](const Json::json_pointer& at) {
      for (size_t form = 0; form < forms.size(); ++form) {
        if (prompt ? form > 1 : forms[form].first != role) continue;
        Way way;
        for (auto part = at; !part.empty(); part = part.parent_pointer()) way.insert(way.begin(), part.back());
        if (way.empty() || !original.contains(at) || !lead_to(original[at], forms[form].first, way)) continue;
        const std::string_view old = value_at(text, way);
        const bool escaped = old.find("\\u") != old.npos && is_ascii(old);
        text.replace(old.data() - text.data(), old.size(), Json(forms[form].second).dump(-1, ' ', escaped));
        return true;
      }
      return false;
    };
    if (!replace(place)) (void)replace(place.parent_pointer());  // one string where a list or an object is written
  }
  const auto texts = [](const Fact& one) { return std::tie(one.prompt, one.subject, one.target_new); };
  const auto read = facts_of(reader, nlohmann::json::parse(text), options);
  if (read.size() != 1 || texts(read[0]) != texts(after)) return std::nullopt;
  return text;
}

}  // namespace

std::optional<std::string> fix_text(std::string_view text, const FactSet& facts, const std::vector<Finding>& findings,
                                    const ReadOptions& options, std::vector<std::string>* unmended) {
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
  if (rows.table()) return std::nullopt;
  detail::Row row;
  size_t next = 0, begin = std::string_view::npos, end = 0;
  // What is no row stays, with what stands before it.
  const auto pass = [&](const BadRow&) {
    if (begin == std::string_view::npos) begin = 0;
    result.append(text.substr(end, rows.position() - end));
    end = rows.position();
  };
  while (rows.next(row, pass)) {
    if (begin == std::string_view::npos) result = text.substr(0, begin = row.begin);
    // A row goes with what stands before it; the first that stays begins where the first began.
    const std::string_view between = result.size() > begin ? text.substr(end, row.begin - end) : "";
    std::string own(text.substr(row.begin, row.end - row.begin));
    end = row.end;
    if (const size_t count = facts_of(reader, row.value, options).size(); count > 0) {
      const auto [first, last] = fixes.equal_range(next);
      const Fact& before = facts.facts.at(next);
      for (auto fix = last; unmended && fix != fixes.lower_bound(next + count); ++fix)
        unmended->push_back(facts.facts.at(fix->first).where());  // further facts of the same row
      next += count;
      if (std::any_of(first, last, [](const auto& fix) { return fix.second->remove; })) continue;
      Fact after = before;
      for (auto fix = first; fix != last; ++fix) fix->second->edit(after);
      if (first != last) {
        auto text_after = mended(reader, own, before, after, options);
        if (!text_after && unmended) unmended->push_back(before.where());
        own = std::move(text_after).value_or(std::move(own));
      }
    }
    result.append(between).append(own);
  }
  return result.append(text.substr(end));
}

}  // namespace emend::datasets
