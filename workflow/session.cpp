#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/host_memory.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/neurons.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/documents.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/save_formats.h>
#include <emend/workflow/session.h>

namespace emend::workflow {
namespace {

std::unique_ptr<editors::Editor> editor_for(const models::Model& model, const RunOptions& options, const Log& log) {
  const auto& info = chosen_editor(options, &model.checkpoint());
  return info.make(find_hparams(info.name, options.hparams, options.set, model.checkpoint(), log), model, log);
}

// Outcomes of facts that were not edited, or not kept.
std::vector<editors::FactOutcome> failed_outcomes(std::span<const datasets::Fact> facts, const std::string& reason) {
  std::vector<editors::FactOutcome> outcomes;
  for (const auto& fact : facts) {
    auto& outcome = outcomes.emplace_back();
    outcome.case_id = fact.case_id;
    outcome.status = editors::FactStatus::kFailed;
    outcome.reason = reason;
  }
  return outcomes;
}

}  // namespace

// One batch: its own transaction, known to the editor while the scope lasts.
class Session::Scope {
 public:
  explicit Scope(Session& session)
      : transaction(session.model_, &session.transaction()), changes_(session.changes_), context_(session.context_) {
    context_.transaction = &transaction;
  }
  ~Scope() {
    context_.transaction = {};
    try {
      transaction.restore();  // unless it was committed
      transaction.commit();   // and is not restored once more
      changes_.wrote({});
    } catch (const std::exception&) {  // what is told is the error that led here
    }
  }

  editors::EditTransaction transaction;

 private:
  Changes& changes_;
  editors::EditContext& context_;
};

Session::Session(models::Model& model, RunOptions options, Handles lent)
    : Session(model, editor_for(model, options, lent.log), options, lent) {}

// The chosen arithmetic, else the method's own.
static std::string compute_dtype_of(const RunOptions& options, const editors::Editor& editor) {
  const auto& known = editors::all_editors();
  const auto info = std::ranges::find(known, editor.name(), &editors::EditorInfo::name);
  return info == known.end() ? options.compute_dtype : chosen_arithmetic(options, *info);
}

Session::Session(models::Model& model, std::unique_ptr<editors::Editor> editor, RunOptions options, Handles lent)
    : model_(model), options_(std::move(options)), lent_(std::move(lent)), editor_(std::move(editor)), changes_(model) {
  require_valid(options_);
  if (!editor_) refuse({"Session", "no editor", "an editor", "make one first"});
  if (!lent_.statistics) own_statistics_ = statistics_provider(options_, lent_);
  static_cast<editors::EditSettings&>(context_) =
      editors::make_settings({.seed = options_.seed,
                              .engine = editors::parse_engine(options_.engine),
                              .contexts = named_contexts(options_),
                              .solve_dtype = parse_dtype(options_.solve_dtype, "solve_dtype"),
                              .compute_dtype = compute_dtype_of(options_, *editor_)},
                             model_);
  static_cast<editors::EditLoans&>(context_) = {
      .statistics = lent_.statistics ? lent_.statistics : own_statistics_.get(),
      .sharing = lent_.sharing,
      .cancel = lent_.cancel,
      .progress = lent_.progress,
      .log = lent_.log};
  compute_dtype_ = context_.arithmetic_name(model_);
  if (options_.watch && !options_.dry_run) guard_.emplace(model_, options_.guard);
}

Session::~Session() = default;

const Batch& Session::edit(std::span<const datasets::Fact> facts, const std::function<void()>& judge) {
  for (const auto& fact : facts) datasets::validate(fact);
  devices::return_host_memory();
  Batch result;
  if (stopped_) {
    result.editor = editor_->name();
    result.outcomes = failed_outcomes(facts, "not edited: the collapse guard had stopped the run");
    if (judge) judge();
  } else {
    Scope scope(*this);
    write_into(scope, result, facts, judge);
    scope.transaction.commit();
    if (!judge) changes_.wrote(result.deltas);
  }
  facts_.insert(facts_.end(), facts.begin(), facts.end());
  taken_back_.push_back(judge != nullptr);
  devices::return_host_memory();
  return results_.emplace_back(std::move(result));
}

static void require_outcomes(const editors::Editor& editor, const Batch& result, size_t facts) {
  if (result.outcomes.size() == facts) return;
  throw Error(ErrorClass::kInvalidArgument,
              {"editor " + editor.name(), counted(result.outcomes.size(), "outcome") + " of " + counted(facts, "fact"),
               "one outcome a fact", "let Editor::edit return them all"});
}

void Session::write_into(Scope& scope, Batch& result, std::span<const datasets::Fact> facts,
                         const std::function<void()>& judge) {
  const auto state = editor_->state();
  const auto read = std::ssize(readings_);
  context_.taken_neurons = changes_.neurons_of_others();
  result = editor_->edit(model_, facts, context_);
  bool reverted = false;
  try {
    require_outcomes(*editor_, result, facts.size());
    const std::string why = alarms(result);
    if (!why.empty() && options_.on_collapse == "revert") {
      reverted = true;
      scope.transaction.restore();
      scope.transaction.commit();
      forget();
      throw Error(ErrorClass::kNumeric, {"collapse guard", why, "a model that stays within the limits",
                                         "nothing was saved; begin anew with smaller batches, another editor, or " +
                                             setting("on_collapse", "skip")});
    }
    const bool kept = why.empty() || options_.on_collapse == "warn";
    if (!kept) {
      stopped_ = options_.on_collapse == "stop";
      result.deltas.clear();
      result.layers.clear();
      result.outcomes = failed_outcomes(facts, "taken back by the collapse guard: " + why);
      take_back(scope, state);
    }
    if (!judge) return;
    if (kept)  // every batch is the last
      if (auto closing = editor_->finish(model_, context_))
        for (auto& delta : closing->deltas) result.deltas.push_back(std::move(delta));
    judge();
    if (kept) take_back(scope, state);
  } catch (...) {  // of the guard's pass, of who judges: nothing of the batch stays
    if (!reverted) {
      take_back(scope, state);
      readings_.erase(readings_.begin() + read, readings_.end());
      stopped_ = false;
    }
    throw;
  }
}

// What the guard finds wrong with the model after this batch; empty if all is well.
std::string Session::alarms(const Batch& result) {
  if (!guard_) return {};
  double update = 0, condition = 0;
  for (const auto& layer : result.layers) {
    // A neuron of its own is shut on other text: its size says nothing about the rest of the matrix.
    if (layer.solver != editors::kWholeNeurons) update = std::max(update, layer.relative_update_norm);
    condition = std::max(condition, layer.condition);
  }
  const auto& reading = readings_.emplace_back(guard_->read(model_, update, condition));
  const std::string why = join(reading.alarms, "; ");
  if (!why.empty())
    lent_.log.event(LogLevel::kWarning, "edit.collapse", "the model may be broken after this batch: " + why,
                    evaluation::to_json(reading));
  return why;
}

// The model and the editor as they were before the batch.
void Session::take_back(Scope& scope, const std::map<std::string, at::Tensor>& state) {
  scope.transaction.restore();
  editor_->reset();
  editor_->load_state(state);
}

const Batch* Session::finish() {
  Scope scope(*this);
  auto result = editor_->finish(model_, context_);
  scope.transaction.commit();
  if (result) changes_.wrote(result->deltas);
  if (!result) return nullptr;
  taken_back_.push_back(false);
  return &results_.emplace_back(std::move(*result));
}

void Session::undo() {
  forget();
  readings_.clear();
}

void Session::forget() {
  changes_.take_out();
  editor_->reset();
  results_.clear();
  taken_back_.clear();
  facts_.clear();
  stopped_ = forgets_ = false;
}

void Session::resume(std::vector<Batch> batches, std::span<const datasets::Fact> facts, SessionState state) {
  // The statistics of a run are those of the unedited model.
  if (const auto layers = editor_->statistics_layers(); !layers.empty()) context_.statistics->prepare(model_, layers);
  // What was sampled is sampled once; other contexts an editor makes anew for each batch.
  if (!batches.empty() && batches.back().contexts && batches.back().contexts->sampled)
    context_.contexts = batches.back().contexts;
  size_t count = 0;
  for (const auto& batch : batches) count += batch.outcomes.size();
  if (count != facts.size())
    refuse({"resume", counted(facts.size(), "fact") + " for batches of " + std::to_string(count),
            "the facts of the batches, one after the other", ""});
  results_ = std::move(batches);
  taken_back_.assign(results_.size(), options_.single());
  facts_.assign(facts.begin(), facts.end());
  readings_ = std::move(state.readings);
  stopped_ = options_.on_collapse == "stop" &&
             std::ranges::any_of(readings_, [](const auto& reading) { return !reading.alarms.empty(); });
  if (options_.single()) return;
  // Delta by delta as they were written the first time, so that the weights get the same bytes.
  for (const auto& batch : results_)
    for (const auto& delta : batch.deltas) editors::apply_delta(delta, transaction());
  changes_.wrote(deltas());
  editor_->load_state(state.editor);
}

// In the single protocol every batch begins without a memory.
SessionState Session::state() const {
  return {options_.single() ? std::map<std::string, at::Tensor>{} : editor_->state(), readings_};
}

void Session::during(const Batch& batch, const std::function<void()>& work) {
  Scope scope(*this);
  for (const auto& delta : batch.deltas) editors::apply_delta(delta, scope.transaction);
  work();
  scope.transaction.restore();
}

int64_t Session::failed() const {
  int64_t count = 0;
  for (const auto& result : results_) count += result.failed();
  return count;
}

void Session::forget_deltas() {
  forgets_ = true;
  for (auto& batch : results_) batch.deltas.clear();
}

std::vector<editors::WeightDelta> Session::deltas() const {
  std::vector<editors::WeightDelta> all;
  if (!forgets_) {
    for (size_t b = 0; b < results_.size(); ++b)
      if (!taken_back_[b]) all.insert(all.end(), results_[b].deltas.begin(), results_[b].deltas.end());
    return all;
  }
  std::map<std::string, int> layers;
  for (const auto& batch : results_)
    for (const auto& layer : batch.layers) layers[layer.weight] = layer.layer;
  for (const auto& weight : changes_.transaction().changed())
    all.push_back(
        editors::weight_change(changes_.transaction(), weight, layers.contains(weight) ? layers[weight] : -1));
  return all;
}

FactVerdict judge(const editors::FactOutcome* outcome, const evaluation::Answer& answer) {
  if (!outcome) return {Verdict::kFailed, "not edited"};
  if (outcome->status == editors::FactStatus::kFailed) return {Verdict::kFailed, outcome->reason};
  if (answer.said) return {Verdict::kSaid, ""};
  std::string reason = "the model writes \"" + shorten(answer.text) + "\"";
  if (!outcome->reason.empty()) append_item(reason, outcome->reason, "; ");
  return {Verdict::kNotSaid, std::move(reason)};
}

nlohmann::json Session::verdicts() const {
  datasets::FactSet set;
  set.facts = facts_;
  const auto answers =
      evaluation::answers(model_, asked(std::move(set)).facts,
                          {.progress = lent_.progress, .cancel = lent_.cancel, .sharing = lent_.sharing});
  auto list = nlohmann::json::array();
  for (const auto& batch : results_)
    for (const auto& outcome : batch.outcomes) {
      const auto& fact = facts_.at(list.size());
      const auto [verdict, reason] = judge(&outcome, answers.at(list.size()));
      list.push_back({{"case_id", fact.case_id},
                      {"prompt", fact.full_prompt()},
                      {"target", fact.target_new},
                      {"verdict", to_string(verdict)},
                      {"reason", reason},
                      {"text", answers.at(list.size()).text}});
    }
  return list;
}

void Session::require_alone(const SaveFormat& format) const {
  if (format.whole && changes_.others_in())
    refuse({setting("save", format.name),
            "a model with edits in force that are not of this session, which would be left out",
            "a session that is alone in its model",
            "save packs, and apply them to the model's folder one after the other; or save the model as it is"});
}

void Session::save(const std::string& form, const std::filesystem::path& out) {
  const auto& format = save_format(form);
  models::require_apart(out, model_.checkpoint().path());
  require_own_kind(format, out);
  if (format.check) format.check(model_, setting("save"));
  require_alone(format);
  const editors::EditPack whole = pack();
  (void)format.write({.model = model_, .pack = whole, .out = out, .edited = &transaction(), .lent = lent_});
}

editors::EditPack Session::pack() {
  Batch whole;
  whole.editor = editor_->name();
  whole.hparams = editor_->hparams();
  whole.seed = options_.seed;
  whole.engine = context_.engine;
  whole.deltas = deltas();
  for (const auto& batch : results_)
    if (batch.contexts) whole.contexts = batch.contexts;
  std::vector<datasets::Fact> written;  // without those that failed or were taken back
  size_t place = 0;
  for (size_t b = 0; b < results_.size(); ++b)
    for (const auto& outcome : results_[b].outcomes) {
      if (outcome.status != editors::FactStatus::kFailed && !taken_back_[b]) written.push_back(facts_.at(place));
      ++place;
    }
  auto pack = editors::EditPack::from_results(model_, std::span<const Batch>(&whole, 1), written);
  pack.runtime = editor_->runtime();
  pack.extra.update(editor_->extra());
  if (at::isReducedFloatingType(model_.dtype())) {
    pack.extra["dtype"] = c10::toString(model_.dtype());
    pack.extra["survived"] = survived_by_weight(results_);
  }
  changes_.made(pack);
  return pack;
}

}  // namespace emend::workflow
