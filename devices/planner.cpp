#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/detail/balance.h>
#include <emend/devices/planner.h>

#include <algorithm>
#include <charconv>

namespace emend::devices {
namespace {

using Kind = DeviceMapSpec::Kind;

const DeviceInfo* find_device(const std::vector<DeviceInfo>& machine, c10::Device device) {
  for (const auto& info : machine)
    if (info.device == device) return &info;
  return nullptr;
}

void require_devices(const PlanRequest& request) {
  const std::string names = join(request.machine, ", ", [](const DeviceInfo& info) { return to_string(info.device); });
  for (const auto device : request.map.named_devices())
    if (!find_device(request.machine, device))
      throw Error(ErrorClass::kDevice,
                  {request.map.source, "the machine has no " + to_string(device), "one of " + names, ""});
}

/// What may be put on each device of the machine.
std::vector<detail::Capacity> capacities(const PlanRequest& request) {
  int64_t gpus = 0;
  for (const auto& info : request.machine) gpus += info.device.is_cuda();
  std::vector<detail::Capacity> result;
  for (const auto& info : request.machine) {
    int64_t bytes = info.free_bytes;
    if (!request.max_memory.empty())
      bytes = request.max_memory.of(info.device).value_or(0);
    else if (info.device.is_cuda() && gpus == 1)
      bytes = bytes / 10 * 9;  // accelerate's margin for a single card
    result.push_back({info.device, bytes});
  }
  return result;
}

/// One request, planned without suggestions.
class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request), model_(request.model, request.work), capacities_(capacities(request)) {
    for (const auto& c : capacities_)
      if (!c.device.is_cpu() && c.bytes > 0) accelerators_.push_back(c);
  }

  Plan run() {
    require_devices(request_);
    Plan plan;
    plan.placement = place(plan.warnings);
    count(plan);
    if (request_.map.kind == Kind::kSimulated && !plan.fits) try_other_cuts(plan);
    warn_about_host(plan);
    return plan;
  }

 private:
  PlacementPlan place(std::vector<std::string>& warnings) const {
    const auto n_layers = request_.model.n_layers;
    switch (request_.map.kind) {
      case Kind::kSingle:
        return PlacementPlan::single(request_.map.device, n_layers);
      case Kind::kExplicit:
        return place_explicitly(request_.map, request_.names, n_layers, request_.model.tied, warnings);
      case Kind::kSimulated:
        return spread_simulated(warnings);
      case Kind::kSequential:
        return detail::fill(model_, accelerators_, detail::Strategy::kSequential);
      case Kind::kBalancedLow0:
        return detail::fill(model_, accelerators_, detail::Strategy::kBalancedLow0);
      default:
        return detail::fill(model_, accelerators_, detail::Strategy::kBalanced);
    }
  }

  PlacementPlan spread_simulated(std::vector<std::string>& warnings) const {
    std::vector<c10::Device> devices;
    for (const auto& a : accelerators_) devices.push_back(a.device);
    if (devices.empty()) devices.emplace_back(kSimulated, c10::DeviceIndex{0});
    auto plan = detail::spread_evenly(model_, devices);
    if (plan.devices().size() < devices.size())
      warnings.push_back(request_.map.source + ": the model has parts for only " +
                         std::to_string(plan.devices().size()) + " of " + std::to_string(devices.size()) + " devices");
    return plan;
  }

  void count(Plan& plan) const {
    plan.devices = model_.account(plan.placement);
    plan.fits = true;
    for (auto& [device, figures] : plan.devices) {
      for (const auto& c : capacities_)
        if (c.device == device) figures.limit = c.bytes;
      plan.fits = plan.fits && figures.total() <= figures.limit;
    }
  }

  /// Uneven limits may need an uneven cut.
  void try_other_cuts(Plan& plan) const {
    for (const auto strategy : {detail::Strategy::kBalanced, detail::Strategy::kSequential}) {
      Plan other;
      other.placement = detail::fill(model_, accelerators_, strategy);
      count(other);
      if (!other.fits) continue;
      plan.placement = other.placement;
      plan.devices = other.devices;
      plan.fits = true;
      plan.warnings.push_back(request_.map.source +
                              ": an even cut does not fit the limits, so the devices are filled in turn");
      return;
    }
  }

  void warn_about_host(Plan& plan) const {
    const c10::Device host(c10::kCPU);
    const bool asked_for = request_.map.kind == Kind::kSingle || request_.map.kind == Kind::kExplicit;
    const auto on_host = std::count(plan.placement.layers.begin(), plan.placement.layers.end(), host);
    if (asked_for || accelerators_.empty() || on_host == 0) return;
    plan.warnings.push_back(std::to_string(on_host) + " of " + std::to_string(plan.placement.layers.size()) +
                            " layers do not fit on the accelerators and compute on the CPU");
  }

  const PlanRequest& request_;
  MemoryModel model_;
  std::vector<detail::Capacity> capacities_, accelerators_;
};

bool fits(const PlanRequest& request) {
  return Planner(request).run().fits;
}

/// "63KiB", "1200MiB": rounded up, as --max-memory takes it.
std::string limit_text(int64_t bytes) {
  const bool small = bytes < (10LL << 20);
  const int64_t unit = small ? 1LL << 10 : 1LL << 20;
  return std::to_string((bytes + unit - 1) / unit) + (small ? "KiB" : "MiB");
}

/// The limits that this very placement needs, where the devices have that much.
void suggest_limits(const PlanRequest& request, const Plan& plan, std::vector<std::string>& found) {
  std::string limits;
  for (const auto& [device, figures] : plan.devices) {
    const DeviceInfo* info = find_device(request.machine, device);
    if (!request.max_memory.of(device) || !info) return;
    if (device.type() != kSimulated && figures.total() > info->free_bytes) return;
    append_item(limits, to_string(device) + "=" + limit_text(std::max(figures.total(), *request.max_memory.of(device))),
                ",");
  }
  const bool weights_alone = request.work.rows == 0 && request.work.editing_layers.empty();
  if (!limits.empty())
    found.push_back(setting("max_memory", limits) + " fits" +
                    (weights_alone ? " the weights alone; work needs more" : ""));
}

/// Tries changes one at a time and keeps those that fit.
std::vector<std::string> suggest(const PlanRequest& request, const Plan& plan) {
  std::vector<std::string> found;
  const auto attempt = [&](const auto& change, const std::string& text) {
    PlanRequest other = request;
    change(other);
    if (!fits(other)) return false;
    found.push_back(text);
    return true;
  };
  for (int64_t rows = request.work.rows / 2; rows > 0; rows /= 2) {
    const auto change = [rows](PlanRequest& r) {
      r.work.cached_tokens = r.work.cached_tokens / r.work.rows * rows;
      r.work.rows = rows;
    };
    if (attempt(change, "a batch of " + std::to_string(rows) + " rows fits")) break;
  }
  if (request.work.statistics && !request.work.statistics_on_host)
    attempt([](PlanRequest& r) { r.work.statistics_on_host = true; }, "keeping the statistics in host memory fits");
  for (const auto& [kind, name] : std::initializer_list<std::pair<Kind, const char*>>{
           {Kind::kBalanced, "balanced"}, {Kind::kSequential, "sequential"}}) {
    if (request.map.kind == kind || (request.map.kind == Kind::kAuto && kind == Kind::kBalanced)) continue;
    const auto change = [kind = kind](PlanRequest& r) {
      r.map = {};
      r.map.kind = kind;
    };
    if (attempt(change, std::string("the device map \"") + name + "\" fits")) break;
  }
  if (request.model.weight_bytes == 4) {
    const auto halve = [](PlanRequest& r) {
      auto& m = r.model;
      m.weight_bytes = m.compute_bytes = 2;
      for (auto* bytes : {&m.embedding_bytes, &m.position_bytes, &m.final_norm_bytes, &m.head_bytes}) *bytes /= 2;
      for (auto& bytes : m.layer_bytes) bytes /= 2;
    };
    attempt(halve, "bfloat16 weights fit");
  }
  suggest_limits(request, plan, found);
  const DeviceInfo* largest = nullptr;
  for (const auto& info : request.machine)
    if (!info.device.is_cpu() && (!largest || info.free_bytes > largest->free_bytes)) largest = &info;
  for (int more = 1; largest && request.max_memory.empty() && more <= 15; ++more) {
    const auto change = [&](PlanRequest& r) {
      r.map = {};
      r.map.kind = Kind::kSequential;
      for (int k = 0; k < more; ++k) {
        DeviceInfo extra = *largest;
        extra.device = {largest->device.type(), static_cast<c10::DeviceIndex>(64 + k)};
        r.machine.insert(r.machine.end() - 1, extra);
      }
    };
    if (attempt(change, std::to_string(more) + " more device" + (more > 1 ? "s" : "") + " of " +
                            format_bytes(largest->free_bytes) + " would fit"))
      break;
  }
  return found;
}

}  // namespace

Plan make_plan(const PlanRequest& request) {
  Plan plan = Planner(request).run();
  if (!plan.fits) plan.suggestions = suggest(request, plan);
  return plan;
}

void require_fit(const Plan& plan) {
  if (plan.fits) return;
  std::string shortages;
  for (const auto& [device, figures] : plan.devices)
    if (figures.total() > figures.limit)
      append_item(shortages, to_string(device) + " needs " + format_bytes(figures.total()) + " and has " +
                                 format_bytes(figures.limit));
  const std::string advice = join(plan.suggestions, "; ");
  throw Error(ErrorClass::kDevice, {"plan", shortages, "a model and work that fit",
                                    advice.empty() ? "nothing simple that was tried fits" : advice});
}

nlohmann::ordered_json Plan::to_json(const ModuleNames& names) const {
  nlohmann::ordered_json per_device = nlohmann::ordered_json::object();
  for (const auto& [device, figures] : devices) per_device[to_string(device)] = figures.to_json();
  return {{"devices", per_device},
          {"map", placement.to_json(names)},
          {"fits", fits},
          {"warnings", warnings},
          {"suggestions", suggestions}};
}

std::string Plan::to_text() const {
  const auto row = [](const std::string& name, const std::vector<std::string>& cells) {
    std::string line = name + std::string(name.size() < 10 ? 10 - name.size() : 1, ' ');
    for (const auto& cell : cells) line += std::string(cell.size() < 13 ? 13 - cell.size() : 1, ' ') + cell;
    return line + "\n";
  };
  std::string text = row("device", {"layers", "weights", "activations", "statistics", "solve", "KV cache", "optimiser",
                                    "reserved", "total", "limit"});
  for (const auto& [device, f] : devices) {
    const auto layers = std::count(placement.layers.begin(), placement.layers.end(), device);
    std::vector<std::string> cells{std::to_string(layers)};
    for (const int64_t bytes :
         {f.weights, f.activations, f.statistics, f.solve, f.kv_cache, f.optimiser, f.reserved, f.total(), f.limit})
      cells.push_back(format_bytes(bytes));
    text += row(to_string(device), cells);
  }
  text += fits ? "fits\n" : "does NOT fit\n";
  for (const auto& warning : warnings) text += "warning: " + warning + "\n";
  for (const auto& suggestion : suggestions) text += "try: " + suggestion + "\n";
  return text;
}

std::vector<DeviceInfo> parse_machine(const std::string& text, c10::DeviceType type) {
  const std::string where = "machine \"" + text + "\"";
  std::vector<DeviceInfo> machine;
  DeviceInfo host{c10::Device(c10::kCPU), "CPU", "", 0, 0};
  const auto bad = [&](const std::string& entry) {
    throw Error(ErrorClass::kInvalidArgument,
                {where, "\"" + entry + "\" is not a group of devices", "COUNTxSIZE such as 4x24GiB, or cpu=64GiB", ""});
  };
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    begin = end + 1;
    if (entry.starts_with("cpu=")) {
      host.total_bytes = host.free_bytes = parse_bytes(std::string_view(entry).substr(4), where);
      continue;
    }
    int count = 0;
    const auto [after, error] = std::from_chars(entry.data(), entry.data() + entry.size(), count);
    const auto digits = static_cast<size_t>(after - entry.data());
    if (error != std::errc() || count < 1 || digits >= entry.size() || entry[digits] != 'x') bad(entry);
    const auto bytes = parse_bytes(std::string_view(entry).substr(digits + 1), where);
    if (machine.size() + static_cast<size_t>(count) > 64 || bytes < (1 << 20)) bad(entry);  // "4x24" forgot its unit
    for (int k = 0; k < count; ++k)
      machine.push_back(
          {c10::Device(type, static_cast<c10::DeviceIndex>(machine.size())), "simulated", "", bytes, bytes});
  }
  machine.push_back(host);
  return machine;
}

}  // namespace emend::devices
