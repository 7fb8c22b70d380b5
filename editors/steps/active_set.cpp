#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/devices/kernels.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/hooks/hook_session.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace emend::editors::detail {
namespace {

bool one_begins_with_other(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto& [shorter, longer] = std::minmax(a, b, [](const auto& x, const auto& y) { return x.size() < y.size(); });
  return std::equal(shorter.begin(), shorter.end(), longer.begin());
}

}  // namespace

int first_layer_of(const TargetSpec& spec) {
  const bool above = spec.sites.size() == 1 && spec.sites[0].site == hooks::Site::kLayerOut;
  return spec.sites[0].layer + (above ? 1 : 0);
}

ActiveSet::ActiveSet(const models::Model& model, const models::Model& upper, const TargetSpec& spec,
                     std::span<const TargetProblem> problems, std::vector<size_t> members)
    : model_(&model),
      upper_(&upper),
      spec_(&spec),
      members_(std::move(members)),
      cache_(model.n_layers()),
      kl_cache_(model.n_layers()) {
  first_layer_ = first_layer_of(spec);
  above_ = first_layer_ > spec.sites[0].layer;
  end_layer_ = spec.loss_layer ? *spec.loss_layer + 1 : model.n_layers();
  const at::NoGradGuard no_grad;
  run_below(problems, build_rows(problems));
  rebuild_index();
}

std::vector<std::vector<int64_t>> ActiveSet::build_rows(std::span<const TargetProblem> problems) {
  std::vector<std::vector<int64_t>> ids;
  for (size_t slot = 0; slot < members_.size(); ++slot) {
    const TargetProblem& problem = problems[members_[slot]];
    const size_t first = rows_.size();
    // A row that begins with another one is run for both.
    const auto row_for = [&](const TargetRow& own) {
      for (size_t r = first; r < rows_.size() && problem.held.empty(); ++r) {
        const TargetRow& there = *rows_[r].source;
        if (there.lookup != own.lookup || there.also != own.also || !one_begins_with_other(ids[r], own.ids)) continue;
        if (own.ids.size() > ids[r].size()) ids[r] = own.ids;
        return r;
      }
      rows_.push_back({slot, false, &own});
      ids.push_back(own.ids);
      return rows_.size() - 1;
    };
    for (size_t number = 0; number < problem.rows.size(); ++number)
      rows_[row_for(problem.rows[number])].readings.emplace_back(number, &problem.rows[number]);
    for (const auto& source : problem.kl_rows) {  // nothing behind the looked-up token is read
      rows_.push_back({slot, true, &source});
      ids.emplace_back(source.ids.begin(), source.ids.begin() + source.lookup + 1);
    }
    for (size_t r = first; r < rows_.size(); ++r)
      rows_[r].suffix.assign(ids[r].begin() + rows_[r].source->lookup, ids[r].end());
    for (const auto& held : problem.held) {
      ActiveRow& row = rows_[first + held.row];
      const int64_t token = held.token - row.source->lookup;
      if (token >= 0 && token < std::ssize(row.suffix)) row.held.emplace_back(token, &held);
    }
  }
  return ids;
}

// Adds the held vectors; on request t0 is read before.
at::Tensor ActiveSet::observe(size_t site, const at::Tensor& x, const Changes& changes, bool take_initial) {
  if (take_initial) initial_BD_[site] = x.index_select(0, devices::index_on(changes.plain, x)).to(work_dtype(*model_));
  at::Tensor changed;
  for (const auto& [token, held] : changes.held) {
    if (token >= x.size(0)) continue;
    if (!changed.defined()) changed = x.clone();
    changed[token].add_(
        devices::route_like(held->vectors_D[site], x, devices::Purpose::kDelta, devices::Dtype::kMatch));
  }
  return changed;
}

// In the rows of the set, of which `ids` are there, packed.
ActiveSet::Changes ActiveSet::changes_in(std::span<const TargetProblem> problems,
                                         const std::vector<std::vector<int64_t>>& ids) const {
  Changes changes;
  int64_t offset = 0;
  for (size_t r = 0, first = 0; r < rows_.size(); ++r) {
    const size_t slot = rows_[r].slot;
    if (r == 0 || slot != rows_[r - 1].slot) {
      first = r;
      changes.plain.push_back(offset + rows_[r].source->lookup);
    }
    for (const auto& held : problems[members_[slot]].held)
      if (held.row == r - first && held.token < std::ssize(ids[r]))
        changes.held.emplace_back(offset + held.token, &held);
    offset += std::ssize(ids[r]);
  }
  return changes;
}

// t0 by the model itself, where a copy does the rest: from the plain rows, up to the looked-up token.
void ActiveSet::read_initial(std::span<const TargetProblem> problems, const std::vector<std::vector<int64_t>>& ids) {
  std::vector<std::vector<int64_t>> plain(rows_.size());
  for (size_t r = 0; r < rows_.size(); ++r)
    if (r == 0 || rows_[r].slot != rows_[r - 1].slot)
      plain[r].assign(ids[r].begin(), ids[r].begin() + rows_[r].source->lookup + 1);
  const Changes changes = changes_in(problems, plain);
  std::erase_if(plain, [](const auto& row) { return row.empty(); });
  hooks::HookSession session(model_->hooks());
  for (size_t s = 0; s < spec_->sites.size(); ++s)
    session.edit(spec_->sites[s], [&, s](const at::Tensor& x) { return observe(s, x, changes, true); });
  session.attach();
  (void)model_->forward(models::TokenBatch::from_rows(plain),
                        {.end_layer = above_ ? first_layer_ : first_layer_ + 1, .logit_tokens = models::kNoTokens});
  session.finish();
}

void ActiveSet::run_below(std::span<const TargetProblem> problems, const std::vector<std::vector<int64_t>>& ids) {
  initial_BD_.resize(spec_->sites.size());
  if (upper_ != model_) read_initial(problems, ids);
  const Changes changes = changes_in(problems, ids);
  const auto batch = models::TokenBatch::from_rows(ids);

  // What enters the first layer that depends on δ, for all tokens.
  const models::Model& lower = upper_->first_layer() == 0 ? *upper_ : *model_;
  at::Tensor hidden_ND;
  const hooks::SiteRef place = above_ ? spec_->sites[0] : hooks::SiteRef{hooks::Site::kLayerIn, first_layer_};
  {
    hooks::HookSession session(lower.hooks());
    session.edit(place, [&](const at::Tensor& x) {
      const at::Tensor changed = above_ ? observe(0, x, changes, upper_ == model_) : at::Tensor();
      hidden_ND = changed.defined() ? changed : x;
      return changed;
    });
    session.stop_after(place).attach();
    (void)lower.forward(batch, {.logit_tokens = models::kNoTokens});
    session.finish();
  }

  // Suffixes stay as they are; prefixes go on through the layers above, into the cache. With hooks the looked-up token
  // of the plain rows has to pass the first layer too, because t0 is read there; with δ above the layers one token is
  // enough for rows without a prefix.
  std::vector<int64_t> suffix_tokens, prefix_tokens;
  std::vector<std::vector<int64_t>> prefix_ids;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const int64_t n = std::ssize(ids[r]), lookup = rows_[r].source->lookup;
    for (int64_t k = lookup; k < n; ++k) suffix_tokens.push_back(batch.token(static_cast<int64_t>(r), k));
    const int64_t count = above_ ? std::max<int64_t>(1, lookup) : lookup + 1;
    for (int64_t k = 0; k < count; ++k) prefix_tokens.push_back(batch.token(static_cast<int64_t>(r), k));
    prefix_ids.emplace_back(ids[r].begin(), ids[r].begin() + count);
  }
  entering_ND_ = hidden_ND.index_select(0, devices::index_on(suffix_tokens, hidden_ND)).to(model_->dtype());
  if (first_layer_ >= model_->n_layers()) return;
  fill_cache(models::TokenBatch::from_rows(prefix_ids),
             hidden_ND.index_select(0, devices::index_on(prefix_tokens, hidden_ND)), changes_in(problems, prefix_ids));
}

// Runs the prefixes through the layers above. Where δ stands inside the first of them, t0 is read there.
void ActiveSet::fill_cache(const models::TokenBatch& prefixes, const at::Tensor& entering_ND, const Changes& changes) {
  hooks::HookSession session(upper_->hooks());
  if (!above_)
    for (size_t s = 0; s < spec_->sites.size(); ++s)
      session.edit(spec_->sites[s], [&, s](const at::Tensor& x) { return observe(s, x, changes, upper_ == model_); });
  session.attach();
  (void)upper_->forward(
      prefixes,
      {.first_layer = first_layer_, .hidden = entering_ND, .cache = &cache_, .logit_tokens = models::kNoTokens});
  session.finish();
  cache_.truncate(mapped(rows_, [](const ActiveRow& row) { return row.source->lookup; }));
}

void ActiveSet::rebuild_index() {
  index_ = {};
  tables_ = kl_tables_ = nullptr;
  std::vector<std::vector<int64_t>> suffixes, kl_suffixes;
  std::vector<int64_t> begins, kl_begins, kl_rows, added, slot_of_added, slot_of_reading, label_token, label_id,
      label_slot, label_reading, kl_token, kl_slot;
  std::vector<double> label_weight, label_floor, reading_weight, reading_labels;
  bool floors = false;
  std::vector<int64_t> kl_rows_of_slot(members_.size(), 0);
  int64_t token = 0;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const ActiveRow& row = rows_[r];
    const auto slot = static_cast<int64_t>(row.slot);
    const int64_t lookup = row.source->lookup;
    suffixes.push_back(row.suffix);
    begins.push_back(lookup);
    index_.lookups.push_back(token);
    added.push_back(token);
    for (size_t i = 0; i < row.source->also.size() && !row.kl; ++i)
      added.push_back(token + row.source->also[i] - lookup);
    slot_of_added.resize(added.size(), slot);
    for (const auto& [number, source] : row.readings) {
      const auto labels = static_cast<double>(source->labels.size());
      for (size_t i = 0; i < source->labels.size(); ++i) {
        label_token.push_back(token + source->labels[i].first - lookup);
        label_id.push_back(source->labels[i].second);
        label_slot.push_back(slot);
        label_reading.push_back(std::ssize(index_.readings));
        label_weight.push_back(source->weight / labels);
        label_floor.push_back(source->floors.empty() ? 0 : source->floors[i]);
      }
      floors |= !source->floors.empty();
      slot_of_reading.push_back(slot);
      reading_weight.push_back(source->weight);
      reading_labels.push_back(labels);
      index_.readings.push_back({row.slot, number, static_cast<int64_t>(r), source->sampled_context});
    }
    if (row.kl) {
      kl_token.push_back(token);
      kl_slot.push_back(slot);
      kl_suffixes.push_back(row.suffix);
      kl_begins.push_back(lookup);
      kl_rows.push_back(static_cast<int64_t>(r));
      ++kl_rows_of_slot[row.slot];
    }
    token += static_cast<int64_t>(row.suffix.size());
  }
  std::vector<double> kl_weight;
  for (const int64_t slot : kl_slot)
    kl_weight.push_back(spec_->kl_factor / static_cast<double>(kl_rows_of_slot[static_cast<size_t>(slot)]));
  const at::Tensor& like = entering_ND_;
  const auto floats = [&](const std::vector<double>& values) {
    return devices::route_like(at::tensor(values, work_dtype(*model_)), like, devices::Purpose::kLabels);
  };
  index_.batch = models::TokenBatch::continuing(suffixes, begins);
  index_.added_N = devices::index_on(added, like);
  index_.slot_of_added_N = devices::index_on(slot_of_added, like);
  index_.label_token_M = devices::index_on(label_token, like);
  index_.label_id_M = devices::index_on(label_id, like);
  index_.label_slot_M = devices::index_on(label_slot, like);
  index_.label_reading_M = devices::index_on(label_reading, like);
  index_.label_weight_M = floats(label_weight);
  index_.label_floor_M = floors ? floats(label_floor) : at::Tensor();
  index_.slot_of_reading = devices::index_on(slot_of_reading, like);
  index_.reading_weight = floats(reading_weight);
  index_.reading_labels = floats(reading_labels);
  if (kl_token.empty()) return;
  index_.kl_token_K = devices::index_on(kl_token, like);
  index_.kl_slot_K = devices::index_on(kl_slot, like);
  index_.kl_weight_K = floats(kl_weight);
  if (end_layer_ < model_->n_layers()) {
    index_.kl_batch = models::TokenBatch::continuing(kl_suffixes, kl_begins);
    kl_cache_ = cache_.select_rows(kl_rows);
    kl_cache_.drop_layers_below(end_layer_);
  }
}

at::Tensor ActiveSet::add_to(const at::Tensor& output_ND, const at::Tensor& delta_BD, size_t site) const {
  const auto here = [&](const at::Tensor& index) {
    return devices::route_like(index, output_ND, devices::Purpose::kInput);
  };
  // Rows share slots: on CUDA the gradient of index_select adds them in any order, that of indexing sorts first.
  const at::Tensor rows_ND =
      delta_BD.is_cuda() ? delta_BD.index({index_.slot_of_added_N}) : delta_BD.index_select(0, index_.slot_of_added_N);
  const at::Tensor delta = devices::route_like(rows_ND, output_ND, devices::Purpose::kDelta, devices::Dtype::kMatch);
  at::Tensor changed = output_ND.index_add(0, here(index_.added_N), delta);
  if (above_) return changed;  // held vectors are part of what enters
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (const auto& [token, held] : rows_[r].held) {
      const at::Tensor vector =
          devices::route_like(held->vectors_D[site], output_ND, devices::Purpose::kDelta, devices::Dtype::kMatch);
      changed = changed.index_add(0, devices::index_on({index_.batch.token(static_cast<int64_t>(r), token)}, output_ND),
                                  vector.unsqueeze(0));
    }
  }
  return changed;
}

at::Tensor ActiveSet::run_above(const std::vector<at::Tensor>& delta_BD, std::vector<at::Tensor>& watched_RD) {
  at::Tensor hidden_ND = entering_ND_;
  if (above_) hidden_ND = add_to(hidden_ND, delta_BD[0], 0);
  if (first_layer_ >= end_layer_) return hidden_ND;
  hooks::HookSession session(upper_->hooks());
  if (!above_) {
    for (size_t s = 0; s < spec_->sites.size(); ++s)
      session.edit(spec_->sites[s], [this, &delta_BD, s](const at::Tensor& x) { return add_to(x, delta_BD[s], s); });
  }
  const auto watched = mapped(spec_->watched_layers, [](int layer) {
    return hooks::SiteRef{hooks::Site::kLayerOut, layer};
  });
  for (const auto& site : watched) session.capture(site, {.reference = true, .tokens = index_.lookups});
  session.attach();
  const models::KeptTables kept(tables_);
  hidden_ND = upper_->forward(index_.batch, {first_layer_, hidden_ND, end_layer_, &cache_, false, models::kNoTokens})
                  .needed_hidden();
  watched_RD = mapped(watched, [&](const auto& site) { return session.captured(site); });
  session.finish();
  return hidden_ND;
}

ActiveSet::Hidden ActiveSet::forward(const std::vector<at::Tensor>& delta_BD) {
  Hidden result;
  const at::Tensor hidden_ND = run_above(delta_BD, result.watched_RD);
  const auto pick = [&](const at::Tensor& tokens) {
    return hidden_ND.index_select(0, devices::route_like(tokens, hidden_ND, devices::Purpose::kInput));
  };
  result.label_MD = pick(index_.label_token_M);
  if (!index_.kl_token_K.defined()) return result;
  result.kl_KD = pick(index_.kl_token_K);
  if (end_layer_ >= model_->n_layers()) return result;
  const models::KeptTables kept(kl_tables_);  // the divergence is read from the model's own output
  result.kl_KD = upper_->forward(index_.kl_batch, {end_layer_, result.kl_KD, -1, &kl_cache_, false, models::kNoTokens})
                     .needed_hidden();
  return result;
}

void ActiveSet::compare_with_unchanged() {
  const at::NoGradGuard no_grad;
  const auto zeros = mapped(initial_BD_, [](const auto& x_BD) { return at::zeros_like(x_BD); });
  const Hidden hidden = forward(zeros);
  if (hidden.kl_KD.defined()) (void)divergence_loss(*upper_, hidden.kl_KD, index_.kl_weight_K, kl_first_KV, false);
}

void ActiveSet::keep(const std::vector<int64_t>& slots) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> new_slot(members_.size(), -1);
  std::vector<size_t> members;
  for (size_t i = 0; i < slots.size(); ++i) {
    new_slot[static_cast<size_t>(slots[i])] = static_cast<int64_t>(i);
    members.push_back(members_[static_cast<size_t>(slots[i])]);
  }
  std::vector<ActiveRow> rows;
  std::vector<int64_t> row_numbers, tokens, kl_numbers;
  int64_t kl_number = 0;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const int64_t slot = new_slot[rows_[r].slot];
    const int64_t number_of_kl = rows_[r].kl ? kl_number++ : -1;
    if (slot < 0) continue;
    const auto number = static_cast<int64_t>(r);
    for (int64_t k = 0; k < index_.batch.length(number); ++k) tokens.push_back(index_.batch.token(number, k));
    row_numbers.push_back(number);
    if (number_of_kl >= 0) kl_numbers.push_back(number_of_kl);
    rows.push_back(std::move(rows_[r]));
    rows.back().slot = static_cast<size_t>(slot);
  }
  entering_ND_ = entering_ND_.index_select(0, devices::index_on(tokens, entering_ND_));
  for (auto& initial : initial_BD_) initial = initial.index_select(0, devices::index_on(slots, initial));
  if (kl_first_KV.defined()) kl_first_KV = kl_first_KV.index_select(0, devices::index_on(kl_numbers, kl_first_KV));
  if (!cache_.empty()) cache_ = cache_.select_rows(row_numbers);
  rows_ = std::move(rows);
  members_ = std::move(members);
  rebuild_index();
}

void ActiveSet::append(ActiveSet&& other) {
  const at::NoGradGuard no_grad;
  EMEND_CHECK(kl_first_KV.defined() == other.kl_first_KV.defined() || !index_.kl_token_K.defined() ||
                  !other.index_.kl_token_K.defined(),
              "sets of different progress");
  const size_t slots = members_.size();
  for (auto& row : other.rows_) {
    row.slot += slots;
    rows_.push_back(std::move(row));
  }
  members_.insert(members_.end(), other.members_.begin(), other.members_.end());
  const auto join = [](at::Tensor& mine, const at::Tensor& added) {
    mine = !mine.defined() ? added : added.defined() ? at::cat({mine, added}) : mine;
  };
  join(entering_ND_, other.entering_ND_);
  join(kl_first_KV, other.kl_first_KV);
  for (size_t s = 0; s < initial_BD_.size(); ++s) join(initial_BD_[s], other.initial_BD_[s]);
  cache_.append_rows(std::move(other.cache_));
  rebuild_index();
}

namespace {

// Logits at once. On a CPU few enough that the allocator keeps the memory between slices: what is larger comes from the
// kernel each time, page by page, which took a quarter of some runs.
constexpr int64_t kSliceBytes = int64_t{64} << 20, kHostSliceBytes = int64_t{16} << 20;

int64_t slice_rows(const models::Model& model) {
  const int64_t row_bytes = model.vocab_size() * static_cast<int64_t>(c10::elementSize(work_dtype(model)));
  return std::max<int64_t>(1, (model.placement().head.is_cuda() ? kSliceBytes : kHostSliceBytes) / row_bytes);
}

// Runs `body(begin, count)` over slices of `total` rows.
template <class Body>
void for_slices(int64_t total, int64_t step, Body body) {
  for (int64_t begin = 0; begin < total; begin += step) body(begin, std::min(step, total - begin));
}

}  // namespace

LabelLoss label_loss(const models::Model& model, const at::Tensor& hidden_MD, const at::Tensor& labels_M,
                     const at::Tensor& coefficient_M, const at::Tensor& floor_M, bool raw_head,
                     const LossWants& wants) {
  std::vector<at::Tensor> nll, hits, grads;
  for_slices(hidden_MD.size(0), slice_rows(model), [&](int64_t begin, int64_t count) {
    const at::AutoGradMode mode(wants.gradient);
    at::Tensor rows = hidden_MD.detach().narrow(0, begin, count);
    if (wants.gradient) rows = rows.clone().requires_grad_(true);
    const at::Tensor logits = model.project(rows, raw_head);
    const auto part = [&](const at::Tensor& x_M) {
      return x_M.defined() ? devices::route_like(x_M.narrow(0, begin, count), logits, devices::Purpose::kLabels) : x_M;
    };
    const at::Tensor labels = part(labels_M), floor = part(floor_M);
    if (devices::own_kernels(logits)) {
      const auto own = devices::head_loss(logits.detach(), labels, part(coefficient_M), floor, wants.gradient);
      nll.push_back(own.nll_M);
      if (wants.hits) hits.push_back(own.hit_M);
      if (wants.gradient) grads.push_back(torch::autograd::grad({logits}, {rows}, {own.grad_MV})[0]);
      return;
    }
    const at::Tensor log_p = at::log_softmax(logits, 1, work_dtype(model));
    const at::Tensor picked = log_p.gather(1, labels.unsqueeze(1)).squeeze(1);
    at::Tensor above = -picked.detach();
    if (floor.defined()) above = (above - floor).clamp_min(0);
    nll.push_back(above);
    if (wants.hits) hits.push_back(picked.detach() >= log_p.detach().amax(1));
    if (!wants.gradient) return;
    at::Tensor weight = part(coefficient_M);
    if (floor.defined()) weight = weight * (above > 0);
    grads.push_back(torch::autograd::grad({-(picked * weight).sum()}, {rows})[0]);
  });
  LabelLoss loss;
  loss.nll_M = at::cat(nll);
  if (wants.hits) loss.hit_M = at::cat(hits);
  if (wants.gradient) loss.grad_MD = at::cat(grads);
  return loss;
}

DivergenceLoss divergence_loss(const models::Model& model, const at::Tensor& hidden_KD, const at::Tensor& coefficient_K,
                               at::Tensor& first_KV, bool gradient) {
  std::vector<at::Tensor> kl, first, grads;
  for_slices(hidden_KD.size(0), slice_rows(model), [&](int64_t begin, int64_t count) {
    const at::AutoGradMode mode(gradient);
    at::Tensor rows = hidden_KD.detach().narrow(0, begin, count);
    if (gradient) rows = rows.clone().requires_grad_(true);
    const at::Tensor log_p = at::log_softmax(model.project(rows), 1, work_dtype(model));
    at::Tensor before = log_p.detach();
    if (first_KV.defined()) {
      before = first_KV.narrow(0, begin, count);
    } else {
      first.push_back(before);
    }
    const at::Tensor each = (log_p.exp() * (log_p - before)).sum(1);
    kl.push_back(each.detach());
    if (!gradient) return;
    const at::Tensor weight =
        devices::route_like(coefficient_K.narrow(0, begin, count), log_p, devices::Purpose::kLabels);
    grads.push_back(torch::autograd::grad({(each * weight).sum()}, {rows})[0]);
  });
  if (!first_KV.defined()) first_KV = at::cat(first);
  DivergenceLoss loss;
  loss.kl_K = at::cat(kl);
  if (gradient) loss.grad_KD = at::cat(grads);
  return loss;
}

}  // namespace emend::editors::detail
