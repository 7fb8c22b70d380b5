// A facts format: how its rows are told from others, read and written. One file in datasets/readers/, one line in
// readers.def.
#pragma once

#include <emend/datasets/detail/rows.h>
#include <emend/datasets/fact.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace emend::datasets::detail {

/// What one row gives.
struct ParsedRow {
  std::vector<Fact> facts = {};
  std::optional<FactGroup> group = {};  ///< its `facts` are indices into `facts` above
  std::string skipped = {};             ///< not empty: the row has no usable target, for this reason
};

struct FactReader {
  std::string_view name;
  std::string_view summary;
  /// True if these first rows of a file look like this format. Readers are asked in the order of readers.def.
  bool (*recognises)(const std::vector<nlohmann::json>& first_rows);
  ParsedRow (*read)(Fields& row, const ReadOptions& options);
  /// A row from a fact, or nullptr if the format cannot be written from single facts.
  nlohmann::ordered_json (*write)(const Fact& fact) = nullptr;
};

/// All formats, in the order of readers.def.
[[nodiscard]] const std::vector<const FactReader*>& fact_readers();

#define EMEND_FACT_READER(name) extern const FactReader name##_reader;
#include <emend/datasets/readers.def>
#undef EMEND_FACT_READER

// Pieces that several formats share.

/// case_id of a row that has none; the loader numbers it.
constexpr int64_t kNoCaseId = std::numeric_limits<int64_t>::min();

/// True if any of the rows has all of the keys.
[[nodiscard]] bool any_has(const std::vector<nlohmann::json>& rows, std::initializer_list<const char*> keys);
/// case_id, prompt (slotted), subject and target_new; `target_key` names the field of the target. Returns why the row
/// is to be skipped if the target is blank.
[[nodiscard]] std::string read_core(Fields& fields, const char* prompt_key, const char* target_key, Fact& fact);
/// A row of one fact, which keeps what nobody asked `fields` for.
[[nodiscard]] ParsedRow one_fact(Fact fact, const Fields& fields);
/// A list of prompts that CounterFact rows have.
struct PromptList {
  const char *key, *what;  ///< "paraphrase_prompts", "a paraphrase"
  std::vector<std::string> Fact::*member;
};
inline constexpr PromptList kPromptLists[] = {
    {"paraphrase_prompts", "a paraphrase", &Fact::paraphrase_prompts},
    {"neighborhood_prompts", "a neighbourhood prompt", &Fact::neighborhood_prompts},
    {"attribute_prompts", "an attribute prompt", &Fact::attribute_prompts},
    {"generation_prompts", "a generation prompt", &Fact::generation_prompts},
    {"distracting_neighborhood_prompts", "a distracting prompt", &Fact::distracting_prompts}};
void read_prompt_lists(Fields& fields, Fact& fact);
void write_prompt_lists(const Fact& fact, nlohmann::ordered_json& row);
/// EasyEdit's flat row, which KnowEdit and the short form share.
[[nodiscard]] ParsedRow read_flat(Fields& row, const ReadOptions& options);
/// The prompt with the subject filled in where it can be found again, else the template.
[[nodiscard]] std::string write_prompt(const Fact& fact);
/// Of an answer of the form {"str": "Rome", "id": "Q220"}: extra["target_new_id"], and other members likewise
/// ("target_new.aliases").
void keep_id(const Fields& fields, const char* key, Fact& fact);
/// The first answer is target_true, the rest its aliases.
void set_true_answers(Fact& fact, std::vector<std::string> answers);
[[nodiscard]] std::vector<std::string> true_answers(const Fact& fact);
/// Adds a prompt with its right answers, or parallel lists of both, to `probes`; those without prompt or answer are
/// dropped. The names are for messages.
void add_probes(const Fields& fields, const nlohmann::json& prompts, const std::string& prompts_name,
                const nlohmann::json& answers, const std::string& answers_name, std::vector<Probe>& probes);
/// EasyEdit's and KnowEdit's dictionaries of probes: {key: [{prompt, ground_truth}]} or {key: {prompt, ground_truth}}
/// with strings or parallel lists. Probes without prompt or answer are dropped.
[[nodiscard]] std::map<std::string, std::vector<Probe>> read_probes(Fields& fields, const char* key);
/// {"Recalled Relation", "New Question", "New Answer"} into portability["one_hop"]; the relation stays in extra.
void read_one_hop(Fields& fields, Fact& fact);
void write_one_hop(const Fact& fact, nlohmann::ordered_json& row);
/// The inverse of read_probes: {key: [{prompt, ground_truth}]}.
[[nodiscard]] nlohmann::ordered_json write_probes(const std::map<std::string, std::vector<Probe>>& probes,
                                                  const char* answers = "ground_truth");
/// One string for one answer, a list for several.
[[nodiscard]] nlohmann::ordered_json write_answers(const std::vector<std::string>& answers);
/// Adds what is left in `extra` to a row, without touching keys that are there.
void write_extra(const Fact& fact, nlohmann::ordered_json& row);

/// Calls `look` with what it is ("the subject", "a paraphrase") and each text of a fact that a model may be given.
void each_text(const Fact& fact, const std::function<void(const char* what, const std::string& text)>& look);

}  // namespace emend::datasets::detail
