#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/health.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>

namespace emend::evaluation {
namespace {

using nlohmann::json;

/// Σ -log p of every token of each row from `first` on, in float64 on the host.
double total_nll(const models::Model& model, const std::vector<std::vector<int64_t>>& rows, size_t first,
                 int64_t chunk) {
  std::vector<int64_t> tokens, labels;
  const auto batch = models::TokenBatch::from_rows(rows);
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t k = first; k < rows[r].size(); ++k) {
      tokens.push_back(batch.token(static_cast<int64_t>(r), static_cast<int64_t>(k) - 1));
      labels.push_back(rows[r][k]);
    }
  models::ForwardOptions options;
  options.logit_tokens.emplace();
  const at::Tensor hidden_ND = model.forward(batch, options).needed_hidden();
  double total = 0;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(chunk)) {
    const size_t n = std::min(tokens.size() - at, static_cast<size_t>(chunk));
    const auto slice = [&](const std::vector<int64_t>& values, const at::Tensor& like) {
      return devices::route_like(at::tensor(at::ArrayRef<int64_t>(values.data() + at, n), at::kLong), like,
                                 devices::Purpose::kLabels);
    };
    const at::Tensor logits_MV =
        detail::wide_logits(model.project(hidden_ND.index_select(0, slice(tokens, hidden_ND))));
    const at::Tensor right = logits_MV.gather(1, slice(labels, logits_MV).unsqueeze(1)).squeeze(1);
    const at::Tensor nll = at::logsumexp(logits_MV, {-1}) - right;
    total += devices::to_host(nll.to(at::kDouble).sum(), devices::Purpose::kLogits).item<double>();
  }
  if (!std::isfinite(total)) detail::not_finite("perplexity");
  return total;
}

double matthews_of(const std::vector<Choice>& items, const std::vector<int64_t>& chosen) {
  double tp = 0, fp = 0, fn = 0, tn = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool truth = items[i].answer == 1, said = chosen[i] == 1;
    (truth ? (said ? tp : fn) : (said ? fp : tn)) += 1;
  }
  const double scale = std::sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn));
  return scale > 0 ? (tp * tn - fp * fn) / scale : 0;
}

// Reads the health tasks and turns their rows into prompts. The wordings follow EleutherAI's lm-evaluation-harness,
// zero-shot.

/// A row with a name for messages.
struct TaskRow {
  const json& value;
  std::string where;

  [[noreturn]] void fail(const std::string& got, const std::string& expected) const {
    refuse({where, got, expected, "see docs/metrics.md for the files' forms"});
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

Choice mmlu(const TaskRow& row) {
  static const char* const letters[] = {"A", "B", "C", "D", "E", "F", "G", "H"};
  const json choices = row.value.contains("choices") ? row.value["choices"] : json();
  if (!choices.is_array() || choices.size() < 2 || choices.size() > 8)
    row.fail("no list \"choices\"", "2 to 8 answers");
  std::string subject = row.text("subject");
  std::ranges::replace(subject, '_', ' ');
  Choice choice;
  choice.prompt = "The following are multiple choice questions (with answers) about " + subject + ".\n\n" +
                  std::string(trimmed(row.text("question"))) + "\n";
  for (size_t i = 0; i < choices.size(); ++i) {
    if (!choices[i].is_string()) row.fail("an answer that is not a text", "strings");
    choice.prompt += std::string(letters[i]) + ". " + choices[i].get<std::string>() + "\n";
    choice.options.emplace_back(letters[i]);
  }
  choice.prompt += "Answer:";
  choice.answer = row.index("answer", std::ssize(choices));
  return choice;
}

Choice piqa(const TaskRow& row) {
  return {"Question: " + row.text("goal") + "\nAnswer:", {row.text("sol1"), row.text("sol2")}, row.index("label", 2)};
}
Choice sst2(const TaskRow& row) {
  return {row.text("sentence") + "\nQuestion: Is this sentence positive or negative?\nAnswer:",
          {"negative", "positive"},
          row.index("label", 2)};
}
Choice rte(const TaskRow& row) {
  return {row.text("sentence1") + "\nQuestion: " + row.text("sentence2") + " True or False?\nAnswer:",
          {"True", "False"},
          row.index("label", 2)};
}
Choice cola(const TaskRow& row) {
  return {row.text("sentence") + "\nQuestion: Does this sentence make sense?\nAnswer:",
          {"no", "yes"},
          row.index("label", 2)};
}

struct ChoiceFile {
  std::string_view name;  // of "health_NAME.json"
  Choice (*read)(const TaskRow&);
};
constexpr ChoiceFile kChoiceFiles[] = {{"mmlu", mmlu}, {"piqa", piqa}, {"sst2", sst2}, {"rte", rte}, {"cola", cola}};

HealthTask read_choices(const std::filesystem::path& path, const ChoiceFile& kind, int64_t limit) {
  const json rows = read_json(path);
  if (!rows.is_array())
    throw Error(ErrorClass::kCorruption,
                {path.string(), "no JSON list", "a list of questions", "take the file from its source again"});
  HealthTask task{std::string(kind.name), path.string(), {}, {}};
  for (size_t i = 0; i < rows.size() && (limit < 0 || static_cast<int64_t>(i) < limit); ++i)
    task.choices.push_back(kind.read({rows[i], path.string() + ": row " + std::to_string(i + 1)}));
  return task;
}

HealthTask read_lambada(const std::filesystem::path& path, int64_t limit) {
  HealthTask task{"lambada", path.string(), {}, {}};
  std::istringstream lines(read_file(path));
  int64_t number = 0;
  for (std::string line; std::getline(lines, line) && (limit < 0 || std::ssize(task.texts) < limit);) {
    ++number;
    if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
    const std::string where = path.string() + ":" + std::to_string(number);
    const json row = parse_json(line, where);
    const TaskRow checked{row, where};
    task.texts.push_back(checked.text("text"));
    if (trimmed(task.texts.back()).find(' ') == std::string_view::npos)
      checked.fail("\"" + shorten(task.texts.back(), 60) + "\"", "a text of at least two words");
  }
  return task;
}

}  // namespace

Perplexity perplexity(const models::Model& model, const std::string& text, int64_t length, int64_t max_tokens,
                      const ScoreOptions& options) {
  const at::NoGradGuard no_grad;
  const auto& tokenizer = model.tokenizer();
  auto ids = tokenizer.encode_ids(text);
  if (max_tokens >= 0 && std::ssize(ids) > max_tokens) ids.resize(static_cast<size_t>(max_tokens));
  const auto& prefix = tokenizer.prefix_ids();
  const int64_t room = std::min(length, model.max_positions()) - std::ssize(prefix);
  const size_t first = std::max<size_t>(1, prefix.size());  // special tokens in front are no text
  if (room < 2) refuse({"perplexity", "windows of " + std::to_string(length) + " tokens", "at least 2 tokens", ""});
  Perplexity result;
  double nll = 0;
  std::vector<std::vector<int64_t>> rows;
  int64_t row_tokens = 0;
  const auto flush = [&] {
    if (rows.empty()) return;
    nll += total_nll(model, rows, first, options.project_rows);
    rows.clear();
    row_tokens = 0;
  };
  for (size_t at = 0; at < ids.size(); at += static_cast<size_t>(room)) {
    options.cancel.check("perplexity");
    auto row = prefix;
    const size_t end = std::min(ids.size(), at + static_cast<size_t>(room));
    row.insert(row.end(), ids.begin() + at, ids.begin() + end);
    if (row.size() <= first) continue;
    if (!rows.empty() && row_tokens + std::ssize(row) > options.batch_tokens) flush();
    row_tokens += std::ssize(row);
    result.tokens += std::ssize(row) - static_cast<int64_t>(first);
    rows.push_back(std::move(row));
  }
  flush();
  if (result.tokens == 0) refuse({"perplexity", "a text of fewer than 2 tokens", "a longer text", "check the file"});
  result.value = std::exp(nll / static_cast<double>(result.tokens));
  return result;
}

Lambada lambada(const models::Model& model, const std::vector<std::string>& texts, const ScoreOptions& options) {
  std::vector<ScoreRequest> requests;
  for (const auto& text : texts) {
    const size_t end = text.find_last_not_of(" \t\r\n") + 1;
    const size_t space = end == 0 ? std::string::npos : text.rfind(' ', end - 1);
    if (space == std::string::npos || space == 0)
      refuse({"lambada text " + std::to_string(requests.size()), "\"" + text.substr(0, 60) + "\"",
              "a text of at least two words", "check the file"});
    requests.push_back({text.substr(0, space), text.substr(space + 1, end - space - 1)});
  }
  Lambada result;
  result.n = std::ssize(texts);
  double nll = 0;
  for (const auto& score : score_requests(model, requests, options)) {
    result.accuracy += score.all_correct() ? 1 : 0;
    nll -= score.total_log_prob();
  }
  if (result.n == 0) return result;
  result.accuracy *= 100.0 / static_cast<double>(result.n);
  result.perplexity = std::exp(nll / static_cast<double>(result.n));
  return result;
}

MultipleChoice multiple_choice(const models::Model& model, const std::vector<Choice>& items,
                               const ScoreOptions& options) {
  std::vector<ScoreRequest> requests;
  bool two = true;
  for (const auto& item : items) {
    for (const auto& option : item.options) requests.push_back({item.prompt, option});
    two = two && item.options.size() == 2;
  }
  const auto scores = score_requests(model, requests, options);
  MultipleChoice result;
  result.n = std::ssize(items);
  size_t at = 0;
  for (const auto& item : items) {
    std::vector<double> sums, normalised;
    for (const auto& option : item.options) {
      sums.push_back(scores[at++].total_log_prob());
      normalised.push_back(sums.back() / std::max<double>(width_of(option), 1));
    }
    const auto best = [](const std::vector<double>& of) { return std::ranges::max_element(of) - of.begin(); };
    result.chosen.push_back(best(sums));
    result.accuracy += best(sums) == item.answer ? 1 : 0;
    result.accuracy_normalised += best(normalised) == item.answer ? 1 : 0;
  }
  if (result.n == 0) return result;
  result.accuracy *= 100.0 / static_cast<double>(result.n);
  result.accuracy_normalised *= 100.0 / static_cast<double>(result.n);
  if (two) result.matthews = 100 * matthews_of(items, result.chosen);
  return result;
}

at::Tensor divergences(const at::Tensor& before, const at::Tensor& after) {
  if (!before.defined() || !after.defined() || before.sizes() != after.sizes() || before.dim() != 2)
    refuse({"divergence", "distributions of different shapes", "two [texts, V] tensors of the same texts",
            "evaluate both states with the same model and texts"});
  const at::Tensor p = before.to(at::kDouble), q = after.to(at::kDouble);
  return (p.exp() * (p - q)).sum(1);
}

double mean_divergence(const at::Tensor& before, const at::Tensor& after) {
  const double mean = divergences(before, after).mean().item<double>();
  return mean < 0 ? 0 : mean;  // of rounding; what is no number stays that
}

json evaluate_health(const models::Model& model, const std::vector<HealthTask>& tasks, const ScoreOptions& options) {
  json out = json::object();
  out["n"] = json::object();
  for (const auto& task : tasks) {
    if (task.name == "perplexity") {
      const auto result = perplexity(model, task.texts.at(0), /*length=*/512, /*max_tokens=*/8192, options);
      out["perplexity"] = result.value;
      out["n"][task.name] = result.tokens;
    } else if (task.name == "lambada") {
      const auto result = lambada(model, task.texts, options);
      if (result.n == 0) continue;
      out["lambada_accuracy"] = result.accuracy;
      out["lambada_perplexity"] = result.perplexity;
      out["n"][task.name] = result.n;
    } else {
      const auto result = multiple_choice(model, task.choices, options);
      if (result.n == 0) continue;
      out[task.name + "_accuracy"] = result.accuracy;
      if (task.name == "piqa") out["piqa_accuracy_normalised"] = result.accuracy_normalised;
      if (task.name == "cola" && result.matthews) out["cola_matthews"] = *result.matthews;
      out["n"][task.name] = result.n;
    }
  }
  return out;
}

std::vector<HealthTask> load_health_tasks(const std::filesystem::path& folder, int64_t limit) {
  std::vector<std::filesystem::path> files;
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    throw Error(ErrorClass::kNotFound,
                {"health data in \"" + folder.string() + "\"", "no such folder", "a folder", "check the path"});
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::ranges::sort(files);
  std::vector<HealthTask> tasks;
  for (const auto& path : files) {
    const std::string name = path.filename().string();
    if ((name.starts_with("wikitext") || name.starts_with("perplexity")) && name.ends_with(".txt"))
      tasks.push_back({"perplexity", path.string(), {}, {read_file(path)}});
    if (name.starts_with("lambada") && name.ends_with(".jsonl")) tasks.push_back(read_lambada(path, limit));
  }
  for (const auto& kind : kChoiceFiles)
    for (const auto& path : files)
      if (path.filename() == "health_" + std::string(kind.name) + ".json")
        tasks.push_back(read_choices(path, kind, limit));
  for (auto task = tasks.begin(); task != tasks.end(); ++task) {
    if (limit != 0 && task->texts.empty() && task->choices.empty())
      throw Error(ErrorClass::kCorruption, {task->file, "no item", "at least one", "check the file, or take it away"});
    const auto other = std::find_if(tasks.begin(), task, [&](const auto& one) { return one.name == task->name; });
    if (other != task)
      refuse({folder.string(),
              std::filesystem::path(other->file).filename().string() + " and " +
                  std::filesystem::path(task->file).filename().string() + " for " + task->name,
              "one file a task", "put the other one elsewhere"});
  }
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
