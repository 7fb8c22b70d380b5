#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/setting.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/locate.h>
#include <emend/evaluation/health.h>
#include <emend/evaluation/report.h>
#include <emend/models/family.h>
#include <emend/models/spare_neurons.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/lifelong.h>
#include <emend/workflow/packs.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/run.h>
#include <emend/workflow/save_formats.h>

#include <chrono>

namespace emend::workflow {
namespace {

using editors::PhaseTimer;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Run::Run(RunOptions options, Handles& lent)
    : options_(std::move(options)), lent_(lent), schedule_(parse_eval_at(options_.eval_at)) {
  open();
}

Run::Run(models::Model& model, datasets::FactSet facts, RunOptions options, Handles lent)
    : options_(std::move(options)),
      own_(std::move(lent)),
      lent_(own_),
      schedule_(parse_eval_at(options_.eval_at)),
      facts_(std::move(facts)),
      model_(&model) {
  open();
}

Run::~Run() {
  if (!complete_ && !own_model_ && session_) session_->undo();
}

void Run::open() {
  began_ = now();
  for (const auto& info : devices::visible_devices()) devices::reset_peak_memory(info.device);
  record_.started = utc_text(std::time(nullptr));
  const PhaseTimer timer(record_.seconds, "load");
  const bool load = model_ == nullptr;
  require_valid(options_);
  least_said_ = options_.strict ? 100 : parse_percent(options_.min_said, "min_said");
  record_.command_line = lent_.command_line;
  if (load) facts_ = load_named_facts(options_.facts, lent_);
  if (facts_.facts.empty()) refuse({"Run", "no facts", "at least one", "load_facts and FactSet make them"});
  facts_.fingerprint = datasets::fingerprint_of(facts_);
  record_.metrics = metric_names(options_.metrics, facts_, options_.single());
  refuse_contradictions(facts_, options_);
  std::shared_ptr<const models::Checkpoint> opened;
  if (load) opened = models::open_checkpoint(options_.model.model);
  const auto& checkpoint = load ? *opened : model_->checkpoint();
  record_.editor = options_.editor = chosen_editor(options_, &checkpoint).name;
  check_outputs(options_, record_.metrics);
  options_.templates = named_contexts(options_);
  require_same(lent_.sharing, choices());
  check_hparams(options_, checkpoint);
  record_.model_path = checkpoint.path().string();
  warn_of_edits_beside(checkpoint, "edit.beside", lent_.log);
  // The run folder comes before the slow part, so that a folder that cannot be used is known at once.
  if (options_.dry_run && !options_.out.empty())
    RunDirectory::check(options_.out, options_.resume ? Earlier::kInterrupted : Earlier::kNone);
  if (!options_.dry_run)
    record_.out = lent_.sharing.by_first([&] {
      open_folder(checkpoint);
      return folder_->path().string();
    });
  if (load) {
    opened = with_room(std::move(opened));
    require_room(options_, *opened, facts_, lent_);
    model_ = &own_model_.emplace(models::load_placed(opened, place_options(options_.model, lent_.log)));
  } else {
    if (options_.spare_neurons > 0)
      refuse({setting("spare_neurons"), std::to_string(options_.spare_neurons) + ", of a model that is loaded", "0",
              "load it with models::with_spare_neurons"});
    options_.model.dtype = dtype_name(model_->dtype());
  }
  for (const auto& format : save_formats())
    if (options_.saves(format.name) && format.check) format.check(*model_, setting("save"));
  session_ = std::make_unique<Session>(*model_, options_, lent_);
  for (const auto& format : save_formats()) {
    if (!options_.saves(format.name)) continue;
    check_adapter(format, *model_, options_.editor, session_->editor().hparams());
    session_->require_alone(format);
  }
  facts_ = check_request(std::move(facts_), *model_, options_, lent_, record_.findings);
  record_.hparams = session_->editor().hparams();
  record_.compute_dtype = session_->compute_dtype();
  require_same(lent_.sharing, settings());
  if (!options_.dry_run)
    checkpoint_.emplace(std::filesystem::path(record_.out) / "checkpoint", settings(), options_.resume, !folder_)
        .keep_command(record_.command_line);
}

std::shared_ptr<const models::Checkpoint> Run::with_room(std::shared_ptr<const models::Checkpoint> checkpoint) {
  const int64_t spare = record_.spare_neurons = room_to_add(options_, *checkpoint, facts_.facts);
  if (spare > 0)
    lent_.log.info("edit.room", std::to_string(spare) +
                                    " neurons of zeros more in every MLP, for the edit to take; the "
                                    "model computes what it did");
  return models::with_spare_neurons(std::move(checkpoint), spare);
}

// Of several processes the first one has the folder and writes.
void Run::open_folder(const models::Checkpoint& checkpoint) {
  const std::filesystem::path folder = options_.out.empty()
                                           ? RunDirectory::default_name(record_.editor, short_model_name(checkpoint))
                                           : std::filesystem::path(options_.out);
  models::require_apart(folder, checkpoint.path());
  folder_.emplace(folder, options_.resume ? Earlier::kInterrupted : Earlier::kNone);
  if (options_.resume && !std::filesystem::exists(folder / "checkpoint"))
    lent_.log.warning("run.resume", folder.string() + " holds no run that was interrupted: one begins there");
  folder_->require_free({"variants.json"});  // of a comparison, whose runs lie below
  const bool begun = options_.resume && std::filesystem::exists(*folder_ / "checkpoint" / "settings.json");
  if (!begun && !std::filesystem::exists(*folder_ / "run.jsonl")) {
    std::vector<std::string> written = {"cases.jsonl", "metrics.csv", "report.html", "report.json"};
    for (const auto& format : save_formats()) written.push_back(format.file);
    folder_->require_free(written);
  }
  lent_.log = log_also_to(lent_.log, *folder_ / "run.jsonl");
  lent_.log.event(LogLevel::kDebug, "run.begin", "", {{"command", record_.command_line}});
}

size_t Run::batch_size() const {
  if (options_.batch_size > 0) return static_cast<size_t>(options_.batch_size);
  const bool together = editors::find_editor(options_.editor).batch && !options_.single();
  return together ? std::max<size_t>(1, facts_.facts.size()) : 1;
}

std::vector<datasets::Fact> Run::shown_facts() const {
  const size_t n = std::min<size_t>(options_.show, facts_.facts.size());
  return {facts_.facts.begin(), facts_.facts.begin() + n};
}

nlohmann::ordered_json Run::plan() const {
  const size_t batch = batch_size();
  return {{"editor", record_.editor},
          {"hparams", record_.hparams},
          {"facts", facts_.facts.size()},
          {"batches", (facts_.facts.size() + batch - 1) / batch},
          {"batch_size", batch},
          {"statistics_layers", session_->editor().statistics_layers()},
          {"metrics", record_.metrics},
          {"device_map", model_->placement().to_json(models::device_module_names(model_->family(), model_->config()))}};
}

nlohmann::ordered_json Run::results() const {
  return results_document(record_, options_, facts_, *model_);
}

std::vector<nlohmann::json> Run::cases() const {
  return case_documents(record_, facts_);
}

std::string Run::summary() const {
  if (!complete_) return counted(facts_.facts.size(), "fact") + ", not edited yet\n";
  return summary_text(record_, facts_);
}

bool Run::said_enough() const {
  constexpr double kRounding = 1e-6;
  return complete_ && 100.0 * static_cast<double>(record_.count(Verdict::kSaid)) >=
                          least_said_ * static_cast<double>(facts_.facts.size()) - kRounding;
}

bool Run::nothing_edited() const {
  return complete_ && record_.count(Verdict::kFailed) == std::ssize(facts_.facts);
}

void Run::execute() {
  if (options_.dry_run) return;
  if (std::exchange(begun_, true)) refuse({"Run", "executed already", "one call of execute()", "make another Run"});
  const devices::Tf32Products products(options_.compute_dtype == "tf32");
  try {
    work();
  } catch (const Error& error) {
    if (error.error_class() != ErrorClass::kCancelled || !folder_) throw;
    folder_->keep();
    auto parts = parts_of(error);
    append_item(parts.advice, setting("out", record_.out) + " with " + setting("resume") + " goes on", "; ");
    throw Error(ErrorClass::kCancelled, parts);
  }
}

void Run::work() {
  evaluate_before();
  edit_all();
  evaluate_after();
  if (folder_) save_outputs();
  record_.seconds["total"] = now() - began_;
  record_.peak_bytes = peak_bytes(*model_);
  if (folder_) {
    write_documents();
    checkpoint_->remove();
    folder_.reset();  // and its lock: who embeds this may keep the run
  }
  complete_ = true;
}

void Run::evaluate_before() {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (!record_.metrics.empty()) {
    auto evaluate = evaluate_options(*model_, options_.metrics, lent_, options_.seed);
    bool cached = false;
    record_.before =
        evaluation::evaluate_before(*model_, facts_, record_.metrics, evaluate, options_.metrics.cache, &cached);
    lent_.log.info("evaluate.before",
                   cached ? "evaluation of the unedited model taken from the cache" : "evaluated the unedited model");
    evaluate.before = &*record_.before;
    if (options_.single()) alone_.emplace(facts_, record_.metrics, evaluate);
  }
  if (options_.lifelong())
    neutral_PV_ = evaluation::next_token_log_probs(*model_, evaluation::probe_prompts(),
                                                   {.progress = lent_.progress, .cancel = lent_.cancel});
  if (options_.show > 0) record_.text_before = evaluation::continue_facts(*model_, shown_facts(), 12, lent_.cancel);
}

void Run::edit_all() {
  auto batches = checkpoint_->load(lent_.log);
  if (!lent_.sharing.equal(std::to_string(batches.size())))
    refuse({setting("resume"), "the processes find different numbers of finished batches", "one run folder for all",
            "put " + setting("out") + " on a file system that all machines share"});
  if (!batches.empty()) resume(std::move(batches));
  const auto& done = session_->results();
  const devices::TransferScope transfers;
  const size_t size = batch_size(), n = facts_.facts.size();
  for (size_t begin = done.size() * size; begin < n; begin += size) edit_batch(begin, std::min(n, begin + size));
  if (!options_.single() && !done.empty() && !done.back().outcomes.empty()) finish();
  if (record_.measured.edits() < static_cast<int64_t>(in_force()) &&
      (options_.lifelong() || (!options_.single() && !session_->stopped() && scheduled(in_force()))))
    evaluate_state(in_force());
  record_.transfers = transfers.to_json();
  record_.statistics = session_->context().statistics->describe();
  record_.batches = done;
  if (options_.lifelong() && !done.empty()) record_.batches.back().deltas = session_->deltas();
  record_.guard = session_->readings();
  record_.weights_changed = session_->transaction().changed();
}

// The model, the editor and the measurements as they were after the last finished batch.
void Run::resume(std::vector<Batch> batches) {
  lent_.log.info("run.resume", "going on after " + std::to_string(batches.size()) + " finished batches");
  // In the single protocol each is put in force once more to be judged. One that left no delta (it failed, was taken
  // back, or lay beside the weights) is edited again, with those after it.
  if (options_.single())
    batches.erase(std::ranges::find_if(batches, [](const Batch& batch) { return batch.deltas.empty(); }),
                  batches.end());
  const size_t done = std::min(facts_.facts.size(), batches.size() * batch_size());
  session_->resume(batches, std::span(facts_.facts).first(done), checkpoint_->state(batches.size()));
  // What they took counts as if this process had made them.
  for (const auto& batch : batches)
    for (const auto& [phase, seconds] : batch.seconds) record_.seconds[phase] += seconds, began_ -= seconds;
  if (options_.lifelong()) session_->forget_deltas();
  if (options_.single()) {
    for (size_t i = 0; i < batches.size(); ++i)
      session_->during(batches[i],
                       [&] { judge_alone(i * batch_size(), std::min(facts_.facts.size(), (i + 1) * batch_size())); });
    return;
  }
  record_.measured = checkpoint_->measured(done, lent_.log);
  if (const size_t held = std::min(done, in_force()); static_cast<size_t>(record_.measured.edits()) < held)
    evaluate_between(held);
}

// The facts up to the batch at which the collapse guard stopped the run, which ends the curves; all of them if it did
// not.
size_t Run::in_force() const {
  if (!session_->stopped()) return facts_.facts.size();
  size_t facts = 0, last = 0;
  for (const auto& batch : session_->results()) {
    facts += batch.outcomes.size();
    if (batch.failed() < std::ssize(batch.outcomes)) last = facts;
  }
  return last;
}

// The single protocol, while the edits of the facts [begin, end) are in force.
void Run::judge_alone(size_t begin, size_t end) {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (alone_) alone_->judge(*model_, begin, end);
  ask(facts_, begin, end);
  const auto shown = shown_facts();
  if (begin >= shown.size()) return;
  const std::vector<datasets::Fact> facts(shown.begin() + begin, shown.begin() + std::min(end, shown.size()));
  for (auto& text : evaluation::continue_facts(*model_, facts, 12, lent_.cancel))
    record_.text_after.push_back(std::move(text));
}

// What the editor does once, after the last batch.
void Run::finish() {
  lent_.cancel.check("edit");
  const double began = now();
  const Batch* result = session_->finish();
  if (!result) {  // there was nothing to correct, which also took its time
    record_.seconds["insert"] += now() - began;
    return;
  }
  finished(*result);
  lent_.log.event(LogLevel::kInfo, "edit.finish", "corrected the sum of all changes", result->to_json());
}

void Run::finished(const Batch& batch) {
  for (const auto& [phase, seconds] : batch.seconds) record_.seconds[phase] += seconds;
  compare_updates(batch);
  checkpoint_->save(session_->results().size() - 1, batch, session_->state());
  if (options_.lifelong()) session_->forget_deltas();
}

void Run::edit_batch(size_t begin, size_t end) {
  lent_.cancel.check("edit");
  const std::span<const datasets::Fact> facts(facts_.facts.data() + begin, end - begin);
  const auto judge = [&] { judge_alone(begin, end); };
  const Batch& batch = session_->edit(facts, options_.single() ? judge : std::function<void()>());
  finished(batch);
  lent_.log.event(LogLevel::kInfo, "edit.batch",
                  (batch.failed() < std::ssize(facts) ? "edited facts " : "could not edit facts ") +
                      std::to_string(begin + 1) + "-" + std::to_string(end) + " of " +
                      std::to_string(facts_.facts.size()),
                  batch.to_json());
  if (!options_.single() && !session_->stopped()) evaluate_between(end);
}

// Processes insert the same targets with the same keys. Processors of different kinds round differently; what is saved
// is the first process's.
void Run::compare_updates(const Batch& batch) const {
  if (lent_.sharing.alone()) return;
  Sha256 hash;
  for (const auto& delta : batch.deltas)
    for (const auto* part : {&delta.left_DR, &delta.right_FR, &delta.dense_DF})
      if (part->defined()) {
        const at::Tensor host = devices::to_host(part->detach()).contiguous();
        hash.update(host.const_data_ptr(), host.numel() * host.element_size());
      }
  if (!lent_.sharing.equal(hash.hex()))
    lent_.log.warning("processes.rounding",
                      "the processes' updates differ in rounding (are the machines of different kinds?): the first "
                      "process's are kept");
}

// The last state is measured once the editor has corrected what it wants to (edit_all).
void Run::evaluate_between(size_t edits) {
  if (edits < facts_.facts.size() && scheduled(edits)) evaluate_state(edits);
}

// The state after some of the facts, for retention; the state after all of them is evaluated in full by evaluate_after.
void Run::evaluate_state(size_t edits) {
  if (options_.lifelong()) return measure(edits);
  const PhaseTimer timer(record_.seconds, "evaluate");
  const auto efficacy =
      evaluation::evaluate_efficacy(*model_, session_->asked(facts_).facts,
                                    {.progress = lent_.progress, .cancel = lent_.cancel, .sharing = lent_.sharing});
  record_.measured.retention.add(static_cast<int64_t>(edits), efficacy);
  checkpoint_->save_measured(record_.measured);
}

// Whether the batch that ends with this fact is to be measured.
bool Run::scheduled(size_t edits) const {
  const size_t n = facts_.facts.size(), before = edits == 0 ? 0 : (edits - 1) / batch_size() * batch_size();
  return schedule_.due(static_cast<int64_t>(before), static_cast<int64_t>(edits), static_cast<int64_t>(n),
                       options_.lifelong());
}

// One entry of the lifelong protocol.
void Run::measure(size_t edits) {
  const PhaseTimer timer(record_.seconds, "evaluate");
  auto evaluate = evaluate_options(*model_, options_.metrics, lent_, options_.seed);
  evaluate.front = session_->front();
  auto entry = measure_sequence(*model_, facts_, edits, neutral_PV_, std::move(evaluate));
  entry["seconds"] = record_.seconds["targets"] + record_.seconds["insert"];
  entry["peak_bytes"] = peak_bytes(*model_);
  std::string text;
  const auto cells = lifelong_cells(entry);
  for (size_t i = 1; i < cells.size(); ++i)
    if (cells[i] != "-") append_item(text, lifelong_heads()[i] + " " + cells[i], ", ");
  lent_.log.event(LogLevel::kInfo, "edit.lifelong", "after " + cells[0] + " edits: " + text, entry);
  record_.measured.lifelong.push_back(std::move(entry));
  checkpoint_->save_measured(record_.measured);
}

// What the model says to the facts [begin, end) as they are asked now; what the evaluation has read is not written
// again.
void Run::ask(const datasets::FactSet& asked, size_t begin, size_t end) {
  answers_.resize(std::max(answers_.size(), end));
  std::vector<datasets::Fact> rest;
  std::vector<size_t> places;
  for (size_t i = begin; i < end; ++i) {
    const auto& fact = asked.facts[i];
    if (auto answer = record_.after ? evaluation::answer_read(*record_.after, i, fact.target_new) : std::nullopt) {
      answers_[i] = std::move(*answer);
    } else {
      rest.push_back(fact);
      places.push_back(i);
    }
  }
  auto written = evaluation::answers(*model_, rest,
                                     {.progress = lent_.progress, .cancel = lent_.cancel, .sharing = lent_.sharing});
  for (size_t i = 0; i < written.size(); ++i) answers_[places[i]] = std::move(written[i]);
}

void Run::judge() {
  const auto outcomes = record_.outcomes();
  for (size_t i = 0; i < facts_.facts.size(); ++i)
    record_.verdicts.push_back(workflow::judge(i < outcomes.size() ? outcomes[i] : nullptr, answers_.at(i)));
}

void Run::evaluate_after() {
  const PhaseTimer timer(record_.seconds, "evaluate");
  if (options_.single()) {
    judge();
    if (alone_) record_.after = alone_->finish();
    return;
  }
  if (!record_.metrics.empty()) {
    auto evaluate = evaluate_options(*model_, options_.metrics, lent_, options_.seed);
    evaluate.before = &*record_.before;
    evaluate.front = session_->front();
    record_.after = evaluation::evaluate(*model_, facts_, record_.metrics, evaluate);
  }
  ask(session_->asked(facts_), 0, facts_.facts.size());
  judge();
  if (options_.show == 0) return;
  datasets::FactSet shown;
  shown.facts = shown_facts();
  record_.text_after = evaluation::continue_facts(*model_, session_->asked(std::move(shown)).facts, 12, lent_.cancel,
                                                  record_.text_before);
}

// The pack always; the model's folder is made with it.
void Run::save_outputs() {
  if (options_.saves("none")) return;
  if (options_.single()) {
    lent_.log.info("save.none", "no pack is written: every edit was taken back");
    return;
  }
  const auto pack = session_->pack();
  const auto pack_file = *folder_ / save_format("pack").file;
  for (const auto& format : save_formats()) {
    if (format.name != "pack" && !options_.saves(format.name)) continue;
    const auto path = *folder_ / format.file;
    (void)format.write({.model = *model_,
                        .pack = pack,
                        .out = path,
                        .edited = &session_->transaction(),
                        .pack_file = pack_file,
                        .lent = lent_});
    record_.files[format.label] = path.string();
  }
}

void Run::write_documents() {
  for (const char* phase : {"statistics", "targets", "insert", "evaluate"}) record_.seconds.try_emplace(phase, 0.0);
  evaluation::RunReport report;
  report.cases = cases();
  folder_->write_lines("cases.jsonl", report.cases);
  report.extras = report_extras(record_, facts_, *model_);
  folder_->write_json("report.json", report.extras);
  const auto document = results();
  report.results = document;
  write_file(*folder_ / "report.html", evaluation::render_report(report));
  write_file(*folder_ / "metrics.csv", evaluation::metrics_csv(report.results));
  record_.files["report"] = (*folder_ / "report.html").string();
  record_.files["results"] = (*folder_ / "results.json").string();
  folder_->write_json("results.json", document);  // last: its presence says that the run is complete
}

}  // namespace emend::workflow
