#include <emend/devices/detail/balance.h>

#include <algorithm>
#include <limits>

namespace emend::devices::detail {
namespace {

/// One part that is placed as a whole, in the order of the forward pass.
struct Unit {
  enum class Part { kEmbedding, kPosition, kLayer, kFinalNorm, kHead };
  Part part;
  int64_t layer = -1;
  int64_t bytes = 0;
  bool edits = false;
};

std::vector<Unit> units_of(const MemoryModel& model) {
  using Part = Unit::Part;
  const bool tied = model.model().tied;
  std::vector<Unit> units;
  const auto head = model.of_head(tied).total();
  units.push_back({Part::kEmbedding, -1, model.of_embedding().total() + (tied ? head : 0), false});
  if (model.model().position_bytes > 0) units.push_back({Part::kPosition, -1, model.of_position().total(), false});
  for (int64_t l = 0; l < model.model().n_layers; ++l)
    units.push_back({Part::kLayer, l, model.of_layer(l).total(), model.is_editing_layer(l)});
  units.push_back({Part::kFinalNorm, -1, model.of_final_norm().total(), false});
  if (!tied) units.push_back({Part::kHead, -1, head, false});
  return units;
}

void put(PlacementPlan& plan, const Unit& unit, c10::Device device, bool tied) {
  switch (unit.part) {
    case Unit::Part::kEmbedding:
      plan.embedding = plan.position = device;
      if (tied) plan.head = device;
      break;
    case Unit::Part::kPosition:
      plan.position = device;
      break;
    case Unit::Part::kLayer:
      plan.layers[static_cast<size_t>(unit.layer)] = device;
      break;
    case Unit::Part::kFinalNorm:
      plan.final_norm = device;
      break;
    case Unit::Part::kHead:
      plan.head = device;
      break;
  }
}

/// What every accelerator may take of the units' bytes: its own limit less what it needs once, and the
/// balance.
std::vector<int64_t> caps_of(const MemoryModel& model, const std::vector<Unit>& units,
                             const std::vector<Capacity>& accelerators, Strategy strategy) {
  std::vector<int64_t> caps;
  for (const auto& a : accelerators)
    caps.push_back(std::max<int64_t>(a.bytes - model.of_device(a.device, true, false).total(), 0));
  const auto n = static_cast<int64_t>(caps.size());
  if (strategy == Strategy::kSequential || n < 2) return caps;
  const bool low_zero = strategy == Strategy::kBalancedLow0;
  int64_t total = 0, block = 0;
  for (const auto& unit : units) {
    total += unit.bytes;
    if (unit.part == Unit::Part::kLayer) block = std::max(block, unit.bytes);
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

Filled fill_once(const MemoryModel& model, const std::vector<Unit>& units, const std::vector<Capacity>& accelerators,
                 const std::vector<int64_t>& caps, bool keep_room) {
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
      const int64_t room = keep_room && at == 0 ? largest_after[i] : 0;
      const int64_t workspace = unit.edits || edits ? solve : 0;
      const int64_t hard = accelerators[at].bytes - model.of_device(accelerators[at].device, true, false).total();
      if (used + unit.bytes + room <= caps[at] && used + unit.bytes + workspace <= hard) break;
    }
    if (at == accelerators.size()) ++filled.on_host;
    put(filled.plan, unit, at < accelerators.size() ? accelerators[at].device : host, model.model().tied);
    used += unit.bytes;
    edits |= unit.edits;
  }
  return filled;
}

}  // namespace

PlacementPlan fill(const MemoryModel& model, const std::vector<Capacity>& accelerators, Strategy strategy) {
  const auto units = units_of(model);
  const auto caps = caps_of(model, units, accelerators, strategy);
  const auto careful = fill_once(model, units, accelerators, caps, true);
  if (careful.on_host == 0) return careful.plan;
  const auto tight = fill_once(model, units, accelerators, caps, false);
  return tight.on_host < careful.on_host ? tight.plan : careful.plan;
}

PlacementPlan spread_evenly(const MemoryModel& model, const std::vector<c10::Device>& devices) {
  const int64_t n_layers = model.model().n_layers;
  const bool tied = model.model().tied;
  auto remaining = devices;
  auto plan = PlacementPlan::single(devices.front(), n_layers);
  const auto spare = static_cast<int64_t>(devices.size()) - n_layers;
  const bool own_embedding = spare >= 1, own_head = spare >= 2 && !tied;
  if (own_embedding) remaining.erase(remaining.begin());
  if (own_head) plan.head = plan.final_norm = remaining[static_cast<size_t>(n_layers)];
  const auto parts = static_cast<size_t>(std::min<int64_t>(n_layers, static_cast<int64_t>(remaining.size())));
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
  // cost[k][l]: least sum of squares of the first l layers in k runs; cut[k][l]: where the last of them
  // begins.
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

}  // namespace emend::devices::detail
