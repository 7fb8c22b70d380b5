// load_facts: rows -> a reader -> facts, with numbering, limits, skipped rows and the records that reports need.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/datasets/detail/reader.h>
#include <emend/datasets/detail/rows.h>
#include <emend/datasets/fact.h>

#include <algorithm>
#include <unordered_set>

namespace emend::datasets {

std::string_view bundled_facts();  // emend_facts.json

namespace {

using detail::fact_readers;
using detail::FactReader;

std::string format_list() {
  return join(fact_formats(), ", ", &FormatInfo::name);
}

void check_options(const ReadOptions& options) {
  std::vector<std::string> names = {"auto"};
  for (const FactReader* reader : fact_readers()) names.emplace_back(reader->name);
  if (std::ranges::find(names, options.format) == names.end()) {
    refuse({"facts format", "unknown format \"" + options.format + "\"", "one of auto, " + format_list(),
            did_you_mean(options.format, names, "leave it at auto")});
  }
  if (options.zsre_target != "answers" && options.zsre_target != "alt")
    refuse({"zsRE target", "\"" + options.zsre_target + "\"",
            "answers (the true answer, as MEMIT) or alt (the counterfactual, as EasyEdit)", ""});
  if (options.sentiment != "pos" && options.sentiment != "neg")
    refuse({"sentiment", "\"" + options.sentiment + "\"", "pos or neg", ""});
  if (options.offset < 0) refuse({setting("offset"), std::to_string(options.offset), "0 or more", ""});
  if (options.limit < -1 || options.limit == 0)
    refuse({setting("limit"), std::to_string(options.limit), "1 or more, or -1 for all", ""});
}

const FactReader& choose_reader(std::string_view text, const std::string& name, const ReadOptions& options) {
  for (const FactReader* reader : fact_readers())
    if (reader->name == options.format) return *reader;
  std::vector<nlohmann::json> first_rows;
  detail::RowReader rows(text, name);
  detail::Row row;
  int64_t line = 0;
  bool broken = false;
  std::function<void(const BadRow&)> skip;
  if (options.bad_rows == BadRowPolicy::kSkip) skip = [&](const BadRow&) { broken = true; };
  while (first_rows.size() < 8 && rows.next(row, skip)) {
    if (first_rows.empty()) line = row.line;
    first_rows.push_back(std::move(row.value));
  }
  if (first_rows.empty() && broken)  // what is wrong is told row by row
    return **std::ranges::find(fact_readers(), "jsonl", &FactReader::name);
  if (first_rows.empty())
    throw Error(ErrorClass::kCorruption,
                {name, text.starts_with('[') ? "an empty list" : "no rows", "at least one fact", "check the file"});
  for (const FactReader* reader : fact_readers())
    if (reader->recognises(first_rows)) return *reader;
  std::string keys;
  for (const auto& [key, value] : first_rows.front().items()) {
    if (keys.size() > 200) {
      keys += ", …";
      break;
    }
    append_item(keys, shorten(key, 40));
  }
  std::string slip;
  for (const auto& [key, value] : first_rows.front().items())
    if (const auto meant = detail::key_meant_by(key, {"prompt", "subject", "target_new", "requested_rewrite"});
        !meant.empty() && !first_rows.front().contains(meant))
      slip = "did you mean \"" + meant + "\" by \"" + key + "\"?";
  const bool traced = first_rows.front().contains("known_id") || first_rows.front().contains("attribute");
  throw Error(
      ErrorClass::kCorruption,
      {place_of(name, line), "a row with the keys " + (keys.empty() ? std::string("(none)") : keys),
       "facts in one of the formats " + format_list(),
       traced          ? "these are prompts for causal tracing: use emend trace"
       : !slip.empty() ? slip
                       : "the shortest row is {\"prompt\": \"{} is in\", \"subject\": \"…\", \"target_new\": \"…\"}"});
}

/// Collects rows into a FactSet.
class Loader {
 public:
  Loader(const FactReader& reader, const std::string& name, const ReadOptions& options)
      : reader_(reader), options_(options), source_(name) {
    set_.format = std::string(reader.name);
    set_.path = name.ends_with("[]") ? name.substr(0, name.size() - 2) : name;
  }

  /// A row that is no JSON, or has other cells than the line of names.
  void add_broken(const BadRow& row) {
    ++set_.rows;
    set_.bad_rows.push_back(row);
  }

  /// False once the limit is reached.
  bool add(const detail::Row& row, const std::string& where) {
    ++set_.rows;
    detail::ParsedRow parsed;
    try {
      detail::Fields fields(row, where, &set_.unread);
      parsed = reader_.read(fields, options_);
      for (const Fact& fact : parsed.facts) validate(fact, where);
    } catch (const Error& error) {
      if (options_.bad_rows == BadRowPolicy::kError) {
        if (error.error_class() != ErrorClass::kInvalidArgument) throw;
        throw Error(ErrorClass::kCorruption, parts_of(error));  // of a file, unlike a fact that was built in code
      }
      set_.bad_rows.push_back({row.line, error.what(), where});
      return true;
    }
    if (!parsed.skipped.empty()) {
      set_.skipped.push_back({row.line, parsed.skipped, where});
      return true;
    }
    const int64_t first_number = facts_seen_;
    facts_seen_ += std::ssize(parsed.facts);
    if (usable_++ < options_.offset) return true;
    keep(std::move(parsed), row, first_number);
    return options_.limit < 0 || ++kept_ < options_.limit;
  }

  FactSet finish(const Log& log) {
    number();
    make_ids_unique(log);
    if (set_.format == "zsre") set_.choices["zsre_target"] = options_.zsre_target;
    if (!set_.facts.empty() && set_.facts.front().extra.value("kind", nlohmann::json()) == "convsent")
      set_.choices["sentiment"] = options_.sentiment;
    if (!set_.skipped.empty())
      log.event(LogLevel::kWarning, "facts.skipped",
                set_.path + ": " + std::to_string(set_.skipped.size()) + " of " + std::to_string(set_.rows) +
                    " rows have no target and are left out (first " + first_skipped() + ")",
                {{"path", set_.path}, {"skipped", set_.skipped.size()}, {"rows", set_.rows}});
    if (!set_.bad_rows.empty())
      log.event(LogLevel::kWarning, "facts.bad_rows",
                set_.path + ": " + std::to_string(set_.bad_rows.size()) + " of " + std::to_string(set_.rows) +
                    " rows cannot be used and are left out (first " + set_.bad_rows.front().text + ")",
                {{"path", set_.path}, {"bad", set_.bad_rows.size()}, {"rows", set_.rows}});
    for (const UnreadKey& key : set_.unread)
      if (!key.meant.empty()) log.warning("facts.unread_key", key.where + ": " + detail::unread_text(key));
    if (set_.facts.empty() && !options_.allow_empty) refuse_empty();
    set_.fingerprint = fingerprint(set_.facts, set_.groups);
    return std::move(set_);
  }

 private:
  void keep(detail::ParsedRow parsed, const detail::Row& row, int64_t first_number) {
    const size_t base = set_.facts.size();
    for (size_t i = 0; i < parsed.facts.size(); ++i) {
      Fact& fact = parsed.facts[i];
      if (fact.case_id == detail::kNoCaseId) unnumbered_.emplace_back(set_.facts.size(), first_number + i);
      fact.source = source_;
      fact.line = row.line;
      fact.row = row.number;
      set_.facts.push_back(std::move(fact));
    }
    if (!parsed.group) return;
    for (size_t& index : parsed.group->facts) index += base;
    if (parsed.group->case_id == detail::kNoCaseId) parsed.group->case_id = usable_ - 1;
    parsed.group->line = row.line;
    set_.groups.push_back(std::move(*parsed.group));
  }

  /// Facts without a number get their place in the file, or the next that the file gives to none.
  void number() {
    std::unordered_set<int64_t> used;
    for (const Fact& fact : set_.facts) used.insert(fact.case_id);
    for (auto [index, id] : unnumbered_) {
      while (!used.insert(id).second) ++id;
      set_.facts[index].case_id = id;
    }
  }

  void make_ids_unique(const Log& log) {
    std::unordered_set<int64_t> used;
    std::vector<Fact*> repeated;
    int64_t highest = -1;
    for (Fact& fact : set_.facts) {
      highest = std::max(highest, fact.case_id);
      if (!used.insert(fact.case_id).second) repeated.push_back(&fact);
    }
    if (repeated.empty()) return;
    const std::string first = repeated.front()->where();
    if (highest > INT64_MAX - std::ssize(repeated)) highest = std::ssize(set_.facts);
    for (Fact* fact : repeated) {
      while (used.contains(++highest)) {
      }
      fact->case_id = highest;
      used.insert(highest);
      fact->renumbered = true;
    }
    log.event(LogLevel::kWarning, "facts.case_ids",
              set_.path + ": " + std::to_string(repeated.size()) +
                  (repeated.size() == 1 ? " row repeats a case_id and was given a new one ("
                                        : " rows repeat a case_id and were given new ones (first ") +
                  first + ")",
              {{"path", set_.path}, {"repeated", repeated.size()}});
  }

  [[nodiscard]] std::string first_skipped() const {
    return set_.skipped.front().where + ": " + set_.skipped.front().text;
  }

  [[noreturn]] void refuse_empty() const {
    if (usable_ > 0)
      refuse({set_.path, "an offset of " + std::to_string(options_.offset),
              "less than the " + std::to_string(usable_) + " usable rows of the file", "lower " + setting("offset")});
    throw Error(ErrorClass::kCorruption,
                {set_.path, "no usable fact in " + counted(static_cast<size_t>(set_.rows), "row"), "at least one",
                 !set_.skipped.empty()    ? "first " + first_skipped()
                 : !set_.bad_rows.empty() ? "first " + set_.bad_rows.front().text
                                          : "check the file"});
  }

  const FactReader& reader_;
  const ReadOptions& options_;
  std::string source_;
  FactSet set_;
  std::vector<std::pair<size_t, int64_t>> unnumbered_;  // facts, and their places in the file
  int64_t usable_ = 0, kept_ = 0, facts_seen_ = 0;
};

}  // namespace

FactSet parse_facts(std::string_view text, const std::string& name, const ReadOptions& options, const Log& log) {
  check_options(options);
  const FactReader& reader = choose_reader(text, name, options);
  Loader loader(reader, name, options);
  detail::RowReader rows(text, name);
  detail::Row row;
  std::function<void(const BadRow&)> skip;
  if (options.bad_rows == BadRowPolicy::kSkip) skip = [&](const BadRow& bad) { loader.add_broken(bad); };
  while (rows.next(row, skip) && loader.add(row, rows.where(row))) {
  }
  return loader.finish(log);
}

FactSet parse_fact_rows(const nlohmann::json& given, const std::string& name, const ReadOptions& options,
                        const Log& log) {
  if (given.is_string()) return parse_facts(given.get_ref<const std::string&>(), name, options, log);
  if (given.empty() || (!given.is_array() && !given.is_object())) return parse_facts(given.dump(), name, options, log);
  std::string rows;  // one a line, so that a line is a row
  for (const auto& row : given.is_array() ? given : nlohmann::json::array({given}))
    rows += (rows.empty() ? "[" : ",\n") + row.dump();
  return parse_facts(rows + "]", name + "[]", options, log);
}

std::vector<Fact> parse_known_facts(std::string_view text, const std::string& name) {
  std::vector<Fact> facts;
  detail::RowReader rows(text, name);
  for (detail::Row row; rows.next(row);) {
    detail::Fields fields(row.value, rows.where(row));
    Fact fact;
    fact.case_id = fields.integer_or("known_id", std::ssize(facts));
    fact.subject = fields.text("subject");
    fact.target_true = detail::trim(fields.text("attribute"));
    fact.prompt = with_slot(fields.text("prompt"), fact.subject);
    fact.relation_id = fields.text_or("relation_id");
    if (detail::count_of(fact.prompt, "{}") == 0)
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

FactSet load_facts(const std::filesystem::path& path, const ReadOptions& options, const Log& log) {
  check_options(options);
  const MappedFile file(path);
  if (std::ssize(file) > options.max_bytes)
    throw Error(ErrorClass::kUnsupported, {path.string(), std::to_string(file.size()) + " bytes",
                                           "at most " + std::to_string(options.max_bytes), "split the file"});
  return parse_facts(file.text(), path.string(), options, log);
}

FactSet load_bundled_facts(const ReadOptions& options, const Log& log) {
  return parse_facts(bundled_facts(), "emend_facts.json", options, log);
}

const std::vector<FormatInfo>& fact_formats() {
  static const std::vector<FormatInfo> formats = [] {
    std::vector<FormatInfo> list;
    for (const FactReader* reader : fact_readers())
      list.push_back({std::string(reader->name), std::string(reader->summary), reader->write != nullptr});
    return list;
  }();
  return formats;
}

}  // namespace emend::datasets
