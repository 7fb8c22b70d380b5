#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/datasets/lint.h>
#include <emend/editors/packs/difference.h>
#include <emend/editors/packs/merge.h>
#include <emend/models/config.h>
#include <emend/models/family.h>
#include <emend/models/tied_head.h>

#include <algorithm>
#include <array>
#include <map>

namespace emend::editors {
namespace {

// Question → fact, and the questions in their order.
struct Questions {
  explicit Questions(const nlohmann::json& facts) {
    for (const auto& fact : facts) {
      const std::string question = datasets::plain(question_of(fact));  // as lint and merge compare
      if (by_question.insert_or_assign(question, fact).second) order.push_back(question);
    }
  }
  std::map<std::string, nlohmann::json> by_question;
  std::vector<std::string> order;
};

const WeightDelta* find(const std::vector<WeightDelta>& deltas, const std::string& weight) {
  const auto found = std::ranges::find(deltas, weight, &WeightDelta::weight);
  return found == deltas.end() ? nullptr : &*found;
}

std::optional<double> norm_in(const models::Checkpoint* base, const std::string& weight) {
  if (!base) return std::nullopt;
  for (const auto& info : base->tensors())
    if (info.name == weight) return base->read(weight).to(at::kDouble).norm().item<double>();
  return std::nullopt;
}

WeightDifference compare(const std::string& weight, const WeightDelta* a, const WeightDelta* b) {
  WeightDifference difference{weight, {}, a ? a->norm() : 0, b ? b->norm() : 0, 0, {}};
  if (!a || !b) {
    difference.between = a ? difference.a : difference.b;
    return difference;
  }
  const at::Tensor change_a = a->stored(), change_b = b->stored();
  if (change_a.sizes() != change_b.sizes()) refuse({weight, "changes of two shapes", "edits of one model", ""});
  difference.between = (change_b - change_a).norm().item<double>();
  if (difference.a > 0 && difference.b > 0)
    difference.cosine = (change_a * change_b).sum().item<double>() / (difference.a * difference.b);
  return difference;
}

}  // namespace

FactDifference compare_facts(const nlohmann::json& a, const nlohmann::json& b) {
  const Questions one(a), two(b);
  FactDifference difference;
  for (const auto& question : one.order) {
    const auto& fact = one.by_question.at(question);
    const auto other = two.by_question.find(question);
    if (other == two.by_question.end())
      difference.only_a.push_back(fact);
    else if (datasets::plain(text_of(fact, "target_new")) == datasets::plain(text_of(other->second, "target_new")))
      ++difference.same;
    else
      difference.changed.push_back(
          {question_of(fact), text_of(fact, "target_new"), text_of(other->second, "target_new")});
  }
  for (const auto& question : two.order)
    if (!one.by_question.contains(question)) difference.only_b.push_back(two.by_question.at(question));
  return difference;
}

std::vector<WeightDifference> compare_deltas(const std::vector<WeightDelta>& a, const std::vector<WeightDelta>& b,
                                             const models::Checkpoint* base) {
  const at::NoGradGuard no_grad;
  std::vector<WeightDifference> list;
  const auto add = [&](const WeightDelta& delta) {
    list.push_back(compare(delta.weight, find(a, delta.weight), find(b, delta.weight)));
    list.back().base = norm_in(base, delta.weight);
  };
  for (const auto& delta : a) add(delta);
  for (const auto& delta : b)
    if (!find(a, delta.weight)) add(delta);
  return list;
}

std::vector<RuntimeDifference> compare_runtime(const std::vector<RuntimePart>& a, const std::vector<RuntimePart>& b) {
  std::map<std::string, std::array<std::vector<const RuntimePart*>, 2>> kinds;
  for (const auto& part : a) kinds[part.kind][0].push_back(&part);
  for (const auto& part : b) kinds[part.kind][1].push_back(&part);
  const auto same = [](const RuntimePart* one, const RuntimePart* other) {
    const auto equal = [](const auto& x, const auto& y) {
      return x.first == y.first && x.second.scalar_type() == y.second.scalar_type() && at::equal(x.second, y.second);
    };
    return one->version == other->version && one->values == other->values &&
           std::ranges::equal(one->tensors, other->tensors, equal);
  };
  std::vector<RuntimeDifference> all;
  for (const auto& [kind, sides] : kinds)
    all.push_back({kind, !sides[0].empty(), !sides[1].empty(), std::ranges::equal(sides[0], sides[1], same)});
  return all;
}

std::vector<WeightDelta> deltas_between(const models::Checkpoint& base, const models::Checkpoint& edited) {
  const at::NoGradGuard no_grad;
  const auto refuse = [&](const std::string& tensor, const std::string& what) {
    throw Error(ErrorClass::kInvalidArgument,
                {edited.path().string(), "tensor \"" + tensor + "\" " + what, "the tensors of " + base.path().string(),
                 "compare two forms of one model"});
  };
  const auto& family = models::family_of(base.config(), base.path().string());
  const auto config = models::parse_config(base.config(), base.path().string(), family);
  const auto is_passed_over = [&](const std::string& name) {
    return models::is_ignored(family, name) || models::repeats_embedding(family, config, name);
  };
  std::map<std::string, TensorInfo> before_by_name;  // without the prefix that one of both may lack
  for (const auto& info : base.tensors())
    if (!is_passed_over(info.name)) before_by_name[models::without_base(family, info.name)] = info;
  std::vector<WeightDelta> deltas;
  for (const auto& info : edited.tensors()) {
    if (is_passed_over(info.name)) continue;
    const auto there = before_by_name.find(models::without_base(family, info.name));
    if (there == before_by_name.end()) refuse(info.name, "is not in the other model");
    const auto [name, shape] = std::pair(there->second.name, there->second.shape);
    if (shape != info.shape) refuse(info.name, "has another shape in the other model");
    before_by_name.erase(there);
    const at::Tensor before = base.read(name), after = edited.read(info.name);
    if (!before.is_floating_point() || (before.scalar_type() == after.scalar_type() && at::equal(before, after)))
      continue;
    const at::Tensor change = after.to(at::kDouble) - before.to(at::kDouble);
    if (change.count_nonzero().item<int64_t>() == 0) continue;
    deltas.push_back(WeightDelta::as_stored(name, -1, change, family.orientation));
  }
  if (!before_by_name.empty()) refuse(before_by_name.begin()->second.name, "is missing");
  return deltas;
}

}  // namespace emend::editors
