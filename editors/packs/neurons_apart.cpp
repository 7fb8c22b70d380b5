#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/safetensors.h>
#include <emend/core/text.h>
#include <emend/editors/detail/ledger_state.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/models/checkpoint.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>

namespace emend::editors {
namespace {

using Places = std::vector<int64_t>;

// Where a norm is more than what is left of nothing in a change that was brought to its rank.
Places written(const at::Tensor& norm) {
  constexpr double kRounding = 1e-12;  // of the largest
  const at::Tensor places = (norm > kRounding * norm.max()).nonzero().squeeze(1).contiguous();
  return {places.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>() + places.numel()};
}

// A change with its neurons taken from one place to another; nothing if the weight is not one of theirs. Those of
// W_down are columns.
std::optional<WeightDelta> moved(const WeightDelta& delta, bool down, int64_t width, const Places& from,
                                 const Places& to, const OriginalWeight& original) {
  const auto shape = delta.shape();
  const int64_t rows = down ? width : shape[0];  // gate and up in one matrix: twice as many
  at::Tensor weight = original(delta.weight);
  if (!weight.defined() || weight.dim() != std::ssize(shape) || rows % width != 0) return std::nullopt;
  weight = weight.to(at::kDouble);
  if (weight.dim() == 2 && (delta.orientation == models::Orientation::kInOut) != down) weight = weight.t();
  if (weight.size(0) != rows || (weight.dim() == 2 && weight.size(1) != shape[down ? 0 : 1])) return std::nullopt;
  Places old, now;
  for (int64_t part = 0; part < rows; part += width)
    for (size_t e = 0; e < from.size(); ++e) old.push_back(from[e] + part), now.push_back(to[e] + part);
  const at::Tensor old_E = at::tensor(old, at::kLong), now_E = at::tensor(now, at::kLong);
  const at::Tensor apart = weight.index_select(0, old_E) - weight.index_select(0, now_E);
  WeightDelta result = delta;
  if (!delta.low_rank()) {
    at::Tensor change = (down ? delta.dense_DF.t() : delta.dense_DF).to(at::kDouble).clone();
    const at::Tensor there = change.index_select(0, old_E) + apart;
    change.index_fill_(0, old_E, 0).index_copy_(0, now_E, there);
    result.dense_DF = (down ? change.t() : change).contiguous();
    return result;
  }
  at::Tensor own = (down ? delta.right_FR : delta.left_DR).to(at::kDouble);
  const at::Tensor other = (down ? delta.left_DR : delta.right_FR).to(at::kDouble);
  const at::Tensor there = own.index_select(0, old_E).mm(other.t()) + apart;
  const at::Tensor places = at::one_hot(now_E, rows).t().to(at::kDouble);
  own = at::cat({own.index_fill(0, old_E, 0), places}, 1);
  const at::Tensor values = at::cat({other, there.t()}, 1);
  result.left_DR = down ? values : own;
  result.right_FR = down ? own : values;
  return result;
}

// Whether a change of this weight, in the layer of neurons, is theirs: it writes rows of them alone.
bool of_neurons(const WeightDelta& delta, int64_t width, const std::set<int64_t>& taken) {
  const auto shape = delta.shape();
  if (shape[0] % width != 0) return false;
  const Places rows =
      written(delta.low_rank() ? delta.left_DR.abs().amax(1) : delta.dense_DF.abs().reshape({shape[0], -1}).amax(1));
  return std::ranges::all_of(rows, [&](int64_t row) { return taken.contains(row % width); });
}

// All of a layer's weights or none.
bool move(EditPack& pack, const WeightDelta& down, const Places& taken, const Places& from, const Places& to,
          const OriginalWeight& original) {
  const int64_t width = down.shape()[1];
  const std::set<int64_t> own(taken.begin(), taken.end());
  std::vector<WeightDelta> all = pack.deltas;
  for (auto& delta : all) {
    const bool is_down = delta.weight == down.weight;
    if (delta.layer != down.layer || (!is_down && !of_neurons(delta, width, own))) continue;
    auto elsewhere = moved(delta, is_down, width, from, to, original);
    if (!elsewhere) return false;
    delta = std::move(*elsewhere);
  }
  pack.deltas = std::move(all);
  return true;
}

Places to_spare(const EditPack& pack, int layer) {
  const auto found = pack.extra.find(kNeuronsToSpare);
  if (found == pack.extra.end() || !found->is_object()) return {};
  const auto places = found->find(std::to_string(layer));
  if (places == found->end() || !places->is_array()) return {};
  Places list;
  for (const auto& place : *places)
    if (place.is_number_integer()) list.push_back(place.get<int64_t>());
  return list;
}

}  // namespace

std::vector<int64_t> taken_neurons(const WeightDelta& delta) {
  const at::NoGradGuard no_grad;
  if (delta.shape().size() != 2) return {};
  const at::Tensor norm_F = delta.low_rank() ? delta.right_FR.abs().amax(1) : delta.dense_DF.abs().amax(0);
  Places taken = written(norm_F);
  if (std::ssize(taken) == norm_F.numel()) taken.clear();
  return taken;
}

std::map<std::string, std::vector<int64_t>> neurons_of(const EditPack& pack) {
  auto all = pack.described_neurons;
  for (const auto& delta : pack.deltas)
    if (auto places = taken_neurons(delta); !places.empty()) all[delta.weight] = std::move(places);
  return all;
}

bool same_weight(const std::string& a, const std::string& b) {
  return a == b || a.ends_with("." + b) || b.ends_with("." + a);
}

OriginalWeight originals_in(const std::filesystem::path& file) {
  return [file, kept = std::make_shared<std::optional<SafetensorsFile>>()](const std::string& name) -> at::Tensor {
    if (!*kept) kept->emplace(detail::open_originals(file));
    for (const auto& [other, info] : (*kept)->tensors())
      if (same_weight(other, name)) return (*kept)->tensor(other);
    return {};
  };
}

OriginalWeight originals_of(const models::Checkpoint& checkpoint) {
  OriginalWeight kept;
  if (!lineage_of(checkpoint.path()).edits.empty())
    kept = originals_in(checkpoint.path() / detail::kFolder / detail::kOriginals);
  return [kept, &checkpoint](const std::string& name) -> at::Tensor {
    if (at::Tensor weight; kept && (weight = kept(name)).defined()) return weight;
    for (const auto& info : checkpoint.tensors())
      if (same_weight(info.name, name)) return checkpoint.read(info.name);
    return {};
  };
}

std::vector<std::string> neurons_of_both(const EditPack& first, const EditPack& second) {
  std::vector<std::string> found;
  const auto others = neurons_of(second);
  for (const auto& [weight, own] : neurons_of(first))
    for (const auto& [other, there] : others) {
      Places both;
      if (same_weight(weight, other)) std::ranges::set_intersection(own, there, std::back_inserter(both));
      if (!both.empty())
        found.push_back(counted(both.size(), "neuron") + " of " + weight + (both.size() == 1 ? " is" : " are") +
                        " written by both, the first " + std::to_string(both.front()));
    }
  return found;
}

void move_apart(std::span<NamedPack> packs, const OriginalWeight& original) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::set<int64_t>> all;  // by W_down, of the packs so far
  const auto taken_of = [&all](const std::string& weight) -> std::set<int64_t>& {
    const auto found = std::ranges::find_if(all, [&](const auto& one) { return same_weight(one.first, weight); });
    return found == all.end() ? all[weight] : found->second;
  };
  for (auto& [name, pack] : packs) {
    std::map<std::string, Places> own = pack.described_neurons;
    for (const WeightDelta& delta : std::vector(pack.deltas)) {
      Places& places = own[delta.weight] = taken_neurons(delta);
      const auto& others = taken_of(delta.weight);
      Places from, to;
      std::ranges::copy_if(places, std::back_inserter(from), [&](int64_t j) { return others.contains(j); });
      if (from.empty()) continue;
      for (const int64_t k : to_spare(pack, delta.layer))
        if (to.size() < from.size() && k >= 0 && k < delta.shape()[1] && !others.contains(k) &&
            std::ranges::find(places, k) == places.end() && std::ranges::find(to, k) == to.end())
          to.push_back(k);
      if (to.size() < from.size() || !move(pack, delta, places, from, to, original)) continue;
      std::erase_if(places, [&](int64_t j) { return others.contains(j); });
      places.insert(places.end(), to.begin(), to.end());
    }
    for (const auto& [weight, places] : own) taken_of(weight).insert(places.begin(), places.end());
  }
}

}  // namespace emend::editors
