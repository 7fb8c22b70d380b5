#include "jobs.h"

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/hparams/preset.h>
#include <emend/workflow/run.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "engine.h"

namespace emend::tools::serve {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

constexpr ptrdiff_t kWaiting = 16;
constexpr size_t kKept = 64, kManyEvents = 2000, kEvents = 20000;

bool is_over(const std::string& status) {
  return status == "done" || status == "failed" || status == "cancelled";
}

// "v_lr=0.5": numbers, words and lists, but nothing that could name a file.
std::vector<std::string> settings_of(const json& request) {
  std::vector<std::string> settings;
  const json given = request.value("settings", json::object());
  for (const auto& [key, value] : given.items()) {
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (text.find_first_of("/\\~") != std::string::npos)
      refuse("settings: " + key + ": a path; expected a number, a word or a list");
    settings.push_back(key + "=" + text);
  }
  return settings;
}

std::string random_id() {
  std::random_device random;
  return formatted("edit-%08x%08x", random(), random());
}

// Where a phase lies in the whole, for one figure of progress.
std::pair<double, double> share_of(const std::string& phase) {
  if (phase == "statistics") return {0.02, 0.4};
  if (phase == "targets" || phase == "train" || phase == "tune" || phase == "edit") return {0.4, 0.8};
  if (phase == "insert") return {0.8, 0.85};
  return {0, 0};
}

}  // namespace

struct Jobs::Job {
  std::string id, status = "queued", name, error, notice;
  datasets::FactSet facts;
  workflow::RunOptions options;
  bool activate = true;
  double progress = 0;
  std::chrono::steady_clock::time_point progress_told = {};  ///< of the thread alone
  ordered_json results;
  std::vector<ordered_json> events;
  CancelToken cancel;
  PackSet packs;                                                 ///< of other work
  std::function<void(models::Model&, const CancelToken&)> work;  ///< instead of an edit
  std::exception_ptr failure;
};

Jobs::Jobs(std::function<models::Model()> load, Prepare prepare, PackFolder& packs, fs::path work,
           workflow::RunOptions defaults, workflow::Handles lent)
    : load_(std::move(load)),
      prepare_(std::move(prepare)),
      packs_(packs),
      work_(std::move(work)),
      defaults_(std::move(defaults)),
      lent_(std::move(lent)) {
  fs::create_directories(work_);
  for (const auto& entry : fs::directory_iterator(work_))
    if (const auto name = entry.path().filename().string(); name.starts_with("edit-") || name.starts_with("download-"))
      fs::remove_all(entry.path());
  thread_ = std::thread([this] { loop(); });
}

void Jobs::stop() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  for (const auto& job : jobs_) job->cancel.request();
  for (const auto& job : queue_) job->cancel.request();
  if (running_) running_->cancel.request();
  changed_.notify_all();
}

Jobs::~Jobs() {
  stop();
  thread_.join();
}

ordered_json Jobs::add(const json& request) {
  auto job = std::make_shared<Job>();
  job->id = random_id();
  job->options = defaults_;
  auto& options = job->options;
  options.editor = request.value("editor", defaults_.editor);
  if (const std::string preset = request.value("hparams", ""); !preset.empty()) {
    const auto& presets = hparams::all_presets();  // never a file that has such a name
    if (std::ranges::find(presets, preset, &hparams::Preset::name) == presets.end() || fs::is_regular_file(preset))
      refuse("hparams: expected the name of a preset");
    options.hparams = preset;
  } else if (!options.editor.empty() && !hparams::same_editor(options.editor, defaults_.editor)) {
    options.hparams.clear();
  }
  for (auto& setting : settings_of(request)) options.set.push_back(std::move(setting));
  options.seed = request.value("seed", defaults_.seed);
  options.metrics.names = request.value("eval", defaults_.metrics.names);
  job->activate = request.value("active", true);
  job->facts = datasets::parse_fact_rows(request["facts"], "facts", {.format = request.value("format", "auto")});
  prepare_(options, job->facts);
  job->name = request.value("name", "");
  const std::lock_guard lock(mutex_);
  const auto taken = [&] {
    const auto waits = [&](const JobPtr& other) { return !is_over(other->status) && other->name == job->name; };
    return packs_.taken(job->name) || std::ranges::any_of(jobs_, waits);
  };
  if (job->name.empty()) {
    do job->name = "edit-" + std::to_string(++number_);
    while (taken());
  }
  require_pack_name(job->name);
  if (taken()) throw HttpError(409, "there is a pack or a file of this name", "pack_exists");
  enqueue(job);
  forget_old();
  jobs_.push_back(job);
  return describe(*job);
}

// With the mutex held.
void Jobs::enqueue(const JobPtr& job) {
  if (stop_) throw HttpError(503, "the server is being stopped");
  // Other work is short: it goes before the edits.
  const auto first_edit = std::ranges::find_if(queue_, [](const JobPtr& other) { return !other->work; });
  const auto same = job->work ? first_edit - queue_.begin() : queue_.end() - first_edit;
  if (same >= kWaiting)
    throw HttpError(429, std::to_string(kWaiting) + (job->work ? " requests" : " edits") + " wait; ask again later");
  queue_.insert(job->work ? first_edit : queue_.end(), job);
  changed_.notify_all();
}

void Jobs::forget_old() {
  while (jobs_.size() >= kKept) {
    const auto oldest = std::ranges::find_if(jobs_, [](const JobPtr& job) { return is_over(job->status); });
    if (oldest == jobs_.end()) return;
    std::error_code ignored;
    fs::remove_all(work_ / (*oldest)->id, ignored);
    jobs_.erase(oldest);
  }
}

Jobs::JobPtr Jobs::find(const std::string& id) const {
  const auto found = std::ranges::find_if(jobs_, [&](const JobPtr& job) { return job->id == id; });
  if (found == jobs_.end())
    throw HttpError(404,
                    "there is no such edit; the last " + std::to_string(kKept) +
                        " are remembered, and their packs stay beyond that",
                    "edit_not_found");
  return *found;
}

ordered_json Jobs::describe(const Job& job) const {
  ordered_json document = {{"id", job.id},
                           {"object", "edit"},
                           {"status", job.status},
                           {"progress", job.progress},
                           {"pack", job.name},
                           {"editor", job.options.editor},
                           {"facts", job.facts.facts.size()}};
  for (const char* part : {"metrics", "edits", "seconds"})
    document[part] = job.results.is_object() ? job.results.value(part, ordered_json()) : ordered_json();
  if (!job.error.empty()) document["error"] = job.error;
  if (!job.notice.empty()) document["notice"] = job.notice;
  return document;
}

ordered_json Jobs::list() const {
  const std::lock_guard lock(mutex_);
  auto data = ordered_json::array();
  for (const auto& job : jobs_) data.push_back(describe(*job));
  return {{"object", "list"}, {"data", data}};
}

ordered_json Jobs::describe(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  return describe(*find(id));
}

ordered_json Jobs::cancel(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto job = find(id);
  job->cancel.request();
  if (const auto place = std::ranges::find(queue_, job); place != queue_.end()) {
    queue_.erase(place);
    job->status = "cancelled";
    changed_.notify_all();
  }
  return describe(*job);
}

std::function<void(const Write&)> Jobs::events(const std::string& id) const {
  std::unique_lock lock(mutex_);
  return [this, job = find(id)](const Write& write) {
    std::unique_lock lock(mutex_);
    for (size_t next = 0;;) {
      const bool more = changed_.wait_for(lock, std::chrono::seconds(5),
                                          [&] { return next < job->events.size() || is_over(job->status) || stop_; });
      std::string text = more ? "" : ": still there\n\n";
      for (; next < job->events.size(); ++next) text += event_line(job->events[next]);
      const bool over = is_over(job->status) || stop_;
      if (over) text += event_line({{"event", "end"}, {"job", describe(*job)}});
      lock.unlock();
      if (!write(text) || over) return;
      lock.lock();
    }
  };
}

std::string Jobs::report(const std::string& id) const {
  fs::path path;
  {
    const std::lock_guard lock(mutex_);
    path = work_ / find(id)->id / "report.html";
  }
  if (!fs::exists(path)) throw HttpError(404, "this edit has no report", "no_report");
  return read_file(path);
}

void Jobs::with(const PackSet& packs, const std::function<void(models::Model&, const CancelToken&)>& work) {
  auto job = std::make_shared<Job>();
  job->work = work;
  job->packs = packs;
  std::unique_lock lock(mutex_);
  enqueue(job);
  changed_.wait(lock, [&] { return is_over(job->status); });
  if (job->failure) std::rethrow_exception(job->failure);
}

void Jobs::loop() {
  for (;;) {
    JobPtr job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      job = running_ = queue_.front();
      queue_.pop_front();
      job->status = "running";
    }
    std::string status = "done", error;
    try {
      run(*job);
    } catch (...) {
      job->failure = told();
    }
    if (job->failure) try {
        std::rethrow_exception(job->failure);
      } catch (const Error& failure) {
        status = failure.error_class() == ErrorClass::kCancelled ? "cancelled" : "failed";
        error = status == "failed" ? failure.what() : "";
      } catch (const std::exception& failure) {
        status = "failed";
        error = failure.what();
      }
    const std::lock_guard lock(mutex_);
    running_.reset();
    job->status = status;
    job->error = error;
    if (status == "done") job->progress = 1;
    changed_.notify_all();
  }
}

void Jobs::run(Job& job) {
  job.cancel.check("edit");
  if (!model_) model_.emplace(load_());
  if (!job.work) return edit(job);
  const workflow::Packs beside(*model_);  // what the model's own folder holds beside the weights
  const InForce scope(*model_, job.packs);
  job.work(*model_, job.cancel);
}

void Jobs::edit(Job& job) {
  const fs::path folder = work_ / job.id;
  job.options.out = folder.string();
  workflow::Handles lent = lent_;
  lent.cancel = job.cancel;
  lent.log = Log({workflow::make_sink([&](const LogEvent& event) {
    if (event.text.empty() || (event.level == LogLevel::kDebug && event.name != "targets.fact")) return;
    tell(job, {{"event", event.name},
               {"level", event.level == LogLevel::kWarning ? "warning" : "info"},
               {"text", event.text},
               {"fields", event.fields}});
  })});
  lent.progress = [&](const ProgressUpdate& update) {
    job.cancel.check(update.phase.c_str());
    progress(job, update);
  };
  try {
    workflow::Run run(*model_, job.facts, job.options, lent);
    run.execute();
    const bool some = run.session().failed() < std::ssize(job.facts.facts);  // known until they are undone
    run.session().undo();
    {
      const std::lock_guard lock(mutex_);
      job.results = run.results();
      job.options.editor = run.record().editor;
    }
    job.cancel.check("edit");
    const fs::path pack = folder / "edit.safetensors";
    if (!some || !fs::exists(pack))
      throw Error(ErrorClass::kNumeric,
                  {"edit", "none of the facts could be written", "at least one", "see its events"});
    packs_.add(job.name, pack);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
    throw;
  }
  if (!job.activate) return;
  try {
    packs_.change(job.name, {.active = true});
  } catch (const HttpError& conflict) {
    const std::lock_guard lock(mutex_);
    job.notice = std::string("kept, but not put in force: ") + conflict.what();
  }
}

void Jobs::tell(Job& job, ordered_json event) const {
  const std::lock_guard lock(mutex_);
  if (job.events.size() >= kEvents && event.value("level", "") != "warning") return;
  job.events.push_back(std::move(event));
  changed_.notify_all();
}

void Jobs::progress(Job& job, const ProgressUpdate& update) const {
  const double part = update.total > 0 ? std::min(1.0, update.done / update.total) : 0;
  auto [begin, end] = share_of(update.phase);
  {
    const std::lock_guard lock(mutex_);
    if (update.phase.starts_with("evaluate") && job.progress >= 0.8) begin = 0.85, end = 1;
    if (end > 0) job.progress = std::max(job.progress, std::min(0.99, begin + part * (end - begin)));
  }
  // Those of a long edit come every half second at most, that all can be kept.
  const auto now = std::chrono::steady_clock::now();
  if (part < 1 && job.events.size() >= kManyEvents && now - job.progress_told < std::chrono::milliseconds(500)) return;
  job.progress_told = now;
  tell(job, {{"event", "progress"},
             {"phase", update.phase},
             {"done", update.done},
             {"total", update.total},
             {"text", update.detail},
             {"progress", job.progress}});
}

}  // namespace emend::tools::serve
