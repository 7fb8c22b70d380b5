#include "figures.h"

#include <ATen/Parallel.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svdvals.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/devices/units.h>
#include <sys/utsname.h>

#include <algorithm>
#include <thread>

namespace emend::tools {
namespace {

constexpr int64_t kSpectrum = 16;  // singular values shown
constexpr int64_t kDense = 2048;   // largest side of a dense update that is decomposed

// Leading singular values; of factors, those of the small matrix between their orthogonal bases.
std::vector<double> spectrum(const editors::WeightDelta& delta) {
  at::Tensor core;
  if (delta.low_rank()) {
    const auto r_left = std::get<1>(at::linalg_qr(delta.left_DR.to(at::kDouble), "r"));
    const auto r_right = std::get<1>(at::linalg_qr(delta.right_FR.to(at::kDouble), "r"));
    core = r_left.matmul(r_right.t());
  } else {
    if (delta.dense_DF.dim() != 2 || std::min(delta.dense_DF.size(0), delta.dense_DF.size(1)) > kDense) return {};
    core = delta.dense_DF.to(at::kDouble);
  }
  const at::Tensor values = devices::to_host(at::linalg_svdvals(core), devices::Purpose::kHost).contiguous();
  const auto* begin = values.const_data_ptr<double>();
  return {begin, begin + std::min(kSpectrum, values.numel())};
}

}  // namespace

std::map<std::string, double> survived_by_weight(const std::vector<FinishedBatch>& batches) {
  std::map<std::string, double> survived;
  for (const auto& batch : batches)
    for (const auto& layer : batch.layers) {
      const double kept = layer.value("survived", 1.0);
      const auto [it, fresh] = survived.emplace(layer.value("weight", ""), kept);
      if (!fresh) it->second = std::min(it->second, kept);
    }
  return survived;
}

nlohmann::json layer_figures(const std::vector<FinishedBatch>& batches, const models::Model& model) {
  std::vector<editors::WeightDelta> all;
  const auto survived = survived_by_weight(batches);
  for (const auto& batch : batches) all.insert(all.end(), batch.deltas.begin(), batch.deltas.end());
  nlohmann::json out = nlohmann::json::array();
  for (const auto& delta : editors::merge_deltas(all)) {
    const double norm = delta.norm();
    nlohmann::json one = {
        {"layer", delta.layer}, {"weight", delta.weight}, {"update_norm", norm}, {"spectrum", spectrum(delta)}};
    if (model.has_weight(delta.weight)) {
      const double whole = model.weight(delta.weight).to(at::kFloat).norm().item<double>();
      one["weight_norm"] = whole;
      if (whole > 0) one["relative"] = norm / whole;
    }
    if (const auto it = survived.find(delta.weight); it != survived.end()) one["survived"] = it->second;
    out.push_back(std::move(one));
  }
  return out;
}

nlohmann::json machine_figures() {
  utsname system{};
  ::uname(&system);
  std::string devices;
  for (const auto& device : devices::visible_devices())
    devices += (devices.empty() ? "" : "; ") + devices::to_string(device.device) + ": " + device.name + ", " +
               devices::format_bytes(device.total_bytes);
  return {{"devices", devices},
          {"processors", std::thread::hardware_concurrency()},
          {"threads", at::get_num_threads()},
          {"system", std::string(system.sysname) + " " + system.release + " " + system.machine}};
}

nlohmann::json memory_figures(const models::Model& model) {
  nlohmann::json out = nlohmann::json::object();
  for (const auto device : model.placement().devices())
    out[devices::to_string(device)] = {{"weights", 0}, {"peak", devices::device_memory_stats(device).peak}};
  std::map<const void*, bool> seen;  // tied weights share their bytes
  for (const auto& name : model.weight_names())
    for (const auto& weight : model.weight_copies(name)) {
      if (!seen.emplace(weight.data_ptr(), true).second) continue;
      auto& device = out[devices::to_string(weight.device())]["weights"];
      device = (device.is_number() ? device.get<int64_t>() : 0) + static_cast<int64_t>(weight.nbytes());
    }
  return out;
}

}  // namespace emend::tools
