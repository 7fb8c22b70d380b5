#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/devices/route.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/steps/apply.h>
#include <emend/models/checkpoint.h>
#include <emend/workflow/changes.h>

#include <algorithm>
#include <mutex>
#include <optional>

namespace emend::workflow {

using editors::EditTransaction;
using editors::WeightDelta;

struct Changes::Order {
  struct Step {
    int64_t place;
    Changes* by;  // null: of one that has ended
    std::string weight;
    std::optional<WeightDelta> delta;  // none: its original was kept here
  };
  std::vector<Step> steps;
  std::vector<Changes*> parties;
  std::set<std::string> packs;  // in force, by what tells packs apart
  bool kept = false;            // changes of a party that has ended
  Neurons neurons;              // of parties that have ended
  int64_t next = 0;

  [[nodiscard]] bool holds_others_than(const Changes* own) const;  // changes or packs of other parties
};

std::shared_ptr<Changes::Order> Changes::order_of(const models::Model& model) {
  static std::mutex mutex;
  static std::map<const models::Model*, std::weak_ptr<Order>> orders;
  const std::lock_guard lock(mutex);
  std::erase_if(orders, [](const auto& entry) { return entry.second.expired(); });
  auto order = orders[&model].lock();
  if (!order) orders[&model] = order = std::make_shared<Order>();
  return order;
}

bool Changes::Order::holds_others_than(const Changes* own) const {
  const bool own_pack = own && packs.contains(own->pack_);
  return kept || packs.size() > (own_pack ? 1U : 0U) ||
         std::ranges::any_of(parties, [&](const Changes* party) { return party != own && !party->since_.empty(); });
}

bool Changes::any_in(const models::Model& model) {
  return order_of(model)->holds_others_than(nullptr) || !model.hooks().idle();
}

bool Changes::others_in() const {
  return order_->holds_others_than(this);
}

static void add(Changes::Neurons& all, const Changes::Neurons& more) {
  for (const auto& [weight, places] : more) all[weight].insert(all[weight].end(), places.begin(), places.end());
}

Changes::Neurons Changes::neurons_of_others() const {
  Neurons all = order_->neurons;
  for (const Changes* party : order_->parties)
    if (party != this) add(all, party->neurons_);
  for (auto& [weight, places] : all) {
    std::ranges::sort(places);
    places.erase(std::unique(places.begin(), places.end()), places.end());
  }
  return all;
}

Changes::Changes(models::Model& model)
    : order_(order_of(model)), transaction_(std::make_unique<EditTransaction>(model)) {
  order_->parties.push_back(this);
}

Changes::~Changes() {
  transaction_->commit();
  order_->kept = order_->kept || !since_.empty();
  add(order_->neurons, neurons_);
  if (since_.empty())
    order_->packs.erase(pack_);  // a pack beside the weights ends with its hooks
  else
    order_->packs.merge(made_);
  std::erase(order_->parties, this);
  std::erase_if(order_->steps, [&](const auto& step) { return step.by == this && !step.delta; });
  for (auto& step : order_->steps)
    if (step.by == this) step.by = nullptr;
  if (std::ranges::all_of(order_->parties, [](const Changes* party) { return party->since_.empty(); }))
    order_->steps.clear();
}

// The same for a pack in memory and for its file.
static std::string identity(const editors::EditPack& pack) {
  Sha256 hash;
  const auto add_text = [&hash](const std::string& text) { hash.update(text.c_str(), text.size() + 1); };
  const auto add = [&hash](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const at::Tensor host = devices::to_host(tensor.detach()).to(at::kDouble).contiguous();
    hash.update(host.const_data_ptr(), host.nbytes());
  };
  add_text(editors::describe_edit(pack));
  for (const auto& delta : pack.deltas)
    for (const auto* part : {&delta.left_DR, &delta.right_FR, &delta.dense_DF}) add(*part);
  for (const auto& part : pack.runtime) {
    add_text(part.kind);
    add_text(part.values.dump());
    for (const auto& [name, tensor] : part.tensors) {
      add_text(name);
      add(tensor);
    }
  }
  return hash.hex();
}

void Changes::put_in(const editors::EditPack& pack, const editors::ApplyPackOptions& options,
                     const std::string& where) {
  std::string id = identity(pack);
  const auto& checkpoint = transaction_->model().checkpoint();
  auto all = editors::edits_of(checkpoint.path());
  const auto made = [&](const Changes* party) { return !party->since_.empty() && party->made_.contains(id); };
  const auto there = [&](const editors::NamedPack& one) { return identity(one.pack) == id; };
  if (order_->packs.contains(id) || std::ranges::any_of(order_->parties, made) || std::ranges::any_of(all, there))
    refuse({where, "the edit " + (pack.id.empty() ? id.substr(0, 12) : pack.id) + " is already in force in this model",
            "another pack", "revert it first, or undo the session that made it"});
  all.emplace_back().pack.described_neurons = neurons_of_others();
  all.push_back({where, pack});
  editors::move_apart(all, editors::originals_of(checkpoint));
  for (const auto& [name, other] : std::span(all).first(all.size() - 1))
    if (const auto both = editors::neurons_of_both(other, all.back().pack); !both.empty() && !options.allow_conflicts)
      refuse({where, both.front() + ", by it and by an edit of this model",
              "neurons of its own, or the names of others that are free", "revert that edit first"});
  transaction_ = editors::apply_pack(transaction_->model(), all.back().pack, options);
  wrote(all.back().pack.deltas);
  order_->packs.insert(pack_ = std::move(id));
}

void Changes::made(const editors::EditPack& pack) {
  if (!pack.deltas.empty()) made_.insert(identity(pack));  // what lies beside the weights may act twice
}

// What was kept and not changed, or put back, is no change.
void Changes::forget_unchanged() {
  const auto& originals = transaction_->originals();
  if (std::ranges::all_of(originals, [&](const auto& one) { return since_.contains(one.first); })) return;
  const auto changed = transaction_->changed();
  for (auto one = originals.begin(); one != originals.end();) {
    const std::string& weight = (one++)->first;
    if (!since_.contains(weight) && std::ranges::find(changed, weight) == changed.end())
      transaction_->forget(std::string(weight));
  }
}

void Changes::wrote(std::span<const WeightDelta> deltas) {
  forget_unchanged();
  for (const auto& delta : deltas)
    if (auto places = editors::taken_neurons(delta); !places.empty())
      add(neurons_, {{delta.weight, std::move(places)}});
  const bool needed = std::ranges::any_of(
      order_->parties, [&](const Changes* party) { return party != this && !party->since_.empty(); });
  for (const auto& [weight, original] : transaction_->originals())
    if (since_.try_emplace(weight, order_->next).second) {
      if (needed) order_->steps.push_back({order_->next, this, weight, {}});
      ++order_->next;
    }
  if (needed)
    for (const auto& delta : deltas) order_->steps.push_back({order_->next++, this, delta.weight, delta});
}

void Changes::take_out() {
  auto& model = transaction_->model();
  transaction_->restore();
  for (const auto& step : order_->steps) {
    const auto mine = since_.find(step.weight);
    if (step.by == this || mine == since_.end() || step.place < mine->second) continue;
    if (!step.delta) {
      step.by->rebase(step.weight);
      continue;
    }
    EditTransaction again(model);
    (void)editors::apply_delta(*step.delta, again);
    again.commit();
  }
  std::erase_if(order_->steps, [&](const auto& step) { return step.by == this; });
  transaction_->commit();  // lets the originals go
  since_.clear();
  made_.clear();
  neurons_.clear();
  order_->packs.erase(pack_);
}

// Takes what the weight is now for its original.
void Changes::rebase(const std::string& weight) {
  const at::NoGradGuard no_grad;
  auto& model = transaction_->model();
  const at::Tensor present = model.weight(weight).detach().clone();
  transaction_->swap();
  model.set_weight(weight, present);
  transaction_->swap();
}

}  // namespace emend::workflow
