#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/editors/detail/target_engines.h>

#include <nlohmann/json.hpp>

namespace emend::editors::detail {
namespace {

using nlohmann::json;

// Targets are on the host already, in float32 or float64.
json vector_document(const at::Tensor& x_D) {
  const at::Tensor x = x_D.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(x.const_data_ptr());
  return {{"dtype", static_cast<int>(x.scalar_type())}, {"bytes", json::binary({bytes, bytes + x.nbytes()})}};
}

at::Tensor read_vector(const json& document) {
  const auto& bytes = document.at("bytes").get_binary();
  const auto dtype = static_cast<at::ScalarType>(document.at("dtype").get<int>());
  at::Tensor x = at::empty({static_cast<int64_t>(bytes.size() / c10::elementSize(dtype))}, dtype);
  std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t*>(x.mutable_data_ptr()));
  return x;
}

json vectors_document(const std::vector<at::Tensor>& vectors) {
  json list = json::array();
  for (const auto& x_D : vectors) list.push_back(vector_document(x_D));
  return list;
}

std::vector<at::Tensor> read_vectors(const json& list) {
  std::vector<at::Tensor> vectors;
  for (const auto& document : list) vectors.push_back(read_vector(document));
  return vectors;
}

json target_document(const Target& target) {
  json curve = json::array();
  for (const auto& terms : target.curve)
    curve.push_back({terms.loss, terms.nll, terms.kl, terms.weight_decay, terms.probability});
  return {{"initial", vectors_document(target.initial_D)},
          {"delta", vectors_document(target.delta_D)},
          {"target", vectors_document(target.target_D)},
          {"status", static_cast<int>(target.status)},
          {"reason", target.reason},
          {"steps", target.steps},
          {"curve", curve}};
}

Target read_target(const json& document) {
  Target target;
  target.initial_D = read_vectors(document.at("initial"));
  target.delta_D = read_vectors(document.at("delta"));
  target.target_D = read_vectors(document.at("target"));
  target.status = static_cast<FactStatus>(document.at("status").get<int>());
  target.reason = document.at("reason").get<std::string>();
  target.steps = document.at("steps").get<int64_t>();
  for (const auto& terms : document.at("curve"))
    target.curve.push_back({terms.at(0), terms.at(1), terms.at(2), terms.at(3), terms.at(4)});
  return target;
}

// Tokens of a step: what a problem costs, up to the number of steps, which nobody knows before.
int64_t cost_of(const TargetProblem& problem) {
  int64_t tokens = static_cast<int64_t>(problem.kl_rows.size());
  for (const auto& row : problem.rows) tokens += static_cast<int64_t>(row.ids.size());
  return tokens;
}

// Targets as bytes, every number exact, without traces.
std::string encode_targets(const std::vector<Target>& targets) {
  json list = json::array();
  for (const auto& target : targets) list.push_back(target_document(target));
  const auto bytes = json::to_msgpack(list);
  return {bytes.begin(), bytes.end()};
}

std::vector<Target> decode_targets(std::string_view bytes) {
  try {
    std::vector<Target> targets;
    for (const auto& document : json::from_msgpack(bytes.begin(), bytes.end()))
      targets.push_back(read_target(document));
    return targets;
  } catch (const json::exception& error) {
    throw Error(ErrorClass::kCorruption, {"targets of another process", error.what(), "what encode_targets writes",
                                          "run the same version of emend in every process"});
  }
}

}  // namespace

std::vector<Target> share_targets(
    const std::vector<TargetProblem>& problems, const devices::WorkSharing& sharing,
    const std::function<std::vector<Target>(const std::vector<TargetProblem>&)>& optimise) {
  std::vector<int64_t> costs;
  for (const auto& problem : problems) costs.push_back(cost_of(problem));
  return sharing.map<Target>(
      costs,
      [&](devices::ItemRange range) {
        const auto begin = problems.begin() + static_cast<std::ptrdiff_t>(range.begin);
        return optimise({begin, begin + static_cast<std::ptrdiff_t>(range.size())});
      },
      encode_targets, decode_targets);
}

}  // namespace emend::editors::detail
