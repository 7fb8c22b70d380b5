#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/datasets/convert.h>
#include <emend/datasets/detail/reader.h>

namespace emend::datasets {

static const detail::FactReader& writer_of(const std::string& format) {
  std::vector<std::string> names;
  for (const detail::FactReader* reader : detail::fact_readers()) {
    if (reader->write) names.emplace_back(reader->name);
    if (reader->name != format) continue;
    if (reader->write) return *reader;
    throw Error(ErrorClass::kUnsupported, {"facts format", format + " holds groups of facts and cannot be written",
                                           "a format of single facts", "use jsonl"});
  }
  refuse({"facts format", "unknown format \"" + format + "\"", "one of " + join(names),
          did_you_mean(format, names, "use jsonl")});
}

namespace {

// zsRE has no key for the new answer: ReadOptions::zsre_target says which of two it is, for a whole file. It is `alt`
// where any fact has an old answer beside it.
bool as_alt(const std::vector<Fact>& facts, const std::string& format) {
  return format == "zsre" && std::ranges::any_of(facts, [](const Fact& fact) { return fact.target_true.has_value(); });
}

Fact in_form(Fact fact, bool alt) {
  if (!alt || fact.target_true) return fact;
  fact.extra.erase("answers");
  fact.extra["alt"] = fact.target_new;
  return fact;
}

}  // namespace

std::string format_facts(const std::vector<Fact>& facts, const std::string& format) {
  const detail::FactReader& writer = writer_of(format);
  const bool lines = format == "jsonl", alt = as_alt(facts, format);
  std::string text = lines ? "" : "[\n";
  for (size_t i = 0; i < facts.size(); ++i) {
    text += writer.write(in_form(facts[i], alt)).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    text += lines || i + 1 == facts.size() ? "\n" : ",\n";
  }
  return lines ? text : text + "]\n";
}

std::vector<std::string> conversion_losses(const std::vector<Fact>& facts, const std::string& format) {
  std::vector<std::string> losses;
  if (facts.empty()) return losses;
  const bool alt = as_alt(facts, format);
  const auto read_back = [&](const Fact& fact) {
    const char* target = alt ? "alt" : "answers";
    return parse_facts(format_facts({in_form(fact, alt)}, format), "written",
                       {.format = format, .zsre_target = target, .bad_rows = BadRowPolicy::kSkip, .allow_empty = true});
  };
  std::map<std::string, size_t> counts;
  for (size_t i = 0; i < facts.size(); ++i) {
    const Fact& fact = facts[i];
    const FactSet again = read_back(fact);
    if (again.facts.empty()) {
      ++counts["the whole fact"];
      continue;
    }
    nlohmann::json before = to_json(fact), after = to_json(again.facts.front());
    // Formats without one number the rows anew.
    if (again.facts.front().case_id != fact.case_id && fact.case_id != static_cast<int64_t>(i)) ++counts["case_id"];
    before.erase("case_id");
    before.erase("extra");  // of which the keys count
    for (const auto& [key, value] : before.items())
      if (!after.contains(key) || after[key] != value) ++counts[key];
    for (const auto& [key, value] : fact.extra.items())
      if (!again.facts.front().extra.contains(key)) ++counts["extra." + key];
  }
  for (const auto& [name, count] : counts)
    losses.push_back(name + " (" + counted(static_cast<size_t>(count), "fact") + ")");
  return losses;
}

ConvertReport convert_facts(const std::filesystem::path& in, const std::filesystem::path& out,
                            const std::string& format, const ReadOptions& options, const Log& log) {
  (void)writer_of(format);  // before the work
  const FactSet set = load_facts(in, options, log);
  write_file(out, format_facts(set.facts, format));
  ConvertReport report{set.facts.size(), set.format, format, conversion_losses(set.facts, format)};
  report.alt = as_alt(set.facts, format);
  for (const UnreadKey& key : set.unread)
    if (!key.kept) report.lost.push_back(key.key + " (" + std::to_string(key.times) + " times)");
  if (!set.groups.empty()) report.lost.push_back("groups of facts (" + std::to_string(set.groups.size()) + ")");
  if (!report.lost.empty()) {
    log.event(LogLevel::kWarning, "facts.converted",
              out.string() + ": " + format + " has no place for " + join(report.lost),
              {{"path", out.string()}, {"lost", report.lost}});
  }
  return report;
}

}  // namespace emend::datasets
