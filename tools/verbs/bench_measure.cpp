#include "bench_measure.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/models/products.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

namespace emend::tools {
namespace {

using nlohmann::ordered_json;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<c10::Device> devices_of(const models::Model& model) {
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  for (const auto device : model.placement().devices())
    if (!device.is_cpu()) devices.push_back(device);
  return devices;
}

// Of products as LibTorch makes them by default, or as the models make them.
double gemm_peak(at::ScalarType dtype, c10::Device device, int64_t size, bool as_models) {
  const models::PlainProducts plain(!as_models);
  const auto make = [&] {
    return devices::route_to(at::rand({size, size}, at::kFloat).to(dtype), device, devices::Purpose::kOther);
  };
  const at::Tensor a = make(), b = make();
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double begin = now();
    const at::Tensor product = models::product(a, b);
    (void)product[0][0].item();  // waits for the device
    best = std::max(best, 2e-9 * static_cast<double>(size * size * size) / (now() - begin));
  }
  return best;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

double load() {
  double one = 0;
  std::ifstream("/proc/loadavg") >> one;
  return one;
}

}  // namespace

Measure measured(const models::Model& model, const std::function<void()>& work) {
  const auto devices = devices_of(model);
  for (const auto device : devices) devices::reset_peak_memory(device);
  const int64_t flops = models::linear_flops();
  const double begin = now();
  work();
  Measure measure{now() - begin, 1e-9 * static_cast<double>(models::linear_flops() - flops), {}};
  for (const auto device : devices)
    measure.peak_bytes[device.is_cpu() ? "host" : devices::to_string(device)] =
        devices::device_memory_stats(device).peak;
  return measure;
}

ordered_json describe_machine(const models::Model& model) {
  const c10::Device device = model.placement().layers.front();
  const int64_t size = device.is_cuda() ? 8192 : 1536;
  const double plain = gemm_peak(at::kFloat, device, size, false), best = gemm_peak(at::kFloat, device, size, true);
  return {{"cpu", processor()},
          {"cores", static_cast<int64_t>(std::thread::hardware_concurrency())},
          {"threads", at::get_num_threads()},
          {"load", load()},
          {"device", devices::to_string(device)},
          {"gemm_peak_gflops",
           {{"float32", std::max(plain, best)},
            {"float32_libtorch", plain},
            {"bfloat16", gemm_peak(at::kBFloat16, device, size, true)}}}};
}

ordered_json phase_document(const Measure& reference, const Measure& fast, double peak, int64_t facts) {
  ordered_json document;
  if (reference.seconds > 0) document["reference_s"] = reference.seconds;
  document["fast_s"] = fast.seconds;
  if (reference.seconds > 0) document["ratio"] = reference.seconds / fast.seconds;
  if (facts > 0) document["facts_per_second"] = static_cast<double>(facts) / fast.seconds;
  if (fast.gflop > 0) {
    document["gflop"] = fast.gflop;
    if (reference.gflop > 0) document["reference_gflop"] = reference.gflop;
    document["fraction_of_peak"] = fast.gflop / fast.seconds / peak;
  }
  if (!fast.peak_bytes.is_null()) document["peak_bytes"] = fast.peak_bytes;
  return document;
}

}  // namespace emend::tools
