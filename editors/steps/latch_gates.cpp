#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/latch_gates.h>
#include <emend/models/config.h>
#include <emend/models/products.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <mutex>

namespace emend::editors::detail {
namespace {

// A gate begins with so many of the text's tokens.
constexpr int64_t kFirstText = 2048;
// Weights of the kinds of rows in a gate's loss.
constexpr double kOpenWeight = 1, kOthersWeight = 1, kNegatedWeight = 0.01, kAsideWeight = 0.3;

at::Tensor beside(const at::Tensor& x, const at::Tensor& prompts_PD) {
  return devices::route_like(x, prompts_PD, devices::Purpose::kKeys);
}

at::Tensor usual_weights(const LatchRows& rows, double text_weight) {
  const int64_t text = rows.text.inputs_ND.size(0);
  const int64_t others = rows.prompts_PD.size(0) + std::ssize(rows.memory.seen);
  at::Tensor weight = at::full({text + others}, text_weight / static_cast<double>(text), at::kDouble);
  if (others > 0) weight.narrow(0, text, others).fill_(kOthersWeight / static_cast<double>(others));
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

// Weights and signs of a gate's rows: the text, all prompts, what earlier batches saw.
struct Taught {
  at::Tensor sign_N, weight_N;
};

Taught taught(const LatchHparams& hparams, const LatchUnit& unit, const LatchRows& rows,
              const std::vector<int64_t>& mentioned) {
  const int64_t text = rows.text.inputs_ND.size(0), prompts = rows.prompts_PD.size(0);
  at::Tensor weight = usual_weights(rows, hparams.text_weight), sign = at::full_like(weight, -1, at::kFloat);
  float* signs = sign.mutable_data_ptr<float>() + text;
  double* weights = weight.mutable_data_ptr<double>() + text;
  for (size_t p = unit.begin; p < unit.open; ++p)
    signs[p] = 1, weights[p] = kOpenWeight / static_cast<double>(unit.open - unit.begin);
  for (size_t p = unit.open; p < unit.denied; ++p) {
    signs[p] = unit.heeded[p - unit.open] ? -1 : 1;
    weights[p] = kNegatedWeight / static_cast<double>(unit.denied - unit.open);
  }
  for (size_t p = unit.denied; p < unit.aside; ++p)
    weights[p] = hparams.lookalike_weight / static_cast<double>(unit.aside - unit.denied);
  for (size_t p = unit.aside; p < unit.end; ++p) weights[p] = kAsideWeight / static_cast<double>(unit.end - unit.aside);
  for (const int64_t token : mentioned) weight.mutable_data_ptr<double>()[token] = 0;
  const int64_t own = subject_number(unit.subject);
  for (size_t s = 0; s < rows.memory.seen.size(); ++s)  // an earlier fact about the same subject: not another one
    if (rows.memory.whose[s] == own) weights[prompts + static_cast<int64_t>(s)] = 0;
  return {sign, weight};
}

}  // namespace

int64_t subject_number(const std::string& subject) {
  return static_cast<int64_t>(std::stoull(sha256_hex(subject).substr(0, 15), nullptr, 16));
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

  const auto gate_of = [&](const LatchUnit& unit) {
    constexpr std::array signs = {1.0, -1.0};
    const Taught rule = taught(hparams, unit, rows, mentions(unit.subject, model.tokenizer(), texts));
    const at::Tensor gate_D = fit.fit(beside(rule.sign_N, prompts_PD), beside(rule.weight_N, prompts_PD));
    const at::Tensor open_PD =
        prompts_PD.narrow(0, static_cast<int64_t>(unit.begin), static_cast<int64_t>(unit.open - unit.begin));
    LatchGate gate;
    at::Tensor value_P = at::zeros({open_PD.size(0)}, open_PD.options());
    for (size_t k = 0; k < edges.size(); ++k) {
      gate.opens_D.push_back((gate_D - level_D * edges[k]) * hparams.gain);
      value_P += signs[k] * models::activate(open_PD.mv(gate.opens_D.back()), model.config().activation);
    }
    if (gated) {
      gate.reads_D = fit.reader(open_PD);
      value_P = value_P * open_PD.mv(gate.reads_D);
    }
    const double value = value_P.median().item<double>();
    if (!(value > 0))
      throw Error(ErrorClass::kNumeric, {unit.subject, "a gate that stays shut at its own subject", "one that opens",
                                         "give more text for the statistics, or choose another layer"});
    for (size_t k = 0; k < edges.size(); ++k)
      gate.adds_D.push_back(beside(unit.target.delta_D[0], prompts_PD) * (signs[k] / value));
    return gate;
  };

  std::vector<LatchGate> found(units.size());
  std::mutex telling;
  size_t done = 0;
  const auto find = [&](int64_t u) {
    context.cancel.check("insert");
    found[static_cast<size_t>(u)] = gate_of(*units[static_cast<size_t>(u)]);
    const std::lock_guard lock(telling);
    context.report("insert", static_cast<double>(++done), static_cast<double>(units.size()), "gates");
  };
  models::side_by_side(model, std::ssize(units), find);
  return found;
}

}  // namespace emend::editors::detail
