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

std::string format_facts(const std::vector<Fact>& facts, const std::string& format) {
  const detail::FactReader& writer = writer_of(format);
  const bool lines = format == "jsonl";
  std::string text = lines ? "" : "[\n";
  for (size_t i = 0; i < facts.size(); ++i) {
    text += writer.write(facts[i]).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    text += lines || i + 1 == facts.size() ? "\n" : ",\n";
  }
  return lines ? text : text + "]\n";
}

std::vector<std::string> conversion_losses(const std::vector<Fact>& facts, const std::string& format) {
  std::vector<std::string> losses;
  if (facts.empty()) return losses;
  // A fact without an old answer goes to zsRE as answers[0], one with an old answer as alt; read each the way it was
  // written.
  const auto read_back = [&](const Fact& fact) {
    const char* target = format == "zsre" && !fact.target_true ? "answers" : "alt";
    return parse_facts(format_facts({fact}, format), "written",
                       {.format = format, .zsre_target = target, .bad_rows = BadRowPolicy::kSkip, .allow_empty = true});
  };
  std::map<std::string, size_t> counts;
  for (const Fact& fact : facts) {
    const FactSet again = read_back(fact);
    if (again.facts.empty()) {
      ++counts["the whole fact"];
      continue;
    }
    nlohmann::json before = to_json(fact), after = to_json(again.facts.front());
    before.erase("case_id");  // formats without one number the rows anew
    for (const auto& [key, value] : before.items())
      if (!after.contains(key) || (key != "extra" && after[key] != value)) ++counts[key];
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
  report.alt = format == "zsre" && std::ranges::any_of(set.facts, [](const Fact& fact) { return !!fact.target_true; });
  if (!set.groups.empty()) report.lost.push_back("groups of facts (" + std::to_string(set.groups.size()) + ")");
  if (!report.lost.empty()) {
    log.event(LogLevel::kWarning, "facts.converted",
              out.string() + ": " + format + " has no place for " + join(report.lost),
              {{"path", out.string()}, {"lost", report.lost}});
  }
  return report;
}

}  // namespace emend::datasets
