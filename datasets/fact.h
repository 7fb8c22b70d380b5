// Facts: what to change in a model, and the questions that show whether it changed.
//
// One struct holds what every published format carries; readers fill it (datasets/readers.def lists them), writers
// write it. Everything here is plain data with value semantics.
//
// Goals: one in-memory form for all editors and metrics; nothing in a file is lost (unknown keys are kept in `extra`);
// every message about a fact can name its file and line.
// Non-goals: tokens, models, devices. A fact does not know which model it will be written into.
#pragma once

#include <emend/core/log.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets {

/// A prompt with its right answers. The first answer is the canonical one, the rest are aliases.
struct Probe {
  std::string prompt;
  std::vector<std::string> answers;
};

/// `prompt` with `subject` in the place of {}, where it has one.
[[nodiscard]] std::string with_subject(std::string prompt, std::string_view subject);
/// `prompt` with {} in the place where `subject` first stands; as it is where it has a {} or does not name the subject.
[[nodiscard]] std::string with_slot(std::string prompt, std::string_view subject);

/// One requested change: after `prompt` with the subject filled in, the model shall say `target_new`.
struct Fact {
  int64_t case_id = 0;     ///< from the file, else the number of the fact in the file; unique in a FactSet
  std::string prompt;      ///< template with exactly one "{}", the place of the subject
  std::string subject;     ///< never empty
  std::string target_new;  ///< never empty; no leading space (editors and metrics add one)
  std::optional<std::string> target_true;        ///< the old answer, where the file has one
  std::vector<std::string> target_true_aliases;  ///< further right spellings of the old answer
  std::string relation_id;                       ///< "P740", or empty

  std::vector<std::string> paraphrase_prompts;    ///< same question in other words; the answer becomes target_new
  std::vector<std::string> neighborhood_prompts;  ///< other subjects whose answer is and stays target_true
  std::vector<std::string> attribute_prompts;     ///< other subjects whose answer is and stays target_new
  std::vector<std::string> generation_prompts;    ///< starts of free text about the subject
  std::vector<std::string> distracting_prompts;   ///< neighbourhood prompts with the new fact stated in front

  /// Questions whose answer must stay ("Relation_Specificity", "Forgetfulness", "neighborhood", …) and questions whose
  /// answer follows from the change ("Reasoning", "Subject_Aliasing", "one_hop", …). Every probe has an answer. zsRE's
  /// loc and loc_ans are locality["loc"], verbatim ("nq question: …" without the question mark that MEMIT's metric
  /// appends).
  std::map<std::string, std::vector<Probe>> locality;
  std::map<std::string, std::vector<Probe>> portability;

  nlohmann::json extra = nlohmann::json::object();  ///< keys of the row that have no member here, as they were
  std::string source;                               ///< file name; "facts[]" for rows of a list, not of a text
  int64_t line = 0;                                 ///< 1-based line on which the row starts; 0 if not from a file
  int64_t row = 0;          ///< 1-based number of the row in its file where others start on the same line; else 0
  bool renumbered = false;  ///< an earlier row has the file's case_id, so this one is another

  /// The prompt with the subject in its place: "The Eiffel Tower is in the city of".
  [[nodiscard]] std::string full_prompt() const;
  /// "facts.json:12", "facts.json:1 (row 12)" or "facts[11]" for messages; "fact 7" if not from a file.
  [[nodiscard]] std::string where() const;
};

/// One step of a multi-hop question.
struct Hop {
  std::string question, cloze;
  std::vector<std::string> answers;
};

/// Facts that belong together: a MQuAKE instance, a ConflictEdit pair, a RoundEdit.
struct FactGroup {
  int64_t case_id = 0;
  std::string kind;           ///< "mquake", "conflict-reverse", "conflict-composite", "conflict-coverage", "round"
  std::vector<size_t> facts;  ///< indices into FactSet::facts, in the order in which they are to be edited
  bool sequential = false;    ///< true where the order matters because the edits conflict by design
  std::vector<std::string> questions;    ///< MQuAKE: the same multi-hop question in several wordings
  std::vector<std::string> answers;      ///< before the edits, canonical first; RoundEdit: all true objects
  std::vector<std::string> new_answers;  ///< after the edits, canonical first
  std::vector<Hop> single_hops, new_single_hops;
  nlohmann::json extra = nlohmann::json::object();
  int64_t line = 0;
};

/// A row that could not be used, and why.
struct BadRow {
  int64_t line = 0;
  std::string text;   ///< the error that BadRowPolicy::kError would have thrown; why there is no target
  std::string where;  ///< "facts.json:12"
};

/// A key of a file's rows that means nothing to the format.
struct UnreadKey {
  std::string key;    ///< "targetnew", "requested_rewrite.sujet"
  std::string meant;  ///< the key that is probably meant, or empty
  std::string where;  ///< of the first
  int64_t times = 0;
  bool kept = true;  ///< with the fact, in `extra`
};

/// Facts of one file.
struct FactSet {
  std::vector<Fact> facts;
  std::vector<FactGroup> groups;  ///< empty for ungrouped formats
  std::string format;             ///< reader that was used: "counterfact", "zsre", …
  std::string path;               ///< as given
  std::string fingerprint;        ///< SHA-256 of the facts and groups that were read; not of the file's bytes
  int64_t rows = 0;               ///< rows looked at; fewer than the file has once `limit` is reached
  std::vector<BadRow> skipped;    ///< rows without a usable target, left out
  std::vector<BadRow> bad_rows;   ///< rows left out under BadRowPolicy::kSkip
  std::vector<UnreadKey> unread;  ///< keys that mean nothing to the format, in the order of the file
  nlohmann::json choices =
      nlohmann::json::object();  ///< choices that change meaning, for reports: {"zsre_target": "answers"}
};

/// What to do with a row that cannot be used as it is (subject not in the prompt, wrong type, …).
enum class BadRowPolicy { kError, kSkip };

struct ReadOptions {
  std::string format = "auto";  ///< a name of readers.def, or "auto": told by the keys of the first row
  int64_t offset = 0;           ///< usable rows (instances in grouped formats) to leave out at the start
  int64_t limit = -1;           ///< usable rows to read after `offset`; -1: all
  std::string zsre_target =
      "answers";  ///< "answers": the true answer, as MEMIT does; "alt": the counterfactual, as EasyEdit does
  std::string sentiment = "pos";                 ///< ConvSent: which side becomes the target, "pos" or "neg"
  BadRowPolicy bad_rows = BadRowPolicy::kError;  ///< kSkip: warn, count and go on
  bool allow_empty = false;                      ///< no error if nothing is left; for tools that report on files
  int64_t max_bytes = int64_t{4} << 30;          ///< larger files are refused
};

/// Reads a facts file: a JSON array of rows, JSON lines, or one single row.
/// Throws Error(kNotFound, kIo) for the file, Error(kCorruption) for bytes that are not UTF-8 JSON and for a row that
/// is not a usable fact, naming file, line and field, Error(kInvalidArgument) for bad options. Rows without a target
/// are skipped, counted and reported in one warning; a file without any usable fact is an error unless `allow_empty`.
[[nodiscard]] FactSet load_facts(const std::filesystem::path& path, const ReadOptions& options = {},
                                 const Log& log = {});

/// The same from text; `name` stands for the file in messages.
[[nodiscard]] FactSet parse_facts(std::string_view text, const std::string& name, const ReadOptions& options = {},
                                  const Log& log = {});

/// The same from what a request or a program gave: a list of rows (places are "facts[2]"), one row, or a text with rows
/// (places are "facts:3").
[[nodiscard]] FactSet parse_fact_rows(const nlohmann::json& given, const std::string& name,
                                      const ReadOptions& options = {}, const Log& log = {});

/// Known facts for causal tracing (known_1000.json of the ROME release), from text: rows with subject, prompt and
/// attribute, the right answer, which becomes target_true; there is no target_new. A row whose prompt does not name its
/// subject is an error. Errors as parse_facts.
[[nodiscard]] std::vector<Fact> parse_known_facts(std::string_view text, const std::string& name);

/// "facts.json:12", or "facts.json:1 (row 12)"; "facts[11]" if `source` is "facts[]".
[[nodiscard]] std::string place_of(const std::string& source, int64_t line, int64_t row = 0);

/// The facts that come with emend (datasets/emend_facts.json), compiled into the library.
[[nodiscard]] FactSet load_bundled_facts(const ReadOptions& options = {}, const Log& log = {});

/// Names that ReadOptions::format accepts besides "auto", in the order of readers.def, with a line about each.
struct FormatInfo {
  std::string name;
  std::string summary;
  bool writable = false;
};
[[nodiscard]] const std::vector<FormatInfo>& fact_formats();  ///< the table

/// Canonical JSON of a fact, without source and line: what the fingerprint hashes and what reports embed.
[[nodiscard]] nlohmann::json to_json(const Fact& fact);
/// SHA-256 over to_json of all facts, in order, and over what the groups ask of them.
[[nodiscard]] std::string fingerprint(const std::vector<Fact>& facts, const std::vector<FactGroup>& groups = {});
/// The set's own, or that of its facts and groups if it has none.
[[nodiscard]] std::string fingerprint_of(const FactSet& facts);

/// Throws Error(kInvalidArgument) naming `where` and the field if the fact breaks a promise of the struct (exactly one
/// "{}" in the prompt, subject and targets not blank). For facts that were built in code instead of read.
void validate(const Fact& fact, const std::string& where = "");

}  // namespace emend::datasets
