#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/prompts.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/text_metrics.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/config.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/scorer.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <system_error>

namespace emend::workflow {
namespace {

using nlohmann::json;
using Ids = std::vector<int64_t>;

// What a scorer of each kind has besides its name: lists, but for the question of a judge.
const std::map<std::string, std::vector<std::string>> kMembers = {
    {"rate", {"words"}},      {"any", {"words"}},
    {"length", {}},           {"loops", {}},
    {"entropy", {}},          {"sentiment", {"positive", "negative"}},
    {"next", {"words"}},      {"judge", {"yes", "no", "ask"}},
    {"command", {"command"}},
};

// What stands between words beside ASCII: blanks, dashes, quotes, ellipses, the marks of CJK and its full-width forms.
constexpr std::pair<char32_t, char32_t> kBetween[] = {
    {0xA0, 0xA1},     {0xAB, 0xAB},     {0xBB, 0xBB},     {0xBF, 0xBF},     {0x2000, 0x200B},
    {0x2010, 0x2017}, {0x201A, 0x2027}, {0x202F, 0x205F}, {0x3000, 0x3003}, {0x3008, 0x3020},
    {0x3030, 0x3030}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF20}, {0xFF3B, 0xFF40}, {0xFF5B, 0xFF65}};

// A text without case, in form KC: letters and digits, every apostrophe "'", and a blank for what stands between words.
// What is not UTF-8 stays.
std::string plain(std::string_view given) {
  const std::string text = folded(given);
  std::string out;
  for (size_t at = 0, size = 0; at < text.size(); at += size) {
    const auto character = character_at(text, at);
    size = character.size;
    const std::string_view own = std::string_view(text).substr(at, size);
    const char32_t point = character.code.value_or(0xFFFD);
    const auto between = [point](const auto& range) { return range.first <= point && point <= range.second; };
    if (point < 0x80)
      out += std::isalnum(static_cast<int>(point)) || point == '\'' ? own : " ";
    else if (point == 0x2BC || point == 0x2018 || point == 0x2019 || point == 0x201B || point == 0xFF07)
      out += '\'';
    else
      out += std::ranges::any_of(kBetween, between) ? " " : own;
  }
  return out;
}

// " the words of a text " in one form, so that whole words are found by their blanks. Quotes around a word may be
// apostrophes.
std::string spaced(std::string_view plain_text) {
  std::string words = " ";
  const auto end_word = [&] {
    while (words.back() == '\'') words.pop_back();
    if (words.back() != ' ') words += ' ';
  };
  for (const char c : plain_text) {
    if (c == ' ')
      end_word();
    else if (c != '\'' || words.back() != ' ')
      words += c;
  }
  end_word();
  return words;
}

std::string words_in(std::string_view text) {
  return spaced(plain(text));
}

// Words that are the same in this form count once.
int64_t occurrences(const std::string& spaced_text, const std::vector<std::string>& words) {
  std::set<std::string> forms;
  for (const auto& word : words) forms.insert(words_in(word));
  int64_t found = 0;
  for (const auto& wanted : forms) {
    if (wanted.size() < 2) continue;
    for (size_t at = spaced_text.find(wanted); at != std::string::npos; at = spaced_text.find(wanted, at + 1)) ++found;
  }
  return found;
}

double score_texts(const Scorer& scorer, const std::vector<std::string>& texts) {
  if (scorer.kind == "entropy") return evaluation::mean_ngram_entropy(texts);
  double found = 0, words_in_all = 0, with_any = 0, loop = 0;
  for (const auto& text : texts) {
    const std::string own = words_in(text);
    const auto here = static_cast<double>(occurrences(own, scorer.words));
    found += here - static_cast<double>(occurrences(own, scorer.against));
    with_any += here > 0;
    loop += scorer.kind == "loops" && evaluation::loops(text);
    words_in_all += static_cast<double>(std::ranges::count(own, ' ') - 1);
  }
  const auto n = static_cast<double>(texts.size());
  if (scorer.kind == "length") return words_in_all / n;
  if (scorer.kind == "loops") return 100 * loop / n;
  return scorer.kind == "any" ? 100 * with_any / n : 100 * found / std::max(1.0, words_in_all);
}

// The words as token ids where they go on from a text, without and with a blank in front; none that begins with another
// of them.
std::set<Ids> beginnings(const models::Model& model, const std::string& text, const std::vector<std::string>& words) {
  std::set<Ids> all;
  for (const auto& word : words)
    for (const auto& form : {word, " " + word})
      if (auto ids = editors::target_token_ids(model.tokenizer(), text, form); !ids.empty()) all.insert(std::move(ids));
  std::set<Ids> kept;  // in their order, a beginning comes before what goes on from it
  for (const auto& ids : all)
    if (std::ranges::none_of(kept, [&](const Ids& shorter) {
          return shorter.size() < ids.size() && std::equal(shorter.begin(), shorter.end(), ids.begin());
        }))
      kept.insert(ids);
  return kept;
}

// For each row, the probability that it goes on with one of these: [rows] float64. One pass for all that are one token,
// and one more for each longer one's beginning.
at::Tensor probability_of(const models::Model& model, const std::vector<Ids>& rows, const std::set<Ids>& all,
                          const Handles& lent) {
  std::map<Ids, std::vector<int64_t>> by_front;
  for (const auto& ids : all) by_front[{ids.begin(), ids.end() - 1}].push_back(ids.back());
  const auto n = std::ssize(rows);
  at::Tensor total = at::zeros({n}, at::kDouble);
  for (const auto& [front, ends] : by_front) {
    auto extended = rows;
    for (auto& row : extended) row.insert(row.end(), front.begin(), front.end());
    const auto last = std::ssize(front) + 1;
    const at::Tensor log_probs = next_log_probs(model, extended, lent, last).view({n, last, -1});
    at::Tensor sum = at::zeros({n}, at::kDouble);
    for (int64_t k = 0; k + 1 < last; ++k) sum += log_probs.select(1, k).select(1, front[k]).to(at::kDouble);
    const at::Tensor end = log_probs.select(1, last - 1).index_select(1, at::tensor(ends, at::kLong));
    total += (sum.unsqueeze(1) + end).exp().sum(1);
  }
  return total;
}

// The same of prompts and words. Most prompts end alike, so that all of them are asked together.
at::Tensor probability_of(const models::Model& model, const std::vector<ContrastPrompt>& prompts, bool chat,
                          const std::vector<std::string>& words, const Handles& lent) {
  std::map<std::set<Ids>, std::vector<int64_t>> alike;
  const auto texts = prompt_texts(model, prompts, chat);
  for (size_t i = 0; i < texts.size(); ++i)
    alike[beginnings(model, texts[i], words)].push_back(static_cast<int64_t>(i));
  const auto rows = prompt_rows(model, prompts, chat);
  at::Tensor total = at::zeros({std::ssize(rows)}, at::kDouble);
  for (const auto& [all, which] : alike) {
    const auto own = mapped(which, [&](int64_t i) { return rows[static_cast<size_t>(i)]; });
    total.index_copy_(0, at::tensor(which, at::kLong), probability_of(model, own, all, lent));
  }
  return total;
}

std::string filled(std::string text, const std::string& prompt, const std::string& answer) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const bool is_prompt = text.compare(at, 8, "{prompt}") == 0, is_answer = text.compare(at, 8, "{answer}") == 0;
    out += is_prompt ? prompt : is_answer ? answer : std::string(1, text[at]);
    at += is_prompt || is_answer ? 8 : 1;
  }
  return out;
}

double score_by_model(const Scorer& scorer, const Answers& answers) {
  const bool judge = scorer.kind == "judge";
  auto asked = answers.prompts;
  for (size_t i = 0; judge && i < asked.size(); ++i)
    asked[i] = {filled(scorer.ask, answers.prompts[i].prompt, answers.texts[i])};
  const at::Tensor yes = probability_of(*answers.model, asked, answers.chat, scorer.words, answers.lent);
  if (!judge) return 100 * yes.mean().item<double>();
  const at::Tensor no = probability_of(*answers.model, asked, answers.chat, scorer.against, answers.lent);
  return 100 * (yes / (yes + no).clamp_min(1e-30)).mean().item<double>();
}

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// Runs a command with `input` on its standard input and returns what it writes.
std::string output_of(const std::string& where, const std::vector<std::string>& command, const std::string& input) {
  const File in(std::tmpfile(), std::fclose), out(std::tmpfile(), std::fclose);  // no pipes: none of both waits
  const bool ready = in && out && std::fwrite(input.data(), 1, input.size(), in.get()) == input.size();
  if (!ready || std::fflush(in.get()) != 0)
    throw Error(ErrorClass::kIo, {where, "no temporary file", "room for the answers", "make room in /tmp"});
  std::rewind(in.get());
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, ::fileno(in.get()), 0);
  ::posix_spawn_file_actions_adddup2(&files, ::fileno(out.get()), 1);
  pid_t child = 0;
  const int failure = ::posix_spawnp(&child, words[0], &files, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (failure != 0)
    throw Error(failure == ENOMEM ? class_of_errno(failure) : ErrorClass::kNotFound,
                {where, command[0] + ": " + std::generic_category().message(failure), "a command that can be run",
                 "check its path and permissions"});
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0)
    throw Error(ErrorClass::kCorruption,
                {where,
                 command[0] + (WIFSIGNALED(status) ? " ended by signal " + std::to_string(WTERMSIG(status))
                                                   : " with status " + std::to_string(WEXITSTATUS(status))),
                 "status 0", "run it by hand: it reads {\"prompt\", \"answer\"} by lines"});
  std::rewind(out.get());
  std::string text;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, out.get())) > 0;) text.append(buffer, n);
  return text;
}

double score_by_command(const Scorer& scorer, const Answers& answers) {
  std::string input;
  for (size_t i = 0; i < answers.texts.size(); ++i)
    input += json{{"prompt", i < answers.prompts.size() ? answers.prompts[i].prompt : ""}, {"answer", answers.texts[i]}}
                 .dump(-1, ' ', false, json::error_handler_t::replace) +
             "\n";
  const std::string where = "scorer " + scorer.name;
  std::istringstream lines(output_of(where, scorer.words, input));
  size_t count = 0;
  double sum = 0;
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorClass::kCorruption, {where, scorer.words[0] + " wrote " + got,
                                          std::to_string(answers.texts.size()) + " lines with a number each", ""});
  };
  for (std::string line; std::getline(lines, line); ++count) {
    if (line.ends_with('\r')) line.pop_back();
    const auto value = number_in<double>(line);
    if (!value || !std::isfinite(*value)) refuse("\"" + shorten(line) + "\" in line " + std::to_string(count + 1));
    sum += *value;
  }
  if (count != answers.texts.size()) refuse(counted(count, "line"));
  return sum / static_cast<double>(count);
}

}  // namespace

std::optional<double> Scorer::best(bool raise) const {
  if (kind == "any" || kind == "loops") return raise ? 100 : 0;
  return kind == "rate" && !raise ? std::optional(0.0) : std::nullopt;
}

bool Scorer::counts(const std::string& text) const {
  const std::string all = plain(text);
  const size_t end = all.rfind(' ');
  return kind == "any" && end != all.npos && occurrences(spaced(std::string_view(all).substr(0, end)), words) > 0;
}

double Scorer::score(const Answers& answers) const {
  if (answers.texts.empty()) return 0;
  if (kind == "next" || kind == "judge") return score_by_model(*this, answers);
  return kind == "command" ? score_by_command(*this, answers) : score_texts(*this, answers.texts);
}

Scorer scorer_of(const json& object, const std::string& where) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw Error(ErrorClass::kCorruption, {where, got, expected, "docs/directions.md shows one"});
  };
  Scorer scorer;
  if (!object.is_object() || !object.contains("name"))
    refuse("no scorer with a name", "{\"name\": \"…\", \"kind\": \"rate\", \"words\": [\"…\"]}");
  const auto take_text = [&](const char* key, std::string& text) {
    const auto found = object.find(key);
    if (found != object.end() && !found->is_string()) refuse("\"" + std::string(key) + "\" is no text", "a text");
    if (found != object.end()) text = *found;
  };
  take_text("name", scorer.name);
  take_text("kind", scorer.kind);
  const auto kind = kMembers.find(scorer.kind);
  if (kind == kMembers.end()) refuse("kind \"" + scorer.kind + "\"", "one of " + join(kMembers, ", ", key_of));
  const auto& members = kind->second;
  if (scorer.kind == "judge") {
    scorer.words = {"Yes", "yes"};
    scorer.against = {"No", "no"};
    take_text("ask", scorer.ask);
  }
  for (const auto& [key, value] : object.items()) {
    const auto member = std::ranges::find(members, key) - members.begin();
    if (key == "name" || key == "kind" || member == 2) continue;
    if (member == static_cast<ptrdiff_t>(members.size()))
      refuse("\"" + key + "\"", "for " + scorer.kind + ": " + (members.empty() ? "nothing more" : join(members)));
    if (!value.is_array() || !std::ranges::all_of(value, [](const json& item) { return item.is_string(); }))
      refuse("\"" + key + "\" is no list of texts", "[\"…\", …]");
    value.get_to(member == 0 ? scorer.words : scorer.against);
  }
  const bool counted_words = scorer.kind == "rate" || scorer.kind == "any" || scorer.kind == "sentiment";
  for (const auto* list : {&scorer.words, &scorer.against})
    for (const auto& word : *list)
      if (counted_words ? words_in(word).size() < 2 : scorer.kind != "command" && trimmed(word).empty())
        refuse("the word \"" + word + "\", without a letter or digit",
               counted_words ? "words or phrases: marks between them are not compared" : "a word");
  if (!members.empty() && scorer.words.empty()) refuse("no " + members[0], "at least one");
  if (members.size() > 1 && scorer.against.empty()) refuse("no " + members[1], "at least one");
  if (scorer.kind == "judge" && scorer.ask.find("{answer}") == std::string::npos)
    refuse("\"ask\" without {answer}", "a question about {answer}, and {prompt}");
  return scorer;
}

Scorer read_scorer(const std::filesystem::path& path) {
  return scorer_of(read_json(path), path.string());
}

at::Tensor next_log_probs(const models::Model& model, const std::vector<Ids>& rows, const Handles& lent, int64_t last,
                          LayerInputs* inputs) {
  const at::NoGradGuard no_grad;
  const bool writes = inputs && inputs->passes.empty();
  size_t passes = 0;
  const auto logits_of = [&](const models::TokenBatch& batch, models::ForwardOptions pass) {
    if (!writes) {
      if (inputs) {
        pass.first_layer = inputs->first_layer;
        pass.hidden = inputs->passes.at(passes++).at(pass.first_layer);
      }
      return model.forward(batch, pass).needed_logits();
    }
    hooks::HookSession session(model.hooks());
    for (int layer = 0; layer < model.n_layers(); ++layer) session.capture({hooks::Site::kLayerIn, layer});
    session.attach();
    const at::Tensor logits = model.forward(batch, pass).needed_logits();
    auto& here = inputs->passes.emplace_back();
    for (int layer = 0; layer < model.n_layers(); ++layer)
      here.push_back(session.captured({hooks::Site::kLayerIn, layer}));
    session.finish();
    return logits;
  };
  const int64_t shared = models::shared_beginning(model.config(), rows, last);
  models::KvCache beginning(model.n_layers());
  std::vector<Ids> ends = rows;
  if (shared > 0) {
    const auto first = rows[0].begin();
    models::ForwardOptions pass;
    pass.cache = &beginning;
    pass.logit_tokens.emplace();
    (void)logits_of(models::TokenBatch::from_rows({Ids(first, first + shared)}), pass);
    for (auto& row : ends) row.erase(row.begin(), row.begin() + shared);
  }
  std::vector<at::Tensor> parts;
  const auto read = [&](const models::TokenBatch& batch) {
    models::ForwardOptions pass;
    models::KvCache cache = beginning.select_rows(std::vector<int64_t>(shared > 0 ? batch.rows() : 0, 0));
    if (shared > 0) pass.cache = &cache;
    pass.logit_tokens.emplace();
    for (int64_t r = 0; r < batch.rows(); ++r)
      for (int64_t k = -last; k < 0; ++k) pass.logit_tokens->push_back(batch.token(r, k));
    const at::Tensor logits = logits_of(batch, pass);
    parts.push_back(devices::to_host(at::log_softmax(logits.to(at::kFloat), -1), devices::Purpose::kLogits));
  };
  in_batches(ends, "next tokens", {.cancel = lent.cancel}, read, shared);
  return at::cat(parts);
}

}  // namespace emend::workflow
