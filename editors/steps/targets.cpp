#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/packed.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/editors/steps/targets.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace emend::editors {
namespace {

[[noreturn]] void refuse_target(const TargetProblem& problem, const std::string& got, const std::string& expected) {
  refuse({"targets of fact " + std::to_string(problem.case_id), got, expected, ""});
}

void check_row(const TargetProblem& problem, const TargetRow& row) {
  const auto length = static_cast<int64_t>(row.ids.size());
  if (row.lookup < 0 || row.lookup >= length)
    refuse_target(problem, "looked-up token " + std::to_string(row.lookup),
                  "a token of a row of " + std::to_string(length));
  for (const int64_t token : row.also)
    if (token <= row.lookup || token >= length)
      refuse_target(problem, "δ at token " + std::to_string(token), "a token behind the looked-up one");
  for (const auto& [token, id] : row.labels)
    if (token < row.lookup || token >= length)
      refuse_target(problem, "a label at token " + std::to_string(token), "a token from the looked-up one on");
}

void check(const models::Model& model, const std::vector<TargetProblem>& problems, const TargetSpec& spec) {
  if (spec.sites.empty()) refuse({"targets", "no site", "one or two sites in one layer", ""});
  for (const auto& site : spec.sites) {
    if (site.layer != spec.sites[0].layer || site.layer < 0 || site.layer >= model.n_layers())
      refuse({"targets", hooks::to_string(site), "sites in one layer of the model", ""});
  }
  if (spec.loss_layer && (*spec.loss_layer < spec.sites[0].layer || *spec.loss_layer >= model.n_layers()))
    refuse({"targets", "loss layer " + std::to_string(*spec.loss_layer), "a layer from the edited one to the last",
            "check v_loss_layer"});
  for (const int layer : spec.watched_layers)
    if (layer <= spec.sites[0].layer || layer > spec.loss_layer.value_or(model.n_layers() - 1))
      refuse({"targets", "watched layer " + std::to_string(layer), "one above the sites, up to the loss layer", ""});
  if (spec.sketch_steps > 0 && spec.sites.size() > 1) refuse({"targets", "a sketch at two sites", "one site", ""});
  for (const auto& problem : problems) {
    if (problem.rows.empty()) refuse_target(problem, "no row", "at least one row");
    for (const auto& row : problem.rows) {
      check_row(problem, row);
      if (row.labels.empty()) refuse_target(problem, "a row without labels", "the target's tokens");
      // A mistaken label would otherwise surface as an index error on a device.
      for (const auto& label : row.labels)
        if (label.second < 0 || label.second >= model.vocab_size())
          refuse_target(problem, "target token " + std::to_string(label.second),
                        "an id below the vocabulary size " + std::to_string(model.vocab_size()));
    }
    for (const auto& row : problem.kl_rows) check_row(problem, row);
    for (const auto& held : problem.held) {
      if (held.row >= problem.rows.size() + problem.kl_rows.size() || held.vectors_D.size() != spec.sites.size())
        refuse_target(problem, "a held vector for no row or for other sites",
                      "a row of the problem and a vector a site");
    }
  }
}

std::vector<Target> run_engine(const models::Model& model, const std::vector<TargetProblem>& problems,
                               const TargetSpec& spec, const EditContext& context) {
  detail::TargetProgress told(context.progress, problems.size());
  if (context.engine == Engine::kFast) return detail::optimise_fast(model, problems, spec, context, told);
  std::vector<Target> targets;
  for (const auto& problem : problems) {
    targets.push_back(detail::optimise_reference(model, problem, spec, context));
    told.finished(targets.back().curve.empty() ? 0 : targets.back().curve.back().loss);
  }
  return targets;
}

// The plain rows and every third of the others. Held vectors are of all rows: such a problem is its own sketch.
TargetProblem sketch_of(const TargetProblem& problem) {
  constexpr size_t kEach = 3;
  TargetProblem sketch = problem;
  sketch.more_steps = 0;
  if (!problem.held.empty()) return sketch;
  sketch.rows.clear();
  double weight = 0;
  for (size_t r = 0; r < problem.rows.size(); ++r)
    if (!problem.rows[r].sampled_context || r % kEach == kEach - 1)
      weight += sketch.rows.emplace_back(problem.rows[r]).weight;
  for (auto& row : sketch.rows) row.weight /= weight;
  return sketch;
}

// Progress of a part of the work, as the share [from, to) of the whole.
ProgressFn part_of(const ProgressFn& whole, double from, double to) {
  if (!whole) return whole;
  return [&whole, from, to](ProgressUpdate update) {
    update.done = from * update.total + (to - from) * update.done;
    whole(update);
  };
}

std::vector<Target> run_stages(const models::Model& model, std::vector<TargetProblem> problems, const TargetSpec& spec,
                               const EditContext& context) {
  constexpr double kSketchShare = 0.3, kSketchRate = 1.5;
  EditContext stage = context;
  stage.progress = part_of(context.progress, 0, kSketchShare);
  stage.trace = nullptr;
  TargetSpec first = spec;
  first.steps = spec.sketch_steps;
  first.lr = spec.lr * kSketchRate;
  const auto sketches = mapped(problems, sketch_of);
  std::vector<Target> sketched = run_engine(model, sketches, first, stage);
  for (size_t i = 0; i < problems.size(); ++i) {
    if (sketched[i].status == FactStatus::kFailed) continue;
    problems[i].kl_before_start = true;
    problems[i].start = [delta_D = sketched[i].delta_D[0]](const at::Tensor& initial_D) {
      return devices::route_like(delta_D, initial_D, devices::Purpose::kDelta, devices::Dtype::kMatch);
    };
  }
  stage.progress = part_of(context.progress, kSketchShare, 1);
  stage.trace = context.trace;
  std::vector<Target> targets = run_engine(model, problems, spec, stage);
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i].steps += sketched[i].steps;
    targets[i].curve.insert(targets[i].curve.begin(), sketched[i].curve.begin(), sketched[i].curve.end());
  }
  return targets;
}

double norm_of(const at::Tensor& x) {
  return x.defined() ? x.norm().item<double>() : 0;
}

}  // namespace

TargetProblem make_target_problem(const RenderedFact& fact) {
  TargetProblem problem;
  problem.case_id = fact.case_id;
  const double weight = 1.0 / static_cast<double>(fact.rows.size());
  for (const auto& row : fact.rows) {
    TargetRow target{with_target(row, fact.target_ids), row.lookup, {}, weight, !problem.rows.empty(), {}, row.again};
    const auto last = static_cast<int64_t>(row.ids.size()) - 1;  // this token predicts the target's first
    for (size_t t = 0; t < fact.target_ids.size(); ++t)
      target.labels.emplace_back(last + static_cast<int64_t>(t), fact.target_ids[t]);
    problem.rows.push_back(std::move(target));
  }
  for (const auto& row : fact.kl_rows) problem.kl_rows.push_back({row.ids, row.lookup, {}, 0, false});
  return problem;
}

std::vector<Target> optimise_targets(const models::Model& model, const std::vector<TargetProblem>& problems,
                                     const TargetSpec& spec, const EditContext& context) {
  check(model, problems, spec);
  const auto optimise = [&](const std::vector<TargetProblem>& some) {
    return spec.sketch_steps > 0 ? run_stages(model, some, spec, context) : run_engine(model, some, spec, context);
  };
  // Traces do not travel between processes: with one, everyone does everything.
  std::vector<Target> targets = context.sharing.alone() || context.trace
                                    ? optimise(problems)
                                    : detail::share_targets(problems, context.sharing, optimise);
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& last = targets[i].curve.empty() ? LossTerms{} : targets[i].curve.back();
    context.log.event(LogLevel::kDebug, "targets.fact",
                      "fact " + std::to_string(problems[i].case_id) + ": loss " + std::to_string(last.loss) +
                          " after " + std::to_string(targets[i].steps) + " steps, " +
                          std::string(to_string(targets[i].status)),
                      {{"case_id", problems[i].case_id},
                       {"loss", last.loss},
                       {"nll", last.nll},
                       {"kl", last.kl},
                       {"weight_decay", last.weight_decay},
                       {"probability", last.probability},
                       {"steps", targets[i].steps}});
  }
  return targets;
}

void record_target(Trace& trace, const std::string& prefix, const TargetProblem& problem, const Target& target,
                   const TargetSpec& spec) {
  auto rows = problem.rows;
  rows.insert(rows.end(), problem.kl_rows.begin(), problem.kl_rows.end());
  const auto ids = mapped(rows, [](const auto& row) { return at::tensor(row.ids, at::kLong); });
  const at::Tensor mask = at::pad_sequence(mapped(ids, [](const at::Tensor& row) { return at::ones_like(row); }), true);
  at::Tensor labels = at::full({std::ssize(problem.rows), mask.size(1)}, -100, at::kLong);
  for (int64_t r = 0; r < labels.size(0); ++r)
    for (const auto& [token, id] : problem.rows[static_cast<size_t>(r)].labels) labels[r][token] = id;
  trace[prefix + "input_ids"] = at::pad_sequence(ids, /*batch_first=*/true);
  trace[prefix + "attention_mask"] = mask;
  trace[prefix + "labels"] = labels;
  trace[prefix + "lookup"] = at::tensor(mapped(rows, &TargetRow::lookup), at::kLong);
  const auto target_ids = mapped(problem.rows[0].labels, [](const auto& label) { return label.second; });
  trace[prefix + "target_ids"] = at::tensor(target_ids, at::kLong);
  for (size_t s = 0; s < target.target_D.size(); ++s) {
    const std::string suffix = spec.sites.size() == 1                        ? ""
                               : spec.sites[s].site == hooks::Site::kAttnOut ? "_attn"
                                                                             : "_mlp";
    trace[prefix + "target_init" + suffix] = target.initial_D[s];
    trace[prefix + "target" + suffix] = target.target_D[s];
    if (!target.trace) continue;
    trace[prefix + "delta_steps" + suffix] = target.trace->delta_steps[s];
    trace[prefix + "grad_steps" + suffix] = target.trace->grad_steps[s];
  }
  if (target.trace) trace[prefix + "nll_each"] = target.trace->nll_each;
  std::vector<double> losses;
  for (const auto& terms : target.curve)
    losses.insert(losses.end(), {terms.loss, terms.nll, terms.kl, terms.weight_decay, terms.probability});
  trace[prefix + "losses"] = at::tensor(losses, at::kDouble).view({-1, 5});
}

FactOutcome make_outcome(const models::Tokenizer& tokenizer, const RenderedFact& fact, const Target& target) {
  FactOutcome outcome;
  outcome.case_id = fact.case_id;
  outcome.status = target.status;
  outcome.reason = target.reason;
  outcome.steps = target.steps;
  outcome.curve = target.curve;
  if (!target.curve.empty()) outcome.last = target.curve.back();
  if (!target.delta_D.empty()) {
    outcome.delta_norm = norm_of(target.delta_D[0]);
    outcome.initial_norm = norm_of(target.initial_D[0]);
  }
  const PromptRow& plain = fact.rows.at(0);
  outcome.token_ids = plain.ids;
  outcome.token_ids.insert(outcome.token_ids.end(), fact.target_ids.begin(), fact.target_ids.end());
  for (const int64_t id : outcome.token_ids) outcome.tokens.push_back(tokenizer.decode_more(std::vector{id}));
  outcome.subject_span = plain.subject;
  outcome.target_span = {static_cast<int64_t>(plain.ids.size()), static_cast<int64_t>(outcome.token_ids.size())};
  outcome.lookup = plain.lookup;
  return outcome;
}

// In the order of FactStatus.
static int severity(FactStatus status) {
  constexpr int kSeverity[] = {0, 2, 1, 3};
  return kSeverity[static_cast<size_t>(status)];
}

std::vector<std::pair<int64_t, int64_t>> cut_target(int64_t tokens, const TargetWindows& windows) {
  EMEND_CHECK(tokens > 0 && windows.overlap >= 0 && (windows.size == 0 || windows.overlap < windows.size),
              "windows that go on");
  if (windows.size == 0) return {{0, tokens}};
  std::vector<std::pair<int64_t, int64_t>> cut;
  for (int64_t begin = 0;; begin += windows.size - windows.overlap) {
    cut.emplace_back(begin, std::min(begin + windows.size, tokens));
    if (cut.back().second == tokens) return cut;
  }
}

RenderedFact window_of(const RenderedFact& fact, std::pair<int64_t, int64_t> window) {
  RenderedFact part = fact;
  const auto [begin, end] = window;
  part.target_ids.assign(fact.target_ids.begin() + begin, fact.target_ids.begin() + end);
  if (begin == 0) return part;
  for (auto& row : part.rows) {
    row.ids.insert(row.ids.end(), fact.target_ids.begin(), fact.target_ids.begin() + begin);
    row.lookup = static_cast<int64_t>(row.ids.size()) - 1;
  }
  part.kl_rows.clear();
  return part;
}

void hold(TargetProblem& problem, const RenderedFact& earlier, const Target& target, bool anchored) {
  EMEND_CHECK(problem.rows.size() == earlier.rows.size(), "windows of the same fact");
  std::vector<at::Tensor> delta_D = target.delta_D;
  for (size_t s = 0; anchored && s < delta_D.size(); ++s) delta_D[s] = target.target_D[s] - target.initial_D[s];
  for (size_t row = 0; row < earlier.rows.size(); ++row)
    problem.held.push_back({row, earlier.rows[row].lookup, delta_D});
}

Target summarise(const std::vector<const Target*>& windows) {
  EMEND_CHECK(!windows.empty(), "a fact has windows");
  Target all = *windows[0];
  all.trace.reset();
  for (size_t w = 0; w < windows.size(); ++w) {
    const Target& one = *windows[w];
    if (w > 0) {
      all.steps += one.steps;
      all.curve.insert(all.curve.end(), one.curve.begin(), one.curve.end());
    }
    if (w > 0 && severity(one.status) > severity(all.status)) {
      all.status = one.status;
      all.reason = one.reason;
    }
    if (windows.size() > 1 && one.status == FactStatus::kFailed)
      all.reason = "window " + std::to_string(w + 1) + ": " + one.reason;
  }
  return all;
}

}  // namespace emend::editors

// Targets go to other processes as JSON. Their vectors are on the host already, in float32 or float64.
template <>
struct nlohmann::adl_serializer<at::Tensor> {
  static void to_json(json& document, const at::Tensor& x_D) {
    const at::Tensor x = x_D.contiguous();
    const auto* bytes = static_cast<const uint8_t*>(x.const_data_ptr());
    document = {{"dtype", static_cast<int>(x.scalar_type())}, {"bytes", json::binary({bytes, bytes + x.nbytes()})}};
  }
  static void from_json(const json& document, at::Tensor& x) {
    const auto& bytes = document.at("bytes").get_binary();
    const auto dtype = static_cast<at::ScalarType>(document.at("dtype").get<int>());
    x = at::empty({static_cast<int64_t>(bytes.size() / c10::elementSize(dtype))}, dtype);
    std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t*>(x.mutable_data_ptr()));
  }
};

namespace emend::editors {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LossTerms, loss, nll, kl, weight_decay, probability)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Target, initial_D, delta_D, target_D, status, reason, steps, curve)  // no traces

namespace detail {
namespace {

// Tokens of a step: what a problem costs, up to the number of steps, which nobody knows before.
int64_t cost_of(const TargetProblem& problem) {
  int64_t tokens = static_cast<int64_t>(problem.kl_rows.size());
  for (const auto& row : problem.rows) tokens += static_cast<int64_t>(row.ids.size());
  return tokens;
}

}  // namespace

std::vector<Target> share_targets(
    const std::vector<TargetProblem>& problems, const devices::WorkSharing& sharing,
    const std::function<std::vector<Target>(const std::vector<TargetProblem>&)>& optimise) {
  const auto costs = mapped(problems, cost_of);
  if (!sharing.equal(packed(costs)))
    throw Error(ErrorClass::kDevice, {"targets", "other prompts or facts in other processes", "the same in all",
                                      "start processes on processors of one kind"});
  return sharing.map(costs, [&](devices::ItemRange range) {
    const auto begin = problems.begin() + static_cast<std::ptrdiff_t>(range.begin);
    return optimise({begin, begin + static_cast<std::ptrdiff_t>(range.size())});
  });
}

void TraceState::store(Target& target) const {
  TargetTrace& trace = target.trace.emplace();
  for (size_t s = 0; s < deltas.size(); ++s) {
    trace.delta_steps.push_back(at::stack(deltas[s]));
    trace.grad_steps.push_back(gradients[s].empty() ? at::zeros({0, target.delta_D[s].size(0)})
                                                    : at::stack(gradients[s]));
  }
  trace.nll_each = at::stack(nll_each);
}
int64_t pad_token(const models::Model& model) {
  if (!model.has_tokenizer()) return 0;
  const auto& tokenizer = model.tokenizer();
  for (const auto& id : {tokenizer.pad_id(), tokenizer.eos_id()})
    if (id && *id < model.vocab_size()) return *id;
  return 0;
}

}  // namespace detail

}  // namespace emend::editors
