#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/splitmix64.h>
#include <emend/core/text.h>
#include <emend/evaluation/health.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <emend/workflow/direct/optimise.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <sstream>

namespace emend::workflow {
namespace {

using nlohmann::json;

constexpr double kAnswered = 4;       // a trial that loses more than so many times max_kl is not answered
constexpr double kMoreLoops = 10;     // percent of the answers that may go round beyond those before
constexpr double kShortest = 0.5;     // of the words before; shorter answers break off
constexpr double kLeastShare = 0.03;  // of the largest strength
constexpr size_t kNeutralTexts = 12;  // that are read at once
constexpr size_t kDrafts = 12;        // of an answer
constexpr int64_t kTrust = 60;        // tokens: most trials change little

// A number from [0, 1) that depends on all of these alone.
double chance(uint64_t seed, int trial, int which) {
  const uint64_t x =
      seed * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(trial) * 1000003ULL + static_cast<uint64_t>(which);
  return static_cast<double>(splitmix64(splitmix64(x)) >> 11) * 0x1.0p-53;
}

// What is searched: change, sign, strength, layer, reach, edge, attention, each in [0, 1).
using Point = std::array<double, 7>;

Point first_point(uint64_t seed, int trial) {  // evenly spread over the cube (Roberts' sequence)
  Point point;
  double root = 2;
  for (int i = 0; i < 50; ++i) root = std::pow(1 + root, 1.0 / 8);
  for (size_t k = 0; k < point.size(); ++k) {
    const double x = chance(seed, 0, static_cast<int>(k)) + trial * std::pow(1 / root, static_cast<double>(k + 1));
    point[k] = x - std::floor(x);
  }
  return point;
}

Point near_to(const Point& parent, uint64_t seed, int trial, double width) {
  Point point = parent;
  for (size_t k = 0; k < point.size(); ++k) {
    const int draw = 10 * static_cast<int>(k + 1);
    if (k < 2) {  // one of several: another now and then
      if (chance(seed, trial, draw) < 0.1) point[k] = chance(seed, trial, draw + 1);
      continue;
    }
    double step = -1.5;
    for (int i = 0; i < 3; ++i) step += chance(seed, trial, draw + i);
    point[k] = std::clamp(point[k] + width * step, 0.0, 0.999999);
  }
  return point;
}

DirectTrial trial_at(const Point& point, int number, std::span<const DirectChange> changes, double most) {
  DirectTrial trial{.number = number, .change = static_cast<int>(point[0] * static_cast<double>(changes.size()))};
  const auto& change = changes[trial.change];
  int first = change.figures.front().layer, last = first;
  for (const auto& figures : change.figures) {
    first = std::min(first, figures.layer);
    last = std::max(last, figures.layer);
  }
  const double span = last - first, sign = change.pack.editor == "ablate" || point[1] >= 0.5 ? 1 : -1;
  trial.strength = sign * most * std::pow(kLeastShare, 1 - point[2]);
  trial.layer = first + point[3] * span;
  trial.reach = 1 + 0.6 * point[4] * span;
  trial.edge = point[5];
  trial.attention = point[6];
  return trial;
}

// Some of the neutral texts, and what the unchanged model expects after them.
struct NeutralTexts {
  std::vector<std::vector<int64_t>> rows;
  LayerInputs inputs = {};
  at::Tensor before = {};  // [rows,V] log-probabilities
};

struct Searching {
  models::Model& model;
  std::span<const DirectChange> changes;
  const OptimiseOptions& options;
  const Handles& lent;
  std::vector<std::vector<int64_t>> asked = {};
  // Of the answers: that of the unchanged model up to its first word that counts, the same whole, and those of trials.
  std::vector<models::Drafts> drafts = {};
  bool counts = false;                             // a word counts at once, and against the trial
  std::vector<std::pair<bool, int>> holding = {};  // by prompt: whether the answer before holds a word, and how many do
  std::vector<Point> points = {};
  std::vector<NeutralTexts> neutral = {};
  double words_before = 0, loops_before = 0;
  Optimum found = {};

  [[nodiscard]] bool better(double a, double b) const { return options.raise ? a > b : a < b; }
};

using Ids = std::vector<int64_t>;

std::vector<std::string> texts_of(const Searching& search, const std::vector<Ids>& answers) {
  return mapped(answers, [&](const Ids& ids) { return search.model.tokenizer().decode(ids, true); });
}

double words_of(const std::vector<std::string>& texts) {
  return Scorer{"", "length"}.score({texts});
}
double loops_of(const std::vector<std::string>& texts) {
  return Scorer{"", "loops"}.score({texts});
}

double score_of(const Searching& search, const std::vector<std::string>& texts) {
  const auto& o = search.options;
  return o.scorer.score({texts, o.prompts, &search.model, o.chat, {.cancel = search.lent.cancel}});
}

// Whether a trial with so much lost and this score, or a worse one, has no place on the front: another one, or the
// model as it is, is as good and loses no more.
bool beaten(const Searching& search, double kl, double score) {
  const auto none_better = [&](double other) { return !search.better(score, other); };
  return none_better(search.found.score_before) ||
         std::ranges::any_of(search.found.trials, [&](const DirectTrial& other) {
           return other.score && *other.kl <= kl && none_better(*other.score);
         });
}

// An answer up to where it is known to hold a word.
Ids up_to_word(const Searching& search, const Ids& ids) {
  Ids beginning;
  for (const int64_t id : ids) {
    if (search.counts && search.options.scorer.counts(search.model.tokenizer().decode(beginning, true))) break;
    beginning.push_back(id);
  }
  return beginning;
}

// What a trial answers, as far as it has to be known.
class Answering {
 public:
  explicit Answering(Searching& search)
      : search_(search), batch_(search.model), written_(search.asked.size()), holds_(search.asked.size()) {
    how_.max_new_tokens = search.options.max_new_tokens;
    how_.stop_ids = search.model.tokenizer().eos_ids();
    how_.cancel = search.lent.cancel;
    how_.on_token = [this](int64_t row, int64_t id) { written_[row].push_back(id); };
    if (search.counts) how_.ends = [this](int64_t row, int64_t) { return look_at(static_cast<size_t>(row)); };
    look();
  }

  // One pass over the prompts whose answers held a word before the change.
  void begin() {
    if (search_.counts) ask([&](size_t i) { return search_.holding[i].first; });
  }
  // How much the trial loses; until then it may be nothing.
  void lose(double kl) {
    kl_ = kl;
    look();
  }
  [[nodiscard]] bool over() const { return over_; }
  // None as soon as it is known that the trial is beaten.
  std::optional<std::vector<Ids>> finish() {
    if (trust() > kTrust / 4) {  // likely to hold it again
      write();
      ask([&](size_t i) { return search_.holding[i].second > 0; });
      write();
    }
    ask([](size_t) { return true; });
    write();
    return over_ ? std::nullopt : std::optional(written_);
  }
  // Trials answer alike, so what this one wrote are drafts of the next.
  ~Answering() {
    for (size_t i = 0; i < written_.size(); ++i) {
      auto& drafts = search_.drafts[i];
      if (written_[i].empty() || std::ranges::find(drafts, written_[i]) != drafts.end()) continue;
      drafts.insert(drafts.begin() + 2, std::move(written_[i]));
      if (drafts.size() > kDrafts) drafts.pop_back();
    }
  }
  Answering(const Answering&) = delete;
  Answering& operator=(const Answering&) = delete;

 private:
  void write() {
    while (!over_ && batch_.active() > 0) batch_.step();
  }
  // Tokens that were as before, for each answer that departed from it.
  [[nodiscard]] int64_t trust() const {
    int64_t same = kTrust, departed = 1;
    for (const size_t i : asked_) {
      const Ids &now = written_[i], &before = search_.drafts[i][1];
      const auto n = std::mismatch(now.begin(), now.end(), before.begin(), before.end()).first - now.begin();
      same += n;
      departed += n < std::ssize(now);
    }
    return same / departed;
  }
  void ask(const std::function<bool(size_t)>& which) {
    how_.trust = trust();
    const auto how = std::make_shared<const models::GenerateOptions>(how_);
    std::vector<models::BatchRow> rows;
    for (size_t i = 0; i < written_.size() && !over_; ++i)
      if (!asked_.contains(i) && which(i)) {
        asked_.insert(i);
        rows.push_back({search_.asked[i], how, static_cast<int64_t>(i), 0, search_.drafts[i]});
      }
    batch_.add(std::move(rows));
  }
  bool look_at(size_t i) {
    if (!holds_[i] && search_.options.scorer.counts(search_.model.tokenizer().decode(written_[i], true))) {
      holds_[i] = true;
      ++search_.holding[i].second;
      look();
    }
    return over_;
  }
  void look() {
    const auto& o = search_.options;
    const auto held = static_cast<double>(std::ranges::count(holds_, true));
    const auto best = search_.counts ? 100 * held / static_cast<double>(holds_.size()) : o.scorer.best(o.raise);
    over_ = over_ || (best && beaten(search_, kl_, *best));
  }

  Searching& search_;
  models::RunningBatch batch_;
  models::GenerateOptions how_ = {};
  std::vector<Ids> written_;
  std::vector<bool> holds_;  // a word
  std::set<size_t> asked_;
  double kl_ = 0;
  bool over_ = false;
};

// Of neutral texts, from the first layer that the trial changes on. Texts cannot make up for each other, so what some
// of them lose is the least that all do: `enough` is asked of it after every part, and ends the reading.
double divergence_of(Searching& search, const DirectTrial& trial, const std::function<bool(double)>& enough) {
  int first = search.model.n_layers() - 1;
  for (const auto& weight : search.changes[trial.change].figures)
    if (trial.at(weight) != 0) first = std::min(first, weight.layer);
  size_t texts = 0;
  for (const auto& part : search.neutral) texts += part.rows.size();
  double lost = 0;
  for (auto& part : search.neutral) {
    part.inputs.first_layer = first;
    const at::Tensor after = next_log_probs(search.model, part.rows, search.lent, 1, &part.inputs);
    const double here = evaluation::mean_divergence(part.before, after);
    lost += (std::isfinite(here) ? here : 1e9) * static_cast<double>(part.rows.size()) / static_cast<double>(texts);
    if (enough(lost)) break;
  }
  return lost;
}

void measure(Searching& search, DirectTrial& trial) {
  std::optional<std::vector<Ids>> answers;
  std::vector<std::string> texts;
  {
    const auto at = [&](const DirectFigures& weight) { return trial.at(weight); };
    const TrialChange acting(search.model, scaled(search.changes[trial.change], at));
    Answering answering(search);
    answering.begin();
    if (answering.over()) return;
    const double most = kAnswered * search.options.max_kl;
    const double kl = divergence_of(search, trial, [&](double lost) {
      answering.lose(lost);
      return answering.over() || lost > most;
    });
    if (answering.over()) return;
    trial.kl = kl;
    if (kl > most) return;
    answers = answering.finish();
    if (!answers) return;
    texts = texts_of(search, *answers);
    if (search.options.scorer.reads_model()) trial.score = score_of(search, texts);
  }
  const bool whole = search.options.scorer.kind == "length" || words_of(texts) >= kShortest * search.words_before;
  if (!whole || loops_of(texts) > search.loops_before + kMoreLoops)
    trial.score.reset();
  else if (!trial.score)
    trial.score = score_of(search, texts);
}

// The trials that no other beats in both, from little lost to much.
std::vector<int> front_of(const Searching& search) {
  std::vector<int> order, front;
  const auto& trials = search.found.trials;
  for (const auto& trial : trials)
    if (trial.score) order.push_back(trial.number);
  const auto one = [&](int number) -> const DirectTrial& { return trials[number]; };
  std::ranges::stable_sort(order, [&](int a, int b) {
    return *one(a).kl != *one(b).kl ? *one(a).kl < *one(b).kl : search.better(*one(a).score, *one(b).score);
  });
  for (const int number : order)
    if (search.better(*one(number).score, front.empty() ? search.found.score_before : *one(front.back()).score))
      front.push_back(number);
  return front;
}

// A third of the trials spread evenly, the others near those of the front, nearer and nearer.
Point next_point(const Searching& search, int number) {
  const auto& options = search.options;
  const int spread = std::max(1, options.trials / 3);
  const auto front = front_of(search);
  if (number < spread || front.empty() || chance(options.seed, number, 1) < 0.1)
    return first_point(options.seed, number);
  const auto which = static_cast<size_t>(chance(options.seed, number, 2) * static_cast<double>(front.size()));
  const double left = static_cast<double>(options.trials - number) / options.trials;
  return near_to(search.points[front[which]], options.seed, number, 0.1 + 0.3 * left);
}

json settings_of(const Searching& search) {
  const auto& o = search.options;
  json settings = {{"model", search.model.fingerprint()},
                   {"about", o.about},
                   {"scorer", o.scorer.to_json()},
                   {"raise", o.raise},
                   {"tokens", o.max_new_tokens},
                   {"chat", o.chat},
                   {"trials", o.trials},
                   {"seed", o.seed},
                   {"most", o.most},
                   {"max_kl", o.max_kl},
                   {"dtype", c10::toString(search.model.dtype())},
                   {"prompts", json::array()},
                   {"neutral", json::array()}};
  for (const auto& [name, prompts] : {std::pair("prompts", &o.prompts), {"neutral", &o.neutral}})
    for (const auto& prompt : *prompts) settings[name].push_back({prompt.system, prompt.prompt, prompt.reply});
  return settings;
}

// The finished trials of an interrupted search.
std::vector<DirectTrial> read_journal(const Searching& search, const json& settings) {
  std::vector<DirectTrial> trials;
  const auto& path = search.options.journal;
  if (path.empty() || !std::filesystem::exists(path)) return trials;
  std::istringstream lines(read_file(path));
  std::string line;
  if (!std::getline(lines, line) || parse_json(line, path.string()) != settings)
    refuse({path.string(), "a search with other settings or another model", "the one that is to go on",
            "take the same settings, or another folder"});
  while (std::getline(lines, line)) {
    const json one = parse_json(line, path.string() + ", line " + std::to_string(trials.size() + 2));
    try {
      DirectTrial trial{.number = one.at("trial")};
      if (!one.at("kl").is_null()) trial.kl = one.at("kl").get<double>();
      if (!one.at("score").is_null()) trial.score = one.at("score").get<double>();
      trials.push_back(trial);
    } catch (const json::exception& error) {
      throw Error(ErrorClass::kCorruption,
                  {path.string() + ", line " + std::to_string(trials.size() + 2),
                   std::string("no trial (") + reason_of(error) + ")", "a line that the search wrote", "begin anew"});
    }
  }
  return trials;
}

std::vector<NeutralTexts> read_neutral(const Searching& search) {
  const auto& options = search.options;
  auto rows = prompt_rows(search.model, options.neutral, options.chat);
  if (rows.empty()) {
    rows = own_writing(search.model, options.seed + 1, search.lent, 32);
    for (size_t i = 0; i < rows.size(); ++i) rows[i].resize(std::min<size_t>(rows[i].size(), 6 + i % 25));
  }
  std::vector<NeutralTexts> parts;
  for (size_t at = 0; at < rows.size(); at += kNeutralTexts)
    parts.push_back({{rows.begin() + at, rows.begin() + std::min(rows.size(), at + kNeutralTexts)}});
  for (auto& part : parts) part.before = next_log_probs(search.model, part.rows, search.lent, 1, &part.inputs);
  return parts;
}

void require_search(std::span<const DirectChange> changes, const OptimiseOptions& options) {
  if (changes.empty()) refuse({"optimise", "no change", "at least one", ""});
  if (options.prompts.empty()) refuse({"optimise", "no prompts", "some that the scorer's answers are asked with", ""});
  if (options.trials < 1) refuse({setting("trials"), std::to_string(options.trials), "1 or more", ""});
  if (!(options.most > 0))
    refuse({setting("strength"), short_number(options.most), "above 0, the largest that is tried",
            "bake is tried in both directions"});
}

}  // namespace

bool search_has_ended(const std::filesystem::path& journal) {
  std::istringstream lines(read_file(journal));
  std::string line;
  std::optional<JsonFault> unreadable;
  std::getline(lines, line);
  const json settings = parse_json(line, {}, unreadable);
  int64_t done = 0;
  while (std::getline(lines, line)) ++done;
  const auto trials = settings.is_object() ? settings.value("trials", json()) : json();
  return trials.is_number_integer() && done >= trials.get<int64_t>();
}

double DirectTrial::at(const DirectFigures& weight) const {
  const double away = std::abs(weight.layer - layer) / reach;
  if (away > 1) return 0;
  return strength * (1 - (1 - edge) * away) * (weight.part == models::Part::kAttnOut ? attention : 1);
}

json DirectTrial::to_json() const {
  return {{"trial", number},
          {"change", change},
          {"strength", strength},
          {"layer", layer},
          {"reach", reach},
          {"edge", edge},
          {"attention", attention},
          {"kl", kl ? json(*kl) : json()},
          {"score", score ? json(*score) : json()}};
}

Optimum optimise_strengths(models::Model& model, std::span<const DirectChange> changes, const OptimiseOptions& options,
                           const Handles& lent) {
  require_search(changes, options);
  Searching search{model, changes, options, lent};
  const json settings = settings_of(search);
  const auto earlier = read_journal(search, settings);
  search.asked = prompt_rows(model, options.prompts, options.chat);
  auto answers = options.answered;
  if (answers.empty()) answers = answered(model, options.prompts, options.chat, lent, options.max_new_tokens);
  for (size_t i = 0; i < answers.size(); ++i)
    answers[i].erase(answers[i].begin(), answers[i].begin() + search.asked[i].size());
  search.counts = options.scorer.kind == "any" && !options.raise;
  for (const auto& ids : answers) {
    const Ids beginning = up_to_word(search, ids);
    search.holding.emplace_back(beginning.size() < ids.size(), 0);
    search.drafts.push_back({beginning, ids});
  }
  const auto before = texts_of(search, answers);
  search.words_before = words_of(before);
  search.loops_before = loops_of(before);
  search.found.score_before = score_of(search, before);
  search.found.at_best = options.scorer.best(options.raise) == search.found.score_before;
  if (search.found.at_best) return search.found;
  search.neutral = read_neutral(search);
  if (options.journal.has_parent_path()) std::filesystem::create_directories(options.journal.parent_path());
  std::string journal = settings.dump() + "\n";
  for (int number = 0; number < options.trials; ++number) {
    lent.cancel.check("optimise");
    search.points.push_back(next_point(search, number));
    auto trial = trial_at(search.points.back(), number, changes, options.most);
    if (static_cast<size_t>(number) < earlier.size()) {
      trial.kl = earlier[number].kl;
      trial.score = earlier[number].score;
    } else {
      measure(search, trial);
    }
    journal += trial.to_json().dump() + "\n";
    if (!options.journal.empty() && static_cast<size_t>(number) >= earlier.size()) write_file(options.journal, journal);
    search.found.trials.push_back(trial);
    if (lent.progress) lent.progress({"trials", number + 1.0, static_cast<double>(options.trials), ""});
  }
  search.found.front = front_of(search);
  for (const int number : search.found.front)
    if (search.found.trials[number].kl <= options.max_kl) search.found.chosen = number;
  return search.found;
}

}  // namespace emend::workflow
