#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/mapped.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/datasets/lint.h>
#include <emend/editors/packs/merge.h>
#include <emend/editors/packs/neurons_apart.h>

#include <algorithm>
#include <numeric>

namespace emend::editors {
namespace {

constexpr double kNumericRank = 1e-15;  // singular values below this part of the largest are rounding

// Facts that ask the same thing in other words have the relation in common.
std::string relation_of(const nlohmann::json& fact) {
  const std::string relation = text_of(fact, "relation_id");
  return relation.empty() ? "" : datasets::plain(text_of(fact, "subject")) + " " + relation;
}

// Conflicts between two packs, `first` before `second`.
class PairCheck {
 public:
  PairCheck(std::span<const NamedPack> packs, size_t first, size_t second, std::vector<MergeConflict>& found)
      : a_(packs[first].pack), b_(packs[second].pack), first_(first), second_(second), found_(found) {}

  void run() {
    if (a_.root() != b_.root())
      add(ConflictKind::kBase, "made for the models " + a_.root().substr(0, 12) + " and " + b_.root().substr(0, 12));
    if (!one_on_the_other()) facts();
    weights();
    if (!one_on_the_other()) neurons();
    runtime();
  }

 private:
  void add(ConflictKind kind, std::string what) { found_.push_back({kind, first_, second_, std::move(what)}); }

  // The upper one was made with the lower one in force, so it may change its answers.
  [[nodiscard]] bool one_on_the_other() const {
    const auto on = [](const EditPack& upper, const EditPack& lower) {
      return !lower.id.empty() && std::ranges::count(upper.under.edits, lower.id) > 0;
    };
    return on(a_, b_) || on(b_, a_);
  }

  void facts() {
    std::map<std::string, const nlohmann::json*> questions, relations;
    for (const auto& fact : a_.facts) {
      if (const auto question = question_of(fact); !question.empty())
        questions.emplace(datasets::plain(question), &fact);
      if (const auto relation = relation_of(fact); !relation.empty()) relations.emplace(relation, &fact);
    }
    for (const auto& fact : b_.facts) {
      const nlohmann::json* other = nullptr;
      if (const auto it = questions.find(datasets::plain(question_of(fact))); it != questions.end()) {
        other = it->second;
      } else if (const auto same = relations.find(relation_of(fact)); same != relations.end()) {
        other = same->second;
      }
      if (other) compare(*other, fact);
    }
  }

  void compare(const nlohmann::json& a, const nlohmann::json& b) {
    const std::string one = text_of(a, "target_new"), two = text_of(b, "target_new");
    const std::string question = "\"" + question_of(a) + "\" ";
    if (datasets::plain(one) == datasets::plain(two))
      add(ConflictKind::kRepeat, question + "is answered \"" + one + "\" in both");
    else
      add(ConflictKind::kTarget, question + "is answered \"" + one + "\" and \"" + two + "\"");
  }

  void weights() {
    if (a_.facts.empty() && b_.facts.empty() && !a_.id.empty() && a_.id == b_.id)
      add(ConflictKind::kRepeat, "both are the same change");
    std::map<std::string, const WeightDelta*> there;
    for (const auto& delta : a_.deltas) there.emplace(delta.weight, &delta);
    for (const auto& delta : b_.deltas) {
      const auto found = there.find(delta.weight);
      if (found == there.end()) continue;
      const WeightDelta& other = *found->second;
      if (delta.shape() != other.shape() || delta.orientation != other.orientation)
        add(ConflictKind::kWeight, delta.weight + " has two shapes or orientations");
      else if (changed_by_both(delta, other) && !one_on_the_other())
        add(ConflictKind::kOverlap, delta.weight + " is changed as a whole by both");
      else if (ablated_twice(delta, other) && !one_on_the_other())
        add(ConflictKind::kOverlap, delta.weight + " loses one direction twice, which would turn it round");
    }
  }

  // Each writes whole neurons.
  void neurons() {
    for (auto& what : neurons_of_both(a_, b_)) add(ConflictKind::kOverlap, std::move(what));
  }

  // Dense changes that have an entry in common.
  static bool changed_by_both(const WeightDelta& delta, const WeightDelta& other) {
    return !delta.low_rank() && !other.low_rank() &&
           (delta.dense_DF != 0).logical_and_(other.dense_DF != 0).any().item<bool>();
  }

  // Each takes the part of the stored weight along its directions away.
  bool ablated_twice(const WeightDelta& delta, const WeightDelta& other) const {
    if (a_.editor != "ablate" || b_.editor != "ablate" || !delta.low_rank() || !other.low_rank()) return false;
    const at::Tensor left = delta.left_DR.to(at::kDouble), there = other.left_DR.to(at::kDouble);
    const double apart = left.norm().item<double>() * there.norm().item<double>();
    return left.t().mm(there).norm().item<double>() > 0.5 * apart;
  }

  void runtime() {
    for (const auto& a : a_.runtime)
      for (const auto& b : b_.runtime)
        if (a.kind == b.kind && a.kind != kSteerKind)
          add(ConflictKind::kRuntime, "both have a part of kind " + a.kind + " beside the weights");
  }

  const EditPack &a_, &b_;
  size_t first_, second_;
  std::vector<MergeConflict>& found_;
};

bool always_fails(ConflictKind kind) {
  return kind == ConflictKind::kBase || kind == ConflictKind::kWeight;
}

std::string describe(const MergeConflict& conflict, std::span<const NamedPack> packs) {
  return packs[conflict.first].name + " and " + packs[conflict.second].name + ": " + conflict.what;
}

// The one judgement of merging and applying; with `allow` only what cannot be added at all counts.
void require_no_conflicts(const std::vector<MergeConflict>& conflicts, std::span<const NamedPack> packs, bool allow,
                          const std::string& where, const std::string& advice) {
  constexpr size_t kShown = 8;
  std::string list;
  size_t n = 0;
  for (const auto& conflict : conflicts)
    if ((!allow || always_fails(conflict.kind)) && ++n <= kShown)
      list += "\n  " + std::string(to_string(conflict.kind)) + ": " + describe(conflict, packs);
  if (n == 0) return;
  if (n > kShown) list += "\n  and " + std::to_string(n - kShown) + " more";
  refuse({where, std::to_string(n) + (n == 1 ? " conflict:" : " conflicts:") + list,
          "packs for one model that go together", allow ? "different models and shapes cannot be added" : advice});
}

// The packs that stay: in list order for kFirst, from the end for kLast, each only if it agrees with all taken before.
std::vector<size_t> choose(std::span<const NamedPack> packs, const std::vector<MergeConflict>& conflicts,
                           OnConflict on_conflict) {
  std::vector<size_t> order(packs.size()), used;
  std::iota(order.begin(), order.end(), size_t{0});
  if (on_conflict != OnConflict::kFirst && on_conflict != OnConflict::kLast) return order;
  if (on_conflict == OnConflict::kLast) std::ranges::reverse(order);
  const auto is_used = [&](size_t pack) { return std::ranges::count(used, pack) > 0; };
  for (const size_t pack : order)
    if (std::ranges::none_of(conflicts, [&](const MergeConflict& conflict) {
          return (conflict.first == pack && is_used(conflict.second)) ||
                 (conflict.second == pack && is_used(conflict.first));
        }))
      used.push_back(pack);
  std::ranges::sort(used);
  return used;
}

at::Tensor joined(const std::vector<WeightDelta>& deltas, at::Tensor WeightDelta::*factor) {
  const auto parts = mapped(deltas, [&](const auto& delta) { return (delta.*factor).to(at::kDouble); });
  return at::cat(parts, 1);
}

WeightDelta sum_of(const std::vector<WeightDelta>& deltas) {
  WeightDelta sum = deltas.front();
  if (deltas.size() == 1) return sum;
  if (std::all_of(deltas.begin(), deltas.end(), [](const WeightDelta& delta) { return delta.low_rank(); })) {
    sum.left_DR = joined(deltas, &WeightDelta::left_DR);
    sum.right_FR = joined(deltas, &WeightDelta::right_FR);
    return sum;
  }
  sum.dense_DF = deltas.front().matrix().clone();
  for (size_t i = 1; i < deltas.size(); ++i) sum.dense_DF += deltas[i].matrix();
  sum.left_DR = sum.right_FR = at::Tensor();
  return sum;
}

void merge_weights(const std::vector<const EditPack*>& packs, Merge& merge) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<WeightDelta>> by_weight;
  for (const EditPack* pack : packs)
    for (const auto& delta : pack->deltas) {
      auto& list = by_weight[delta.weight];
      if (list.empty()) order.push_back(delta.weight);
      list.push_back(delta);
    }
  for (const auto& weight : order) {
    const WeightDelta sum = sum_of(by_weight.at(weight)), small = compact(sum);
    merge.weights.push_back({weight, sum.low_rank() ? sum.rank() : 0, small.low_rank() ? small.rank() : 0});
    merge.pack.deltas.push_back(small);
  }
}

// What the merge lies on: the edits under its parts that are not parts themselves.
void settle_base(const std::vector<const EditPack*>& packs, EditPack& merged) {
  std::vector<std::string> edits;
  size_t most = 0;
  merged.id.clear();
  merged.base_fingerprint = packs.front()->root();
  for (const EditPack* pack : packs) {
    size_t missing = 0;
    for (const auto& id : pack->under.edits) {
      if (std::ranges::count(packs, id, &EditPack::id) > 0) continue;
      ++missing;
      if (std::ranges::count(edits, id) == 0) edits.push_back(id);
    }
    if (missing > most) merged.base_fingerprint = pack->base_fingerprint;
    most = std::max(most, missing);
  }
  merged.under = edits.empty() ? Lineage{} : Lineage{packs.front()->root(), edits};
}

// What each part of the merge was, so that the pack still says how it came about.
nlohmann::json provenance(std::span<const NamedPack> packs, const Merge& merge) {
  auto parts = nlohmann::json::array(), conflicts = nlohmann::json::array();
  for (const size_t i : merge.used)
    parts.push_back({{"name", packs[i].name},
                     {"editor", packs[i].pack.editor},
                     {"hparams", packs[i].pack.hparams},
                     {"facts", packs[i].pack.facts.size()},
                     {"extra", packs[i].pack.extra}});
  for (const auto& conflict : merge.conflicts)
    conflicts.push_back({{"kind", to_string(conflict.kind)}, {"what", describe(conflict, packs)}});
  return {{"merged", parts}, {"conflicts", conflicts}};
}

}  // namespace

std::string_view to_string(ConflictKind kind) noexcept {
  constexpr std::string_view kNames[] = {"base", "target", "repeat", "weight", "overlap", "runtime"};
  return kNames[static_cast<size_t>(kind)];
}

OnConflict parse_on_conflict(std::string_view text) {
  if (text == "fail") return OnConflict::kFail;
  if (text == "first") return OnConflict::kFirst;
  if (text == "last") return OnConflict::kLast;
  if (text == "sum") return OnConflict::kSum;
  refuse({setting("on_conflict"), "\"" + std::string(text) + "\"", "fail, first, last or sum", ""});
}

std::string text_of(const nlohmann::json& fact, const char* key) {
  const auto found = fact.find(key);
  return found != fact.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string question_of(const nlohmann::json& fact) {
  const std::string prompt = datasets::with_subject(text_of(fact, "prompt"), text_of(fact, "subject"));
  return std::string(trimmed(prompt, " \t\n"));
}

void require_together(std::span<const NamedPack> packs, size_t before, bool allow, const std::string& where,
                      const std::string& advice) {
  auto conflicts = find_conflicts(packs);
  std::erase_if(conflicts, [&](const MergeConflict& conflict) { return conflict.second < before; });
  require_no_conflicts(conflicts, packs, allow, where, advice);
}

std::vector<MergeConflict> find_conflicts(std::span<const NamedPack> packs) {
  std::vector<MergeConflict> found;
  for (size_t first = 0; first < packs.size(); ++first)
    for (size_t second = first + 1; second < packs.size(); ++second) PairCheck(packs, first, second, found).run();
  return found;
}

WeightDelta compact(const WeightDelta& delta) {
  if (!delta.low_rank()) return delta;
  const int64_t d = delta.left_DR.size(0), f = delta.right_FR.size(0);
  if (delta.rank() * (d + f) <= d * f) return delta;
  const at::NoGradGuard no_grad;
  const auto [q_left, t_left] = at::linalg_qr(delta.left_DR.to(at::kDouble));
  const auto [q_right, t_right] = at::linalg_qr(delta.right_FR.to(at::kDouble));
  const auto [u, s, vh] = at::linalg_svd(t_left.mm(t_right.t()), /*full_matrices=*/false);
  const int64_t rank = std::max<int64_t>(1, (s > s.max() * kNumericRank).sum().item<int64_t>());
  WeightDelta small = delta;
  if (rank * (d + f) <= d * f) {
    small.left_DR = q_left.mm(u.narrow(1, 0, rank) * s.narrow(0, 0, rank));
    small.right_FR = q_right.mm(vh.narrow(0, 0, rank).t());
  } else {
    small.dense_DF = delta.matrix();
    small.left_DR = small.right_FR = at::Tensor();
  }
  return small;
}

Merge merge_packs(std::span<const NamedPack> packs, OnConflict on_conflict) {
  if (packs.empty()) refuse({"merge", "no packs", "at least one edit pack", ""});
  Merge merge;
  merge.conflicts = find_conflicts(packs);
  merge.used = choose(packs, merge.conflicts, on_conflict);
  if (on_conflict == OnConflict::kFail || on_conflict == OnConflict::kSum) {
    const bool overlap = std::ranges::count(merge.conflicts, ConflictKind::kOverlap, &MergeConflict::kind) > 0;
    require_no_conflicts(
        merge.conflicts, packs, on_conflict == OnConflict::kSum, "merge",
        (overlap ? setting("model", "MODEL") + " moves neurons that both write, where the later pack names others; "
                 : "") +
            setting("on_conflict", "first") + " or last leaves packs out, " + setting("allow_conflicts") +
            " adds them all the same");
  }

  const auto chosen = mapped(merge.used, [&](const size_t i) { return &packs[i].pack; });
  EditPack& all = merge.pack;
  all = *chosen.front();
  all.deltas.clear();
  settle_base(chosen, all);
  for (size_t i = 1; i < chosen.size(); ++i) {
    const auto same = [&](const EditPack* earlier) { return earlier->editor == chosen[i]->editor; };
    if (std::none_of(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(i), same))
      all.editor += "+" + chosen[i]->editor;
    if (chosen[i]->hparams != all.hparams) all.hparams = nlohmann::json::object();  // each has its own, under "merged"
    all.facts.insert(all.facts.end(), chosen[i]->facts.begin(), chosen[i]->facts.end());
    all.runtime.insert(all.runtime.end(), chosen[i]->runtime.begin(), chosen[i]->runtime.end());
  }
  if (packs.size() > 1) {
    all.extra = provenance(packs, merge);
    for (const EditPack* pack : chosen) {  // parts have one base, and so one room and one order of neurons
      if (const auto found = pack->extra.find("spare_neurons"); found != pack->extra.end())
        all.extra["spare_neurons"] = *found;
      if (const auto found = pack->extra.find(kNeuronsToSpare); found != pack->extra.end() && found->is_object())
        all.extra[kNeuronsToSpare].update(*found);
    }
  }
  merge_weights(chosen, merge);
  return merge;
}

}  // namespace emend::editors
