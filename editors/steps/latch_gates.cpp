#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/latch_gates.h>
#include <emend/editors/detail/latch_memory.h>
#include <emend/models/config.h>
#include <emend/models/products.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <map>

namespace emend::editors::detail {
namespace {

// A gate begins with so many of the text's tokens.
constexpr int64_t kFirstText = 2048;
// Gates that are searched at once, of which each holds a matrix of D·D.
constexpr int64_t kMostGates = 64, kGateBytes = int64_t{1} << 29;
// Weights of the kinds of rows in a gate's loss.
constexpr double kOpenWeight = 1, kOthersWeight = 1, kNegatedWeight = 0.01, kAsideWeight = 0.3,
                 kSeenWeight = 0.02;  // each, of earlier batches

at::Tensor beside(const at::Tensor& x, const at::Tensor& prompts_PD) {
  return devices::route_like(x, prompts_PD, devices::Purpose::kKeys);
}

at::Tensor usual_weights(const LatchRows& rows, double text_weight) {
  const int64_t text = rows.text.inputs_ND.size(0), prompts = rows.prompts_PD.size(0);
  at::Tensor weight = at::full({text + prompts + std::ssize(rows.memory.seen)}, kSeenWeight, at::kDouble);
  weight.narrow(0, 0, text).fill_(text_weight / static_cast<double>(text));
  if (prompts > 0) weight.narrow(0, text, prompts).fill_(kOthersWeight / static_cast<double>(prompts));
  return weight;
}

// Tokens of the text with which the subject ends where it is spoken of there: the gate may be open at these.
std::vector<int64_t> mentions(const std::string& subject, const models::Tokenizer& tokenizer, const LatchTexts& texts) {
  std::vector<int64_t> found;
  for (const std::string& spelling : {subject, " " + subject}) {
    const std::vector<int64_t> ids = tokenizer.encode_ids(spelling, false);
    int64_t begin = 0;
    for (const auto& row : texts.rows) {
      for (auto at = row.begin(); (at = std::search(at, row.end(), ids.begin(), ids.end())) != row.end(); ++at)
        found.push_back(begin + (at - row.begin()) + std::ssize(ids) - 1);
      begin += std::ssize(row);
    }
  }
  return found;
}

// What this gate wants: of its own prompts, of the text where its subject is spoken of, and of what earlier batches saw
// of it.
GateRule rule_of(const LatchHparams& hparams, const LatchUnit& unit, const LatchRows& rows,
                 const std::vector<int64_t>& mentioned) {
  const int64_t text = rows.text.inputs_ND.size(0), prompts = rows.prompts_PD.size(0);
  std::map<int64_t, std::pair<float, double>> wants;  // sign and weight by row
  const auto want = [&](size_t begin, size_t end, double weight, const auto& open) {
    for (size_t p = begin; p < end; ++p)
      wants[text + static_cast<int64_t>(p)] = {open(p) ? 1.0F : -1.0F, weight / static_cast<double>(end - begin)};
  };
  const auto shut = [](size_t) { return false; };
  want(unit.begin, unit.open, kOpenWeight, [](size_t) { return true; });
  want(unit.open, unit.denied, kNegatedWeight, [&](size_t p) { return !unit.heeded[p - unit.open]; });
  want(unit.denied, unit.aside, hparams.lookalike_weight, shut);
  want(unit.aside, unit.end, kAsideWeight, shut);
  for (const int64_t token : mentioned) wants[token] = {-1.0F, 0.0};
  const int64_t own = subject_number(unit.subject);
  for (size_t s = 0; s < rows.memory.seen.size(); ++s)  // an earlier fact about the same subject: not another one
    if (rows.memory.whose[s] == own) wants[text + prompts + static_cast<int64_t>(s)] = {-1.0F, 0.0};
  std::vector<int64_t> index;
  std::vector<float> signs;
  std::vector<double> weights;
  for (const auto& [row, wanted] : wants) {
    index.push_back(row);
    signs.push_back(wanted.first);
    weights.push_back(wanted.second);
  }
  const auto there = [&](const at::Tensor& x) { return beside(x, rows.prompts_PD); };
  return {there(at::tensor(index, at::kLong)), there(at::tensor(signs, at::kFloat)),
          there(at::tensor(weights, at::kDouble))};
}

}  // namespace

LatchRoom::LatchRoom(const LatchHparams& hparams, const std::vector<LayerMemory>& memory, const models::Model& model)
    : room_(hparams.room) {
  for (const int64_t layer : hparams.all_layers()) {
    const int at = static_cast<int>(layer);
    layers_.push_back({.used = memory[layers_.size()].used.size(),
                       .vacant = vacant_neurons(model, MlpWeights::of(model, at)).size(),
                       .width = model.edit_site(at).in_features});
  }
}

size_t LatchRoom::take(size_t begin, size_t end, size_t neurons) {
  const auto first = layers_.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = layers_.begin() + static_cast<std::ptrdiff_t>(end);
  auto best = std::find_if(first, last, [&](const Layer& layer) { return layer.vacant >= neurons; });
  if (best == last)
    best = std::find_if(first, last, [&](const Layer& layer) {
      return static_cast<double>(layer.used) < room_ * static_cast<double>(layer.width);
    });
  if (best == last) best = std::ranges::min_element(first, last, {}, &Layer::used);
  best->vacant -= std::min(best->vacant, neurons);
  best->used += neurons;
  return static_cast<size_t>(best - layers_.begin());
}

std::vector<LatchGate> find_gates(const LatchHparams& hparams, const LatchTexts& texts, const models::Model& model,
                                  std::span<LatchUnit* const> units, const LatchRows& rows,
                                  const EditContext& context) {
  const int64_t text = rows.text.inputs_ND.size(0);
  const at::Tensor& prompts_PD = rows.prompts_PD;
  const size_t place = units[0]->layer;
  const bool gated = MlpWeights::of(model, static_cast<int>(hparams.all_layers()[place])).gated();
  const bool release = place >= hparams.layers.size();
  const std::vector<double> edges = release ? std::vector{0.0} : std::vector{hparams.shut, hparams.open};
  std::vector<at::Tensor> all = {rows.text.inputs_ND.to(at::kFloat), prompts_PD};
  if (!rows.memory.seen.empty()) all.push_back(beside(at::stack(rows.memory.seen), prompts_PD));
  const GateFit fit(at::cat(all), beside(usual_weights(rows, hparams.text_weight), prompts_PD),
                    {text, text / kFirstText});
  const at::Tensor level_D = fit.level();

  const auto gate_of = [&](const LatchUnit& unit, const at::Tensor& gate_D) {
    constexpr std::array signs = {1.0, -1.0};
    const at::Tensor open_PD =
        prompts_PD.narrow(0, static_cast<int64_t>(unit.begin), static_cast<int64_t>(unit.open - unit.begin));
    LatchGate gate;
    at::Tensor value_P = at::zeros({open_PD.size(0)}, open_PD.options());
    for (size_t k = 0; k < edges.size(); ++k) {
      gate.opens_D.push_back((gate_D - level_D * edges[k]) * hparams.gain);
      value_P += signs[k] * models::activate(open_PD.mv(gate.opens_D.back()), model.config().activation);
    }
    if (gated) {
      gate.reads_D = release ? level_D : fit.reader(open_PD);
      value_P = value_P * open_PD.mv(gate.reads_D);
    }
    gate.value = value_P.median().item<double>();
    if (!(gate.value > 0)) return LatchGate{};
    for (size_t k = 0; k < edges.size(); ++k)
      gate.adds_D.push_back(beside(unit.target.delta_D[0], prompts_PD) * (signs[k] / gate.value));
    return gate;
  };

  const int64_t width = prompts_PD.size(1);
  const auto at_once = static_cast<size_t>(std::clamp<int64_t>(kGateBytes / (8 * width * width), 4, kMostGates));
  std::vector<LatchGate> found(units.size());
  for (size_t begin = 0; begin < units.size(); begin += at_once) {
    context.cancel.check("insert");
    const auto some = units.subspan(begin, std::min(at_once, units.size() - begin));
    std::vector<GateRule> rules;
    for (const LatchUnit* unit : some)
      rules.push_back(rule_of(hparams, *unit, rows, mentions(unit->subject, model.tokenizer(), texts)));
    const auto gates = fit.fit(rules);
    models::side_by_side(model, std::ssize(some), [&](int64_t u) {
      const auto k = static_cast<size_t>(u);
      found[begin + k] = gate_of(*some[k], gates[k]);
    });
    context.report("insert", static_cast<double>(begin + some.size()), static_cast<double>(units.size()), "gates");
  }
  return found;
}

}  // namespace emend::editors::detail
