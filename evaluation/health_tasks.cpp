// Reads the health tasks and turns their rows into prompts. The wordings follow EleutherAI's lm-evaluation-harness,
// zero-shot.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/evaluation/health.h>

#include <algorithm>

namespace emend::evaluation {
namespace {

using nlohmann::json;

/// A row with a name for messages.
struct Row {
  const json& value;
  std::string where;

  [[noreturn]] void fail(const std::string& got, const std::string& expected) const {
    throw Error(ErrorClass::kInvalidArgument, {where, got, expected, "see docs/metrics.md for the files' forms"});
  }
  [[nodiscard]] std::string text(const char* key) const {
    if (!value.is_object() || !value.contains(key) || !value[key].is_string())
      fail(std::string("no text \"") + key + "\"", "a string");
    return value[key].get<std::string>();
  }
  [[nodiscard]] int64_t index(const char* key, int64_t below) const {
    if (!value.contains(key) || !value[key].is_number_integer())
      fail(std::string("no number \"") + key + "\"", "an integer");
    const auto i = value[key].get<int64_t>();
    if (i < 0 || i >= below) fail(std::string(key) + " is " + std::to_string(i), "0 to " + std::to_string(below - 1));
    return i;
  }
};

Choice mmlu(const Row& row) {
  static const char* const letters[] = {"A", "B", "C", "D", "E", "F", "G", "H"};
  const json choices = row.value.contains("choices") ? row.value["choices"] : json();
  if (!choices.is_array() || choices.size() < 2 || choices.size() > 8)
    row.fail("no list \"choices\"", "2 to 8 answers");
  std::string subject = row.text("subject");
  std::replace(subject.begin(), subject.end(), '_', ' ');
  Choice choice;
  choice.prompt = "The following are multiple choice questions (with answers) about " + subject + ".\n\n" +
                  row.text("question") + "\n";
  for (size_t i = 0; i < choices.size(); ++i) {
    if (!choices[i].is_string()) row.fail("an answer that is not a text", "strings");
    choice.prompt += std::string(letters[i]) + ". " + choices[i].get<std::string>() + "\n";
    choice.options.emplace_back(letters[i]);
  }
  choice.prompt += "Answer:";
  choice.answer = row.index("answer", static_cast<int64_t>(choices.size()));
  return choice;
}

Choice piqa(const Row& row) {
  return {"Question: " + row.text("goal") + "\nAnswer:", {row.text("sol1"), row.text("sol2")}, row.index("label", 2)};
}
Choice sst2(const Row& row) {
  return {row.text("sentence") + "\nQuestion: Is this sentence positive or negative?\nAnswer:",
          {"negative", "positive"},
          row.index("label", 2)};
}
Choice rte(const Row& row) {
  return {row.text("sentence1") + "\nQuestion: " + row.text("sentence2") + " True or False?\nAnswer:",
          {"True", "False"},
          row.index("label", 2)};
}
Choice cola(const Row& row) {
  return {row.text("sentence") + "\nQuestion: Does this sentence make sense?\nAnswer:",
          {"no", "yes"},
          row.index("label", 2)};
}

struct ChoiceFile {
  const char* file;
  const char* name;
  Choice (*read)(const Row&);
};
constexpr ChoiceFile kChoiceFiles[] = {{"health_mmlu.json", "mmlu", mmlu},
                                       {"health_piqa.json", "piqa", piqa},
                                       {"health_sst2.json", "sst2", sst2},
                                       {"health_rte.json", "rte", rte},
                                       {"health_cola.json", "cola", cola}};

HealthTask read_choices(const std::filesystem::path& path, const ChoiceFile& kind, int64_t limit) {
  const json rows = read_json(path);
  if (!rows.is_array())
    throw Error(ErrorClass::kCorruption,
                {path.string(), "no JSON list", "a list of questions", "take the file from its source again"});
  HealthTask task{kind.name, "choice", path.string(), {}, {}};
  for (size_t i = 0; i < rows.size() && (limit < 0 || static_cast<int64_t>(i) < limit); ++i)
    task.choices.push_back(kind.read({rows[i], path.string() + ": row " + std::to_string(i + 1)}));
  return task;
}

HealthTask read_lambada(const std::filesystem::path& path, int64_t limit) {
  HealthTask task{"lambada", "lambada", path.string(), {}, {}};
  std::istringstream lines(read_file(path));
  int64_t number = 0;
  for (std::string line; std::getline(lines, line) && (limit < 0 || static_cast<int64_t>(task.texts.size()) < limit);) {
    ++number;
    if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
    const std::string where = path.string() + ":" + std::to_string(number);
    const json row = parse_json(line, where);
    task.texts.push_back(Row{row, where}.text("text"));
  }
  return task;
}

}  // namespace

std::vector<HealthTask> load_health_tasks(const std::filesystem::path& folder, int64_t limit) {
  std::vector<std::filesystem::path> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<HealthTask> tasks;
  for (const auto& path : files) {
    const std::string name = path.filename().string();
    if ((name.starts_with("wikitext") || name.starts_with("perplexity")) && name.ends_with(".txt"))
      tasks.push_back({"perplexity", "perplexity", path.string(), {}, {read_file(path)}});
    if (name.starts_with("lambada") && name.ends_with(".jsonl")) tasks.push_back(read_lambada(path, limit));
  }
  for (const auto& kind : kChoiceFiles)
    for (const auto& path : files)
      if (path.filename() == kind.file) tasks.push_back(read_choices(path, kind, limit));
  if (tasks.empty())
    throw Error(ErrorClass::kNotFound,
                {"health data in \"" + folder.string() + "\"", "no file of a known task",
                 "health_mmlu.json, health_piqa.json, health_sst2.json, health_rte.json, health_cola.json, "
                 "lambada*.jsonl, wikitext*.txt or perplexity*.txt",
                 "name the folder that holds such files"});
  return tasks;
}

const std::vector<std::string>& probe_prompts() {
  static const std::vector<std::string> prompts = {"The weather in the mountains can change",
                                                   "In the morning she opened the window and",
                                                   "Water boils at a temperature of",
                                                   "The committee met on Tuesday to discuss",
                                                   "He put the letter back into",
                                                   "Photosynthesis is the process by which",
                                                   "The train to the coast leaves at",
                                                   "Once upon a time there was a",
                                                   "The results of the study suggest that",
                                                   "To make a good soup, first",
                                                   "The river flows from the north to",
                                                   "She had never seen such a",
                                                   "The law of supply and demand says",
                                                   "After the match the players",
                                                   "A triangle has three",
                                                   "The old house at the end of the street",
                                                   "In order to install the program,",
                                                   "The price of bread has",
                                                   "My favourite thing about summer is",
                                                   "The doctor told him to",
                                                   "Dogs are usually more",
                                                   "At the beginning of the nineteenth century,",
                                                   "The engine started with a",
                                                   "If you want to learn to play the piano,",
                                                   "The children ran across the",
                                                   "A healthy diet contains plenty of",
                                                   "The museum is open every day except",
                                                   "When the lights went out, everybody",
                                                   "The square root of nine is",
                                                   "There are seven days in a",
                                                   "The judge asked the witness whether",
                                                   "Snow fell all night, and by"};
  return prompts;
}

}  // namespace emend::evaluation
