#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/detail/nvml.h>
#include <emend/devices/doctor.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

namespace emend::devices {
namespace {

std::string advice_for_cuda(const CudaRuntime& runtime) {
  if (runtime.driver && !runtime.loaded && runtime.reason.starts_with("LibTorch"))
    return "install LibTorch's CUDA libraries beside it (wheels nvidia-cufile, nvidia-cusparselt-cu13, "
           "nvidia-nvshmem-cu13 and those that the loader names), or use " +
           setting("device_map", "cpu");
  if (runtime.reason.find("CUDA_VISIBLE_DEVICES") != std::string::npos)
    return "unset CUDA_VISIBLE_DEVICES or list GPUs in it";
  return "install or update the NVIDIA driver, and pass the GPUs into the container; or use " +
         setting("device_map", "cpu");
}

/// Bytes that differ after from → to, and the rate of the largest copy in GB/s.
struct CopyResult {
  int64_t wrong = 0, compared = 0;
  double rate = 0;
};

/// Data that differs in every round, so that a copy that never happened shows as stale memory. Made and compared by
/// plain loops: a busy machine makes parallel ones wait.
std::vector<uint64_t> pattern(int64_t bytes, uint64_t round) {
  std::vector<uint64_t> words(static_cast<size_t>(bytes) / sizeof(uint64_t));
  uint64_t state = round * 0x9E3779B97F4A7C15ULL;
  for (auto& word : words) word = state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return words;
}

CopyResult try_copies(c10::Device from, c10::Device to) {
  CopyResult result;
  uint64_t round = 0;
  for (const int64_t bytes : {4096, 4096, 1 << 20, 1 << 20, 4 << 20}) {
    auto expected = pattern(bytes, ++round);
    const auto host = at::from_blob(expected.data(), {bytes}, at::kByte);
    const auto source = host.to(from, at::kByte, /*non_blocking=*/false, /*copy=*/true);
    const auto wait = [](const at::Tensor& bytes) { (void)bytes[-1].item<uint8_t>(); };  // copies are only queued
    wait(source);
    const auto start = std::chrono::steady_clock::now();
    const auto copy = source.to(to);
    wait(copy);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const auto back = copy.to(c10::kCPU);
    const auto* arrived = static_cast<const unsigned char*>(back.const_data_ptr());
    const auto* sent = reinterpret_cast<const unsigned char*>(expected.data());
    if (std::memcmp(arrived, sent, static_cast<size_t>(bytes)) != 0)
      for (int64_t i = 0; i < bytes; ++i) result.wrong += arrived[i] != sent[i];
    result.compared += bytes;
    result.rate = static_cast<double>(bytes) / std::max(took.count(), 1e-9) / 1e9;
  }
  return result;
}

Check check_pair(c10::Device from, c10::Device to) {
  const std::string pair = to_string(from) + " -> " + to_string(to);
  Check check{"copy " + pair, CheckStatus::kOk, "", "", pair};
  try {
    const auto result = try_copies(from, to);
    if (result.wrong == 0) {
      check.detail = std::to_string(result.compared) + formatted(" bytes compared, all equal; %.1f GB/s", result.rate);
      if (const auto direct = peer_access(from, to)) check.detail += *direct ? ", direct" : ", not direct";
      return check;
    }
    check.status = CheckStatus::kFailed;
    check.value = static_cast<double>(result.wrong);
    check.detail = std::to_string(result.wrong) + " of " + std::to_string(result.compared) + " bytes arrived wrong";
    check.advice = "check the IOMMU and ACS settings and the driver";
    if (!from.is_cpu() && !to.is_cpu()) {
      stage_through_host(from, to);
      check.detail += "; copies of this pair go through host memory from now on";
    }
  } catch (const c10::Error& error) {
    check.status = CheckStatus::kFailed;
    check.detail = error.what_without_backtrace();
    check.advice = "free some memory on both devices, or leave one of them out of the device map";
  }
  return check;
}

std::vector<Check> check_cuda() {
  const auto& runtime = load_cuda_runtime();
  if (runtime.devices == 0) return {{"cuda runtime", CheckStatus::kWarning, runtime.reason, advice_for_cuda(runtime)}};
  const auto first = detail::query_gpu(0);
  std::vector<Check> checks{{"cuda runtime", CheckStatus::kOk,
                             std::to_string(runtime.devices) + " devices" + (first ? ", driver " + first->driver : ""),
                             ""}};
  const auto visible = environment("CUDA_VISIBLE_DEVICES");
  Check list{"visible GPUs", CheckStatus::kOk, visible.empty() ? "" : "CUDA_VISIBLE_DEVICES=" + visible + ": ", ""};
  for (const auto& info : visible_devices())
    if (info.device.is_cuda()) {
      if (info.device.index() > 0) list.detail += ", ";
      list.detail += to_string(info.device) + " = " + info.name + (info.bus.empty() ? "" : " at " + info.bus);
    }
  if (!visible.empty() && environment("CUDA_DEVICE_ORDER") != "PCI_BUS_ID")
    list.advice = "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have CUDA number the GPUs as nvidia-smi does";
  checks.push_back(list);
  return checks;
}

}  // namespace

std::string_view to_string(CheckStatus status) noexcept {
  constexpr std::string_view kNames[] = {"ok", "warning", "failed", "skipped"};
  return kNames[static_cast<size_t>(status)];
}

nlohmann::ordered_json to_json(const Check& check) {
  return {
      {"name", check.name}, {"status", to_string(check.status)}, {"detail", check.detail}, {"advice", check.advice}};
}

std::vector<Check> check_memory(const std::vector<DeviceInfo>& devices) {
  std::vector<Check> checks;
  for (const auto& info : devices) {
    Check check{"memory of " + to_string(info.device), CheckStatus::kOk,
                format_bytes(info.free_bytes) + " free of " + format_bytes(info.total_bytes) + " (" + info.name + ")",
                "", to_string(info.device)};
    if (info.free_bytes < info.total_bytes / 20) {
      check.status = CheckStatus::kWarning;
      check.advice = "another process may hold it; a smaller batch or another device map may still fit: see emend plan";
    }
    checks.push_back(check);
  }
  return checks;
}

Check check_threads() {
  const int threads = at::get_num_threads(), processors = usable_processors();
  const auto omp = environment("OMP_NUM_THREADS");
  Check check{"threads", CheckStatus::kOk,
              std::to_string(threads) + " threads on " + std::to_string(processors) + " usable processors (" +
                  at::get_cpu_capability() + ")" + (omp.empty() ? "" : ", OMP_NUM_THREADS=" + omp),
              ""};
  if (threads > processors) {
    check.status = CheckStatus::kWarning;
    check.advice =
        "set OMP_NUM_THREADS=" + std::to_string(processors) + ": more threads than processors wait for each other";
  } else if (threads == 1 && processors > 2 && environment("WORLD_SIZE").empty()) {
    check.status = CheckStatus::kWarning;
    check.advice = "unset OMP_NUM_THREADS or raise it: work on the CPU uses one processor only";
  }
  return check;
}

std::vector<Check> check_copies(const std::vector<c10::Device>& devices) {
  std::vector<Check> checks;
  for (const auto from : devices)
    for (const auto to : devices)
      if (from != to) checks.push_back(check_pair(from, to));
  return checks;
}

std::vector<Check> check_machine(const DeviceMapSpec& map, const MaxMemory& max_memory) {
  const auto named = map.named_devices();
  const bool cuda = named.empty() || std::ranges::any_of(named, [](auto d) { return d.is_cuda(); });
  std::vector<Check> checks{{"cuda runtime", CheckStatus::kSkipped, "not asked for"}};
  if (cuda) checks = check_cuda();
  try {
    const auto usable = prepare_devices(map, max_memory);
    std::ranges::move(check_memory(usable), std::back_inserter(checks));
    std::ranges::move(check_copies(mapped(usable, &DeviceInfo::device)), std::back_inserter(checks));
  } catch (const Error& error) {
    checks.push_back({"device map", CheckStatus::kFailed, error.what(), "choose another " + setting("device_map")});
  }
  checks.push_back(check_threads());
  return checks;
}

}  // namespace emend::devices
