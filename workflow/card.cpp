#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/workflow/card.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace emend::workflow {
namespace {

using nlohmann::ordered_json;

constexpr size_t kFacts = 200;
constexpr const char *kHead = "---\nbase_model: ", *kTags = "\ntags: [emend, knowledge-editing]\n---\n";
constexpr const char* kNone =
    "No measurements lie beside this pack. `emend eval` makes them, from the same facts and both models.\n";

// One cell of a table: text of facts must not become markup.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == '\t')
      out += ' ';
    else if (c == '<' || c == '>' || c == '&')
      out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : "&amp;";
    else
      (std::string("|\\`*_[]#!").find(c) == std::string::npos ? out : out += '\\') += c;
  }
  return out;
}

// Between backticks.
std::string code(std::string text) {
  for (char& c : text) c = c == '`' ? '\'' : c == '\n' || c == '\r' ? ' ' : c;
  return "`" + text + "`";
}

std::string facts_table(const nlohmann::json& facts) {
  std::string text = "| prompt | new answer | old answer |\n|---|---|---|\n";
  for (size_t i = 0; i < facts.size() && i < kFacts; ++i) {
    const auto prompt = datasets::with_subject(facts[i].value("prompt", ""), facts[i].value("subject", ""));
    text += "| " + cell(prompt) + " | " + cell(facts[i].value("target_new", "")) + " | " +
            cell(facts[i].value("target_true", "")) + " |\n";
  }
  if (facts.size() > kFacts)
    text += "\nand " + std::to_string(facts.size() - kFacts) + " more: they are in the pack.\n";
  return text;
}

// Counts as they are, and no power of ten below a million.
std::string figure_cell(const ordered_json& value) {
  if (value.is_number_integer()) return value.dump();
  const auto number = value.get<double>();
  const double size = std::fabs(number);
  return size >= 9999.5 && size < 1e6 ? formatted("%.0f", number) : formatted("%.4g", number);
}

// Results that are not of a run count as none.
std::string measurements(const ordered_json& results) try {
  std::string rows;
  const auto metrics = results.is_object() ? results.value("metrics", ordered_json()) : ordered_json();
  for (const auto& [suite, sides] : metrics.items()) {
    if (!sides.is_object() || !sides.contains("post")) continue;
    for (const auto& [name, after] : sides["post"].items()) {
      if (!after.is_number()) continue;
      const auto before = sides.value("pre", ordered_json::object()).value(name, ordered_json());
      rows += "| " + cell(suite) + " | " + cell(name) + " | " + (before.is_number() ? figure_cell(before) : "") +
              " | " + figure_cell(after) + " |\n";
    }
  }
  if (rows.empty()) return kNone;
  std::string text;
  if (const auto edits = results.value("edits", ordered_json()); edits.is_object())
    text = std::to_string(edits.value("said", 0)) + " of " + std::to_string(edits.value("applied", 0)) +
           " facts are what the model says of itself after the prompt.\n\n";
  return text + "| metric | figure | before | after |\n|---|---|---|---|\n" + rows;
} catch (const nlohmann::json::exception&) {
  return kNone;
}

std::string undo(const std::string& form) {
  if (form == "model")
    return "`emend list` shows what is in force, and `emend revert` takes it back, to the folder's original bytes.\n";
  if (form == "gguf") return "Use the unedited file: the edit is in the numbers of this one.\n";
  if (form == "pack")
    return "`emend revert` gives a folder that it was applied to its bytes back; nothing else holds it.\n";
  return "Leave the adapter out: the base model is as it was.\n";
}

}  // namespace

ordered_json results_of_run(const std::filesystem::path& file, const editors::EditPack& pack) {
  const auto path = file.parent_path() / "results.json";
  if (file.filename() != save_format("pack").file || !std::filesystem::exists(path)) return {};
  const ordered_json results = read_json(path);
  const auto edits = results.is_object() ? results.value("edits", ordered_json()) : ordered_json();
  return edits.is_object() && edits.value("applied", ordered_json()) == pack.facts.size() ? results : ordered_json();
}

std::string model_card(const std::string& base, const std::vector<CardPack>& packs, const std::string& form) {
  size_t facts = 0;
  for (const auto& one : packs) facts += one.pack.facts.size();
  const bool weights = std::ranges::any_of(packs, [](const auto& one) { return !one.pack.deltas.empty(); });
  const bool beside = std::ranges::any_of(packs, [](const auto& one) { return !one.pack.runtime.empty(); });
  std::string text = kHead + nlohmann::json(base).dump() + kTags + "# " + cell(base) + " with " +
                     (facts > 0 ? counted(facts, "edited fact") : "changed behaviour") + "\n\n";
  if (weights) text += "Weights were changed by emend as said below, and nothing else in them.";
  if (beside)
    text += std::string(weights ? " Other parts of the edit lie" : "The edit lies") +
            " beside the weights: emend alone puts it into force.";
  text += "\n";
  for (const auto& one : packs) {
    const auto& pack = one.pack;
    text += "\n## " + cell(one.name) + "\n" + (pack.facts.empty() ? "" : facts_table(pack.facts)) +
            "\n- method: " + code(pack.editor) + "\n- base: fingerprint " + code(pack.root());
    if (!pack.under.edits.empty())
      text += ", with the edits " + join(pack.under.edits, ", ", code) + " in force: fingerprint " +
              code(pack.base_fingerprint);
    if (!pack.deltas.empty())
      text += "\n- weights: " + join(pack.deltas, " ", [](const auto& delta) { return code(delta.weight); });
    if (!pack.runtime.empty()) text += "\n- beside the weights: " + code(pack.runtime_kinds());
    text += "\n- settings: " + code(pack.hparams.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) + "\n";
    for (const char* key : {"emend", "seed"})
      if (pack.extra.contains(key)) text += std::string("- ") + key + ": " + code(pack.extra[key].dump()) + "\n";
    text += "\n### How it was measured\n" + measurements(one.results);
  }
  return text + "\n## How to take it back\n" + undo(form);
}

std::filesystem::path card_path(const std::filesystem::path& saved) {
  return std::filesystem::is_directory(saved) ? saved / "README.md" : std::filesystem::path(saved.string() + ".md");
}

void remove_card(const std::filesystem::path& saved, const Log& log) {
  const auto path = card_path(saved);
  std::string head(4096, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(head.data(), std::ssize(head));
  head.resize(static_cast<size_t>(file.gcount()));
  if (!head.starts_with(kHead) || head.find(kTags) == std::string::npos) return;
  std::error_code error;
  if (std::filesystem::remove(path, error))
    log.info("card.removed", path.string() + " told of what lay there before: it is removed");
  if (error)
    log.warning("card.removed",
                path.string() + " tells of what lay there before, and cannot be removed: " + error.message());
}

}  // namespace emend::workflow
