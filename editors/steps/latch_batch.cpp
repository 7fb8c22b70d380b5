#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/packed.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/latch_batch.h>
#include <emend/editors/detail/latch_gates.h>
#include <emend/editors/detail/latch_memory.h>
#include <emend/editors/detail/latch_prompts.h>
#include <emend/editors/detail/passing_mentions.h>
#include <emend/editors/steps/chat_rows.h>
#include <emend/editors/steps/continuations.h>
#include <emend/editors/steps/keys.h>
#include <emend/editors/steps/wordings.h>
#include <emend/models/compute_copy.h>
#include <emend/models/config.h>
#include <emend/models/products.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace emend::editors::detail {
namespace {

using Ids = std::vector<int64_t>;

class LatchBatch {
 public:
  LatchBatch(const LatchHparams& hparams, std::vector<LayerMemory>& memory, const LatchTexts& texts,
             models::Model& model, const EditContext& context, EditResult& result)
      : h_(hparams),
        memory_(memory),
        texts_(texts),
        model_(model),
        context_(context),
        result_(result),
        transaction_(model, context.transaction) {
    read_weights();
  }

  void run(std::span<const datasets::Fact> facts, size_t fresh) {
    facts_ = facts;
    fresh_ = fresh;
    batch_ = render_batch(model_, facts, texts_.contexts, {parse_fact_token(h_.fact_token)});
    for (auto& fact : batch_.rendered)
      for (auto* rows : {&fact.rows, &fact.kl_rows})
        for (auto& row : *rows) row = off_the_sink(std::move(row));
    result_.outcomes = batch_.outcomes;
    {
      const PhaseTimer timer(result_, "targets");
      add_wordings(h_, facts_, reader(), context_, batch_);
      add_chats();
    }
    const std::vector<size_t> released = make_units();
    Continuations after;
    {
      const PhaseTimer timer(result_, "targets");
      after = continuations();
      choose_asides();
      if (h_.mention_weight > 0)
        mentions_ = passing_mentions(h_, mapped(units_, &LatchUnit::subject), texts_, reader(), context_);
      optimise();
    }
    insert({0, h_.layers.size()});
    std::vector<LatchUnit> subjects = units_;
    if (!h_.release_layers.empty()) release(released, after);
    int64_t round = 1;
    while (round < h_.rounds && again(subjects)) ++round;
    for (const Written& stage : written_) remember(h_, stage, model_, context_, memory_);
    context_.cancel.check("insert");
    result_.outcomes.resize(fresh_);
    transaction_.commit();
  }

 private:
  // The model as it was when its weights were last read: what writes the texts that the edit needs and runs prompts.
  [[nodiscard]] const models::Model& reader() const { return copy_ ? *copy_ : model_; }

  void read_weights() {
    const auto dtype = models::writing_dtype(model_, context_.compute_dtype.value_or(model_.dtype()));
    copy_.reset();
    if (dtype != model_.dtype()) copy_.emplace(models::compute_copy(model_, dtype, 0));
  }

  [[nodiscard]] int layer_at(size_t place) const { return static_cast<int>(h_.all_layers()[place]); }

  void add_chats() {
    chats_.resize(batch_.places.size());
    if (h_.chat_weight == 0) return;
    const auto facts = mapped(batch_.places, [&](const size_t place) { return facts_[place]; });
    chats_ = chats_of(reader(), facts, parse_fact_token(h_.fact_token), context_.cancel);
    if (std::ranges::all_of(chats_, [](const FactChats& one) { return one.asked.empty() && one.replies.empty(); }))
      context_.log.warning("chat.none", setting("set", "chat_weight=" + short_number(h_.chat_weight)) +
                                            " does nothing for these facts: the model has no chat template that can be "
                                            "used, or the template does not write the questions as they are");
    for (const auto& chats : chats_)
      for (const auto& reply : chats.replies) context_.log.event(LogLevel::kDebug, "chat", reply.prompt.text, {});
  }

  // A fact of an earlier batch, whose subject has come again: it counts in what the subject's neurons say. It has a
  // release already.
  [[nodiscard]] bool recalled(size_t i) const { return batch_.places[i] >= fresh_; }

  // A fact's contexts, then the conversations about it.
  [[nodiscard]] size_t contexts_of(size_t i) const { return batch_.rendered[i].rows.size() + chats_[i].asked.size(); }
  [[nodiscard]] const PromptRow& context_at(size_t i, size_t r) const {
    const auto& rows = batch_.rendered[i].rows;
    return r < rows.size() ? rows[r] : chats_[i].asked[r - rows.size()];
  }

  // The units of the first stage, and the layer's place for each fact's release. All that is needed of the text is
  // read.
  std::vector<size_t> make_units() {
    LatchRoom room(h_, memory_, model_);
    std::vector<size_t> released;
    std::map<std::string, size_t> unit_of;
    for (size_t i = 0; i < batch_.rendered.size(); ++i) {
      const std::string& subject = batch_.rendered[i].subject;
      if (recalled(i) && !unit_of.contains(subject)) continue;  // whatever brought it back failed
      const auto [found, is_new] = unit_of.emplace(subject, units_.size());
      if (is_new) {
        LatchUnit& unit = units_.emplace_back();
        unit.subject = subject;
        unit.layer = room.take(0, h_.layers.size(), kNeuronsASubject);
      }
      units_[found->second].facts.push_back(i);
      if (!h_.release_layers.empty() && !recalled(i))
        released.push_back(room.take(h_.layers.size(), memory_.size(), kNeuronsARelease));
    }
    std::set<size_t> places(released.begin(), released.end());
    for (const LatchUnit& unit : units_) places.insert(unit.layer);
    const PhaseTimer timer(result_, "statistics");
    if (!places.empty()) (void)texts_.passes({places.begin(), places.end()}, reader());
    return released;
  }

  // By their layer's place in `layers`, ascending.
  std::map<size_t, std::vector<LatchUnit*>> units_by_place() {
    std::map<size_t, std::vector<LatchUnit*>> units;
    for (auto& unit : units_) units[unit.layer].push_back(&unit);
    return units;
  }

  // Whether the model is asked for a fact of this batch with this row: the plain prompt and the last two contexts,
  // which are forms of it. Conversations stand behind them.
  [[nodiscard]] bool is_asked(size_t i, size_t r) const {
    return !recalled(i) && (r == 0 || r + 2 >= batch_.rendered[i].rows.size());
  }

  // By fact, and by the row of it that they stand behind.
  using Continuations = std::vector<std::map<size_t, Continuation>>;

  // What the model writes behind each answer, before anything is changed: behind the plain prompt and the last two
  // contexts, which are forms of it, where there is room for it.
  Continuations continuations() {
    Continuations all(h_.release_layers.empty() ? 0 : batch_.rendered.size());
    std::vector<Continuation*> written;
    std::vector<size_t> facts;  // of the prompts
    std::vector<Ids> prompts;
    for (size_t i = 0; i < all.size(); ++i) {
      const RenderedFact& fact = batch_.rendered[i];
      for (size_t r = 0; r < contexts_of(i); ++r) {
        if (!is_asked(i, r)) continue;
        auto row = answered(context_at(i, r), fact.target_ids);
        if (std::ssize(row.ids) + h_.release_tokens > model_.max_positions()) continue;
        prompts.push_back(std::move(row.ids));
        written.push_back(&all[i][r]);
        facts.push_back(i);
      }
    }
    const auto ends_the_word = [&](size_t row, int64_t id) {
      return !lengthens(model_.tokenizer(), batch_.rendered[facts[row]].target_ids, id);
    };
    auto texts = continue_greedily(reader(), prompts, h_.release_tokens, context_.cancel, ends_the_word);
    for (size_t i = 0; i < texts.size(); ++i) *written[i] = std::move(texts[i]);
    return all;
  }

  void choose_asides() {
    std::vector<std::vector<Ids>> own;
    for (const LatchUnit& unit : units_) {
      auto& prompts = own.emplace_back();
      for (const size_t i : unit.facts) prompts.push_back(batch_.rendered[i].rows[0].ids);
    }
    const auto asides = other_questions(reader(), mapped(units_, &LatchUnit::subject), own, h_.asides, context_.cancel);
    for (size_t u = 0; u < units_.size(); ++u) units_[u].asides = asides[u];
  }

  TargetProblem problem_of(size_t i) const {
    TargetProblem problem = make_target_problem(batch_.rendered[i]);
    if (problem.rows.size() > 1)
      for (auto& row : problem.rows) row.weight = row.sampled_context ? 1 : 2;  // the fact's own words count twice
    for (const auto& reply : chats_[i].replies) {
      problem.rows.push_back(replied(reply));
      problem.rows.back().weight = h_.chat_weight;
    }
    double sum = 0;
    for (const auto& row : problem.rows) sum += row.weight;
    for (auto& row : problem.rows) row.weight /= sum;
    return problem;
  }

  TargetProblem problem_of(const LatchUnit& unit) {
    constexpr double kRecalled = 0.5;  // beside the 1 of a fact of this batch; all of them beside all of these
    TargetProblem joint;
    const auto others = static_cast<double>(std::ranges::count_if(unit.facts, [&](size_t i) { return recalled(i); }));
    const double fresh = static_cast<double>(unit.facts.size()) - others;
    const double recalled_weight = kRecalled * fresh / std::max(fresh, others), sum = fresh + recalled_weight * others;
    for (const size_t i : unit.facts) {
      TargetProblem one = problem_of(i);
      for (auto& row : one.rows) row.weight /= recalled(i) ? sum / recalled_weight : sum;
      joint.rows.insert(joint.rows.end(), one.rows.begin(), one.rows.end());
      if (joint.kl_rows.empty()) joint.kl_rows = std::move(one.kl_rows);
    }
    if (const auto found = mentions_.find(unit.subject); found != mentions_.end()) {
      for (TargetRow row : found->second) {
        row.weight *= h_.mention_weight;
        joint.rows.push_back(std::move(row));
      }
      for (TargetRow& row : joint.rows) row.weight /= 1 + h_.mention_weight;
    }
    joint.case_id = batch_.rendered[unit.facts[0]].case_id;
    size_t longest = 4;  // tokens of an answer; so many need no more steps
    for (const size_t i : unit.facts) longest = std::max(longest, batch_.rendered[i].target_ids.size());
    const double harder = std::sqrt(static_cast<double>(unit.facts.size() * longest) / 4);
    joint.more_steps = std::llround(static_cast<double>(h_.v_num_grad_steps) * (harder - 1));
    return joint;
  }

  [[nodiscard]] TargetSpec spec_at(size_t place) const {
    hparams::LocateHparams at_layer = h_;
    at_layer.layers = {layer_at(place)};
    TargetSpec spec = memit_targets(at_layer, model_);
    spec.copy = copy_ ? &*copy_ : nullptr;
    return spec;
  }

  void optimise() {
    for (const auto& [place, units] : units_by_place()) {
      auto problems = mapped(units, [&](const LatchUnit* unit) { return problem_of(*unit); });
      TargetSpec spec = spec_at(place);
      spec.sketch_steps = h_.sketch_steps;
      const auto targets = optimise_targets(model_, problems, spec, context_);
      for (size_t u = 0; u < units.size(); ++u) {
        units[u]->target = targets[u];
        for (const size_t i : units[u]->facts)
          result_.outcomes[batch_.places[i]] = make_outcome(model_.tokenizer(), batch_.rendered[i], targets[u]);
        if (context_.trace)
          record_target(*context_.trace, "z." + std::to_string(problems[u].case_id) + ".", problems[u], targets[u],
                        spec);
      }
    }
    std::erase_if(units_, [](const LatchUnit& unit) { return unit.target.status == FactStatus::kFailed; });
  }

  // The second stage: behind its answer a fact's subject has had its say, and the model goes on as it did.
  void release(const std::vector<size_t>& places, const Continuations& after) {
    std::vector<LatchUnit> units;
    for (const LatchUnit& first : units_)
      for (const size_t i : first.facts) {
        const auto says_more = [](const auto& row) { return !row.second.ids.empty(); };
        if (std::none_of(after[i].begin(), after[i].end(), says_more)) continue;
        LatchUnit& unit = units.emplace_back();
        unit.subject = first.subject + batch_.rendered[i].target;
        unit.facts = {i};
        unit.layer = places[i];
      }
    units_ = std::move(units);
    {
      const PhaseTimer timer(result_, "targets");
      read_weights();
      optimise_releases(after);
    }
    insert({h_.layers.size(), memory_.size()});
  }

  void optimise_releases(const Continuations& after) {
    for (const auto& [place, units] : units_by_place()) {
      std::vector<TargetProblem> problems;
      for (const LatchUnit* unit : units) {
        const RenderedFact& fact = batch_.rendered[unit->facts[0]];
        TargetProblem& problem = problems.emplace_back();
        problem.case_id = fact.case_id;
        for (const auto& [r, continued] : after[unit->facts[0]])
          if (auto row = going_on(context_at(unit->facts[0], r), fact.target_ids, continued))
            problem.rows.push_back(std::move(*row));
        for (auto& row : problem.rows) row.weight = 1.0 / static_cast<double>(problem.rows.size());
      }
      TargetSpec spec = spec_at(place);
      spec.steps = h_.release_steps;
      const auto targets = optimise_targets(model_, problems, spec, context_);
      for (size_t u = 0; u < units.size(); ++u) units[u]->target = targets[u];
    }
    std::erase_if(units_, [](const LatchUnit& unit) { return unit.target.status == FactStatus::kFailed; });
  }

  // Subjects with a fact that the model does not say, after its plain prompt or a form of it; by their layer's place.
  std::map<size_t, std::vector<LatchUnit*>> unsaid(std::vector<LatchUnit>& units) const {
    std::vector<PromptRow> prompts;
    std::vector<Ids> answers;
    std::vector<LatchUnit*> asked;
    size_t longest = 0;  // a model with a table of positions has to have room for it behind each
    for (const RenderedFact& fact : batch_.rendered) longest = std::max(longest, fact.target_ids.size());
    for (LatchUnit& unit : units)
      for (const size_t i : unit.facts)
        for (size_t r = 0; r < batch_.rendered[i].rows.size(); ++r) {
          const PromptRow& prompt = batch_.rendered[i].rows[r];
          const bool fits = std::ssize(prompt.ids) + static_cast<int64_t>(longest) <= model_.max_positions() + 1;
          if (!fits || !is_asked(i, r)) continue;
          prompts.push_back(prompt);
          answers.push_back(batch_.rendered[i].target_ids);
          asked.push_back(&unit);
        }
    const auto ask = [&] { return packed(says(reader(), prompts, answers, context_.cancel)); };
    const auto said = unpacked<std::vector<bool>>(context_.sharing.by_first(ask));
    std::map<size_t, std::vector<LatchUnit*>> found;
    for (size_t p = 0; p < said.size(); ++p) {
      if (said[p]) continue;
      auto& there = found[asked[p]->layer];
      if (there.empty() || there.back() != asked[p]) there.push_back(asked[p]);
    }
    return found;
  }

  // Once more for the subjects of facts that the model does not say: what is missing is added to the columns of their
  // neurons. Whether there were any.
  bool again(std::vector<LatchUnit>& subjects) {
    constexpr double kSurer = 0.2;  // of the loss at which a target has had enough: a mean hides one token among many
    const PhaseTimer timer(result_, "targets");
    read_weights();
    const auto by_place = unsaid(subjects);
    std::map<size_t, std::vector<Target>> targets;  // all of them before the first write
    for (const auto& [place, units] : by_place) {
      context_.log.event(LogLevel::kDebug, "edit.round", counted(units.size(), "subject") + " not said yet", {});
      TargetSpec spec = spec_at(place);
      spec.stop_loss *= kSurer;
      const auto problems = mapped(units, [&](const LatchUnit* unit) { return problem_of(*unit); });
      targets[place] = optimise_targets(model_, problems, spec, context_);
    }
    for (const auto& [place, units] : by_place) {
      Ids places;
      std::vector<at::Tensor> columns;
      for (size_t u = 0; u < units.size(); ++u) {
        Target& target = targets[place][u];
        if (target.status == FactStatus::kFailed) continue;
        LatchUnit& unit = *units[u];
        for (size_t k = 0; k < unit.neurons.size(); ++k) {
          places.push_back(unit.neurons[k]);
          columns.push_back(target.delta_D[0] * ((k % 2 == 0 ? 1 : -1) / unit.value));
        }
        note_round(unit, std::move(target));
      }
      if (!places.empty())
        grow_columns(MlpWeights::of(model_, layer_at(place)), places, at::stack(columns, 1), transaction_, result_);
    }
    copy_.reset();
    return !by_place.empty();
  }

  // The vector of all rounds and its norms, steps and curve of all; converged is what the first round would call so.
  void note_round(LatchUnit& unit, Target target) {
    unit.target.delta_D[0] = unit.target.delta_D[0] + target.delta_D[0];
    target.delta_D = unit.target.delta_D;
    target.initial_D = unit.target.initial_D;
    if (target.curve.back().loss < h_.v_stop_loss) target.status = FactStatus::kConverged;
    for (const size_t i : unit.facts) {
      FactOutcome& noted = result_.outcomes[batch_.places[i]];
      Target all = target;
      all.steps += noted.steps;
      all.curve.insert(all.curve.begin(), noted.curve.begin(), noted.curve.end());
      noted = make_outcome(model_.tokenizer(), batch_.rendered[i], all);
    }
  }

  void insert(std::pair<size_t, size_t> stage) {
    const PhaseTimer timer(result_, "insert");
    prompts_ = gate_prompts(h_, {facts_, batch_, chats_}, texts_, reader(), context_, units_);
    if (units_.empty()) return;
    const auto units_at = units_by_place();
    std::vector<size_t> places;
    for (const auto& [place, units] : units_at) places.push_back(place);
    const auto& passes = texts_.passes(places, reader());
    LayerWalk walk(reader(), prompts_, context_, true);
    std::map<size_t, at::Tensor> inputs_PD;  // all of them before the first write
    for (const size_t place : places) inputs_PD[place] = inputs_at(place, walk);
    for (const auto& [place, units] : units_at) {
      const at::Tensor& prompts_PD = inputs_PD.at(place);
      const auto there = [&](const at::Tensor& x) {
        return devices::route_like(x, prompts_PD, devices::Purpose::kKeys);
      };
      const TextPass& text = passes.at(place);
      write_units(place, units, {there(text.inputs_ND), there(text.energy_F)}, prompts_PD);
    }
    std::erase_if(units_, [](const LatchUnit& unit) { return unit.target.status == FactStatus::kFailed; });
    Written& written = written_.emplace_back(Written{stage, {}, {}});
    for (const LatchUnit& unit : units_) {
      written.plain.push_back(prompts_[unit.begin]);
      for (const size_t i : unit.facts) {  // and where an answer is due
        if (recalled(i)) continue;
        PromptRow& end = written.plain.emplace_back(batch_.rendered[i].rows[0]);
        end.lookup = std::ssize(end.ids) - 1;
      }
      written.whose.resize(written.plain.size(), subject_number(unit.subject));
    }
    copy_.reset();  // the weights are others now
  }

  // What enters the MLP at the prompts, where the layer is solved.
  at::Tensor inputs_at(size_t place, LayerWalk& walk) const {
    const int layer = layer_at(place);
    walk.advance_to(layer);
    std::vector<size_t> all(prompts_.size());
    std::iota(all.begin(), all.end(), size_t{0});
    return devices::route_like(walk.values({hooks::Site::kMlpIn, layer}, all).to(at::kFloat),
                               solve_home(model_, model_.edit_site(layer)), devices::Purpose::kKeys);
  }

  // The facts fail; a release is left out.
  void stays_shut(LatchUnit& unit) {
    unit.target.status = FactStatus::kFailed;
    context_.log.event(LogLevel::kDebug, "gate", unit.subject + ": its gate stays shut at itself", {});
    if (unit.layer >= h_.layers.size()) return;
    for (const size_t i : unit.facts) {
      auto& outcome = result_.outcomes[batch_.places[i]];
      outcome.status = FactStatus::kFailed;
      outcome.reason =
          "a gate that stays shut at its own subject; more text for the statistics or another layer may help";
    }
  }

  void write_units(size_t place, const std::vector<LatchUnit*>& units, const TextPass& pass,
                   const at::Tensor& prompts_PD) {
    LayerMemory& memory = memory_[place];
    const MlpWeights weights = MlpWeights::of(model_, layer_at(place));
    const LatchRows rows{pass, prompts_PD, memory};
    const std::vector<LatchGate> found = find_gates(h_, texts_, model_, units, rows, context_);
    std::vector<at::Tensor> gates, readers, columns;
    for (size_t k = 0; k < found.size(); ++k) {
      const LatchGate& gate = found[k];
      if (gate.opens_D.empty()) stays_shut(*units[k]);
      gates.insert(gates.end(), gate.opens_D.begin(), gate.opens_D.end());
      columns.insert(columns.end(), gate.adds_D.begin(), gate.adds_D.end());
      if (weights.gated()) readers.insert(readers.end(), gate.opens_D.size(), gate.reads_D);
    }
    if (gates.empty()) return;
    constexpr size_t kLeast = 256;
    const size_t more = std::max(kLeast, 2 * (memory.used.size() + gates.size()));
    Ids places = spare_neurons(model_, weights, pass, gates.size(), more, memory.used);
    const auto taken_end = places.begin() + std::ssize(gates);
    memory.spare.assign(taken_end, places.end());
    places.erase(taken_end, places.end());
    const at::Tensor gate_ED = at::stack(gates);
    const at::Tensor up_ED = weights.gated() ? at::stack(readers) : gate_ED;
    write_neurons(weights, {places, gate_ED, up_ED, at::stack(columns, 1)}, transaction_, result_);
    memory.used.insert(places.begin(), places.end());
    for (size_t k = 0, taken = 0; k < found.size(); taken += found[k++].opens_D.size()) {
      const auto first = places.begin() + static_cast<std::ptrdiff_t>(taken);
      units[k]->neurons.assign(first, first + std::ssize(found[k].opens_D));
      units[k]->value = found[k].value;
    }
  }

  const LatchHparams& h_;
  std::vector<LayerMemory>& memory_;
  const LatchTexts& texts_;
  models::Model& model_;
  const EditContext& context_;
  EditResult& result_;
  EditTransaction transaction_;
  std::optional<models::Model> copy_;  // in the arithmetic of the phase, if that is another one
  std::span<const datasets::Fact> facts_;
  size_t fresh_ = 0;  // facts of this batch; those behind are recalled
  RenderedBatch batch_;
  std::vector<FactChats> chats_;                            // by fact
  std::map<std::string, std::vector<TargetRow>> mentions_;  // by subject
  std::vector<LatchUnit> units_;
  std::vector<PromptRow> prompts_;
  std::vector<Written> written_;
};

}  // namespace

void edit_latch_batch(const LatchHparams& hparams, std::vector<LayerMemory>& memory, const LatchTexts& texts,
                      models::Model& model, std::span<const datasets::Fact> facts, size_t fresh,
                      const EditContext& context, EditResult& result) {
  LatchBatch(hparams, memory, texts, model, context, result).run(facts, fresh);
}

}  // namespace emend::editors::detail
