#include <emend/core/mapped.h>
#include <emend/core/option.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/devices/planner.h>

#include <algorithm>
#include <limits>

namespace emend::devices {
namespace {

// Spreading a decoder's parts over devices: accelerate's filling rules, and an even cut for simulated devices.

using Kind = DeviceMapSpec::Kind;

/// One part that is placed as a whole, in the order of the forward pass.
struct Unit {
  c10::Device PlacementPlan::*part = nullptr;  ///< null: a layer
  int64_t layer = -1;
  int64_t bytes = 0;
  bool edits = false;
};

std::vector<Unit> units_of(const MemoryModel& model) {
  const bool tied = model.model().tied;
  std::vector<Unit> units;
  const auto head = model.of_head(tied).total();
  units.push_back({&PlacementPlan::embedding, -1, model.of_embedding().total() + (tied ? head : 0)});
  if (model.model().position_bytes > 0) units.push_back({&PlacementPlan::position, -1, model.of_position().total()});
  for (int64_t l = 0; l < model.model().n_layers; ++l)
    units.push_back({nullptr, l, model.of_layer(l).total(), model.is_editing_layer(l)});
  units.push_back({&PlacementPlan::final_norm, -1, model.of_final_norm().total()});
  if (!tied) units.push_back({&PlacementPlan::head, -1, head});
  return units;
}

void put(PlacementPlan& plan, const Unit& unit, c10::Device device, bool tied) {
  (unit.part ? plan.*unit.part : plan.layers[static_cast<size_t>(unit.layer)]) = device;
  if (unit.part != &PlacementPlan::embedding) return;
  plan.position = device;
  if (tied) plan.head = device;
}

/// What every accelerator may take of the units' bytes by the balance: at most its `room`.
std::vector<int64_t> caps_of(const std::vector<Unit>& units, const std::vector<int64_t>& room, Kind kind) {
  auto caps = mapped(room, [](int64_t bytes) { return std::max<int64_t>(bytes, 0); });
  const auto n = std::ssize(caps);
  if (kind == Kind::kSequential || n < 2) return caps;
  const bool low_zero = kind == Kind::kBalancedLow0;
  int64_t total = 0, block = 0;
  for (const auto& unit : units) {
    total += unit.bytes;
    if (!unit.part) block = std::max(block, unit.bytes);
  }
  const int64_t share = total / (low_zero ? n - 1 : n) + static_cast<int64_t>(1.25 * static_cast<double>(block));
  // The last device keeps its full limit, in case the share was too small.
  for (size_t i = low_zero ? 1 : 0; i + 1 < caps.size(); ++i) caps[i] = std::min(caps[i], share);
  if (low_zero) {
    int64_t others = 0;
    for (size_t i = 1; i < caps.size(); ++i) others += caps[i];
    caps[0] = std::min(caps[0], std::max<int64_t>(0, total - others));
  }
  return caps;
}

struct Filled {
  PlacementPlan plan;
  int64_t on_host = 0;  ///< units that no accelerator took
};

Filled fill_once(const MemoryModel& model, const std::vector<Unit>& units, const std::vector<DeviceInfo>& accelerators,
                 const std::vector<int64_t>& room, const std::vector<int64_t>& caps, bool keep_room) {
  const c10::Device host(c10::kCPU);
  Filled filled{PlacementPlan::single(host, model.model().n_layers), 0};
  // The largest part after each, for the room that is kept on the first device.
  std::vector<int64_t> largest_after(units.size(), 0);
  for (size_t i = units.size() - 1; i-- > 0;) largest_after[i] = std::max(largest_after[i + 1], units[i + 1].bytes);
  const int64_t solve = model.work().statistics_on_host ? 0 : model.of_device(host, false, true).solve;
  size_t at = 0;
  int64_t used = 0;
  bool edits = false;
  for (size_t i = 0; i < units.size(); ++i) {
    const auto& unit = units[i];
    for (; at < accelerators.size(); ++at, used = 0, edits = false) {
      const int64_t kept = keep_room && at == 0 ? largest_after[i] : 0;
      const int64_t workspace = unit.edits || edits ? solve : 0;
      if (used + unit.bytes + kept <= caps[at] && used + unit.bytes + workspace <= room[at]) break;
    }
    if (at == accelerators.size()) ++filled.on_host;
    put(filled.plan, unit, at < accelerators.size() ? accelerators[at].device : host, model.model().tied);
    used += unit.bytes;
    edits |= unit.edits;
  }
  return filled;
}

/// Fills the accelerators in order, as accelerate does; what is left goes to the CPU, fits or not.
///   kSequential    each device is filled before the next; on the first, room for the largest part still to
///   come is kept kBalanced      every device but the last takes at most size / n + 1.25 × the largest block
///   kBalancedLow0  the same over n − 1 devices; the first takes only what the others cannot
/// Parts of a tied model's head go with the embedding. The room kept on the first device is given up before a
/// layer would go to the CPU for it.
PlacementPlan fill(const MemoryModel& model, const std::vector<DeviceInfo>& accelerators, Kind kind) {
  const auto units = units_of(model);
  const auto room = mapped(accelerators, [&](const DeviceInfo& info) {  // less what a device needs once
    return info.free_bytes - model.of_device(info.device, true, false).total();
  });
  const auto caps = caps_of(units, room, kind);
  const auto careful = fill_once(model, units, accelerators, room, caps, true);
  if (careful.on_host == 0) return careful.plan;
  const auto tight = fill_once(model, units, accelerators, room, caps, false);
  return tight.on_host < careful.on_host ? tight.plan : careful.plan;
}

/// Contiguous runs of layers over all `devices`, as equal in bytes as can be (least sum of squares). Every device gets
/// a layer if there are enough; with more devices than layers the embedding, then the head, get their own.
PlacementPlan spread_evenly(const MemoryModel& model, const std::vector<c10::Device>& devices) {
  const int64_t n_layers = model.model().n_layers;
  const bool tied = model.model().tied;
  auto remaining = devices;
  auto plan = PlacementPlan::single(devices.front(), n_layers);
  const auto spare = std::ssize(devices) - n_layers;
  const bool own_embedding = spare >= 1, own_head = spare >= 2 && !tied;
  if (own_embedding) remaining.erase(remaining.begin());
  if (own_head) plan.head = plan.final_norm = remaining[static_cast<size_t>(n_layers)];
  const auto parts = static_cast<size_t>(std::min<int64_t>(n_layers, std::ssize(remaining)));
  if (parts == 0) return plan;

  const auto ends = model.of_embedding().total() + model.of_position().total();
  const auto head = model.of_head(tied).total();
  std::vector<double> before(static_cast<size_t>(n_layers) + 1, 0);  // bytes of the layers before each
  for (size_t l = 0; l < before.size() - 1; ++l)
    before[l + 1] = before[l] + static_cast<double>(model.of_layer(static_cast<int64_t>(l)).total());
  const auto load = [&](size_t begin, size_t end) {
    double bytes = before[end] - before[begin];
    if (begin == 0 && !own_embedding) bytes += static_cast<double>(ends + (tied ? head : 0));
    if (end == before.size() - 1 && !own_head)
      bytes += static_cast<double>(model.of_final_norm().total() + (tied ? 0 : head));
    return bytes * bytes;
  };
  // cost[k][l]: least sum of squares of the first l layers in k runs; cut[k][l]: where the last of them begins.
  const auto layers = static_cast<size_t>(n_layers);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> cost(parts + 1, std::vector<double>(layers + 1, kNever));
  std::vector<std::vector<size_t>> cut(parts + 1, std::vector<size_t>(layers + 1, 0));
  cost[0][0] = 0;
  for (size_t k = 1; k <= parts; ++k)
    for (size_t l = k; l <= layers; ++l)
      for (size_t begin = k - 1; begin < l; ++begin) {
        const double sum = cost[k - 1][begin] + load(begin, l);
        if (sum < cost[k][l]) {
          cost[k][l] = sum;
          cut[k][l] = begin;
        }
      }
  for (size_t k = parts, end = layers; k > 0; end = cut[k][end], --k)
    for (size_t l = cut[k][end]; l < end; ++l) plan.layers[l] = remaining[k - 1];
  if (!own_embedding) plan.embedding = plan.position = plan.layers.front();
  if (!own_head) plan.final_norm = plan.layers.back();
  if (!own_head) plan.head = tied ? plan.embedding : plan.layers.back();
  return plan;
}

const DeviceInfo* find_device(const std::vector<DeviceInfo>& machine, c10::Device device) {
  const auto found = std::ranges::find(machine, device, &DeviceInfo::device);
  return found == machine.end() ? nullptr : &*found;
}

void require_devices(const PlanRequest& request) {
  const std::string names = join(request.machine, ", ", [](const DeviceInfo& info) { return to_string(info.device); });
  const auto require = [&](c10::Device device, const std::string& where) {
    if (!find_device(request.machine, device))
      throw Error(ErrorClass::kDevice, {where, "the machine has no " + to_string(device), "one of " + names, ""});
  };
  for (const auto device : request.map.named_devices()) require(device, request.map.source);
  if (!request.imagined) return;  // prepare_devices refused limits of what is not there; others are not used
  for (const auto& [device, bytes] : request.max_memory.limits) require(device, setting("max_memory"));
}

/// The devices of the machine with what may be put on each.
std::vector<DeviceInfo> capacities(const PlanRequest& request) {
  const auto gpu = [&](const DeviceInfo& info) { return is_gpu(info.device, request.imagined); };
  auto devices = request.machine;
  const auto gpus = std::ranges::count_if(devices, gpu);
  for (auto& info : devices)
    if (!request.max_memory.empty())
      info.free_bytes = request.max_memory.of(info.device).value_or(0);
    else if (gpu(info) && gpus == 1)
      info.free_bytes = info.free_bytes / 10 * 9;  // accelerate's margin for a single card
  return devices;
}

/// One request, planned without suggestions.
class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request), model_(request.model, request.work, request.imagined), capacities_(capacities(request)) {
    const auto named = request.map.named_devices();
    const auto meant = [&](c10::Device device) {
      return request.map.kind != Kind::kSimulated || std::ranges::find(named, device) != named.end();
    };
    for (const auto& info : capacities_)
      if (!info.device.is_cpu() && info.free_bytes > 0 && meant(info.device)) accelerators_.push_back(info);
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
      case Kind::kExplicit:
        return place_explicitly(request_.map, request_.names, n_layers, request_.model.tied, warnings);
      case Kind::kSimulated:
        return spread_simulated(warnings);
      default:
        return fill(model_, accelerators_, request_.map.kind);
    }
  }

  PlacementPlan spread_simulated(std::vector<std::string>& warnings) const {
    auto devices = mapped(accelerators_, &DeviceInfo::device);
    if (devices.empty()) devices.emplace_back(kSimulated, c10::DeviceIndex{0});
    auto plan = spread_evenly(model_, devices);
    if (plan.devices().size() < devices.size())
      warnings.push_back(request_.map.source + ": the model has parts for only " +
                         std::to_string(plan.devices().size()) + " of " + std::to_string(devices.size()) + " devices");
    return plan;
  }

  void count(Plan& plan) const {
    plan.devices = model_.account(plan.placement);
    plan.fits = true;
    for (auto& [device, figures] : plan.devices) {
      if (const DeviceInfo* info = find_device(capacities_, device)) figures.limit = info->free_bytes;
      plan.fits = plan.fits && figures.total() <= figures.limit;
    }
  }

  /// Uneven limits may need an uneven cut.
  void try_other_cuts(Plan& plan) const {
    for (const auto kind : {Kind::kBalanced, Kind::kSequential}) {
      Plan other;
      other.placement = fill(model_, accelerators_, kind);
      count(other);
      if (!other.fits) continue;
      other.warnings = std::move(plan.warnings);
      plan = std::move(other);
      plan.warnings.push_back(request_.map.source +
                              ": an even cut does not fit the limits, so the devices are filled in turn");
      return;
    }
  }

  void warn_about_host(Plan& plan) const {
    const c10::Device host(c10::kCPU);
    const auto on_host = std::ranges::count(plan.placement.layers, host);
    if (request_.map.kind == Kind::kExplicit || (accelerators_.empty() && request_.map.kind != Kind::kSimulated) ||
        on_host == 0)
      return;
    plan.warnings.push_back(std::to_string(on_host) + " of " + std::to_string(plan.placement.layers.size()) +
                            " layers do not fit on the accelerators and compute on the CPU");
  }

  const PlanRequest& request_;
  MemoryModel model_;
  std::vector<DeviceInfo> capacities_, accelerators_;
};

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
    if (!Planner(other).run().fits) return false;
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
    attempt([](PlanRequest& r) { r.work.statistics_on_host = true; },
            "statistics and solve fit in host memory, where a run puts them by itself");
  for (const auto& [kind, name] : std::initializer_list<std::pair<Kind, const char*>>{
           {Kind::kBalanced, "balanced"}, {Kind::kSequential, "sequential"}}) {
    if (request.map.kind == kind) continue;
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
  TextTable table({"device", "layers", "weights", "activations", "statistics", "solve", "KV cache", "optimiser",
                   "reserved", "total", "limit"});
  for (const auto& [device, f] : devices) {
    std::vector<std::string> row{to_string(device), std::to_string(std::ranges::count(placement.layers, device))};
    for (const int64_t bytes :
         {f.weights, f.activations, f.statistics, f.solve, f.kv_cache, f.optimiser, f.reserved, f.total(), f.limit})
      row.push_back(format_bytes(bytes));
    table.add(std::move(row));
  }
  std::string text = table.text("");
  text += fits ? "fits\n" : "does NOT fit\n";
  for (const auto& warning : warnings) text += "warning: " + warning + "\n";
  for (const auto& suggestion : suggestions) text += "try: " + suggestion + "\n";
  return text;
}

std::vector<DeviceInfo> parse_machine(const std::string& text) {
  const std::string where = "machine \"" + text + "\"";
  std::vector<DeviceInfo> machine;
  DeviceInfo host{c10::Device(c10::kCPU), "CPU", "", 0, 0};
  const auto bad = [&](const std::string& entry) {
    refuse({where, "\"" + entry + "\" is not a group of devices", "COUNTxSIZE such as 4x24GiB, or cpu=64GiB", ""});
  };
  for (const std::string& entry : list_items(text)) {
    if (entry.starts_with("cpu=")) {
      host.total_bytes = host.free_bytes = parse_bytes(std::string_view(entry).substr(4), where);
      continue;
    }
    const size_t digits = entry.find('x');
    const int count = number_in<int>(entry.substr(0, digits)).value_or(0);
    if (count < 1 || digits == std::string::npos) bad(entry);
    const auto bytes = parse_bytes(std::string_view(entry).substr(digits + 1), where);
    if (machine.size() + static_cast<size_t>(count) > 64) refuse({where, "more than 64 devices", "at most 64", ""});
    if (bytes < (1 << 20))
      refuse({where, "\"" + entry + "\": devices of " + std::to_string(bytes) + " bytes", "at least 1 MiB each",
              "write the unit, such as 4x24GiB"});
    for (int k = 0; k < count; ++k)
      machine.push_back(
          {c10::Device(kSimulated, static_cast<c10::DeviceIndex>(machine.size())), "simulated", "", bytes, bytes});
  }
  machine.push_back(host);
  return machine;
}

}  // namespace emend::devices
