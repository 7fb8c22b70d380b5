#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/models/kv_cache.h>

#include <algorithm>

namespace emend::models {

KvCache::KvCache(int n_layers, int64_t capacity)
    : keys_(n_layers), values_(n_layers), incomplete_(n_layers, false), capacity_(capacity), n_layers_(n_layers) {}

// Slots for so many tokens and some that are still to come.
static int64_t with_room(int64_t tokens) {
  return tokens + tokens / 4 + 64;
}

// Slots for the longest row: those of a longer one that has gone are let go.
int64_t KvCache::slots_for(const KvCache& other) const {
  int64_t longest = 0;
  for (const auto* lengths : {&lengths_, &other.lengths_})
    for (const int64_t length : *lengths) longest = std::max(longest, length);
  return with_room(longest);
}

void KvCache::reserve(int layer, const at::Tensor& like_BgTd, int64_t slots) {
  at::Tensor& keys = keys_[layer];
  at::Tensor& values = values_[layer];
  const int64_t have = keys.defined() && !empty() ? keys.size(2) : 0;  // an empty one may hold those of a broken pass
  if (have >= slots) return;
  int64_t wanted = std::max(capacity_, slots);
  if (have > 0) wanted = std::max(wanted, with_room(have));
  for (at::Tensor* tensor : {&keys, &values}) {
    // Zeros, because attention multiplies masked slots by 0: they must be finite.
    at::Tensor grown =
        at::zeros({like_BgTd.size(0), like_BgTd.size(1), wanted, like_BgTd.size(3)}, like_BgTd.options());
    if (have > 0) grown.narrow(2, 0, have).copy_(*tensor);
    *tensor = grown;
  }
}

KvCache KvCache::select_rows(const std::vector<int64_t>& rows) const {
  KvCache selected(n_layers_);
  for (const int64_t r : rows) {
    if (r < 0 || r >= std::ssize(lengths_))
      refuse({"key-value cache", "row " + std::to_string(r), "a row of " + std::to_string(lengths_.size()),
              "check the row numbers"});
    selected.lengths_.push_back(lengths_[r]);
    selected.prompt_lengths_.push_back(prompt_lengths_[r]);
  }
  const int64_t slots = selected.slots_for(selected);
  const at::Tensor index = at::tensor(rows, at::kLong);
  for (int layer = 0; layer < n_layers_; ++layer) {
    if (!keys_[layer].defined()) continue;
    const at::Tensor here = devices::route_like(index, keys_[layer], devices::Purpose::kInput);
    const int64_t kept = std::min(keys_[layer].size(2), slots);
    selected.keys_[layer] = keys_[layer].narrow(2, 0, kept).index_select(0, here);
    selected.values_[layer] = values_[layer].narrow(2, 0, kept).index_select(0, here);
  }
  selected.incomplete_ = incomplete_;
  return selected;
}

// Slots that one side has more of are zero on the other: masked slots must be finite.
void KvCache::append_rows(KvCache other) {
  if (other.empty()) return;
  if (empty()) {
    *this = std::move(other);
    return;
  }
  const int64_t slots = slots_for(other);
  for (int layer = 0; layer < n_layers_; ++layer) {
    const bool here = keys_[layer].defined(), there = other.keys_[layer].defined();
    if (here != there || incomplete_[layer] != other.incomplete_[layer])
      refuse({"key-value cache", "layer " + std::to_string(layer) + " in one of two caches that are joined",
              "caches that saw the same layers", "run both through the same passes"});
    if (!here) continue;
    const auto join = [slots](const at::Tensor& a, const at::Tensor& b) {
      at::Tensor joined = at::zeros({a.size(0) + b.size(0), a.size(1), slots, a.size(3)}, a.options());
      int64_t begin = 0;
      for (const at::Tensor* part : {&a, &b}) {
        const int64_t kept = std::min(part->size(2), slots);
        joined.narrow(0, begin, part->size(0)).narrow(2, 0, kept).copy_(part->narrow(2, 0, kept));
        begin += part->size(0);
      }
      return joined;
    };
    const at::NoGradGuard no_grad;
    keys_[layer] = join(keys_[layer], other.keys_[layer]);
    values_[layer] = join(values_[layer], other.values_[layer]);
  }
  capacity_ = 0;
  lengths_.insert(lengths_.end(), other.lengths_.begin(), other.lengths_.end());
  prompt_lengths_.insert(prompt_lengths_.end(), other.prompt_lengths_.begin(), other.prompt_lengths_.end());
}

void KvCache::truncate(const std::vector<int64_t>& lengths) {
  if (lengths.size() != lengths_.size())
    refuse({"key-value cache", std::to_string(lengths.size()) + " lengths",
            "one for each of " + std::to_string(lengths_.size()) + " rows", "give a length a row"});
  for (size_t r = 0; r < lengths.size(); ++r) {
    if (lengths[r] < 0 || lengths[r] > lengths_[r])
      refuse({"key-value cache", "length " + std::to_string(lengths[r]) + " for row " + std::to_string(r),
              "0 to " + std::to_string(lengths_[r]), "a cache can only forget"});
  }
  lengths_ = lengths;
}

void KvCache::drop_layers_below(int first) {
  for (int layer = 0; layer < std::min(first, n_layers_); ++layer) {
    keys_[layer] = at::Tensor();
    values_[layer] = at::Tensor();
    incomplete_[layer] = true;
  }
}

int64_t KvCache::bytes() const {
  int64_t total = 0;
  for (const auto* tensors : {&keys_, &values_})
    for (const at::Tensor& x : *tensors)
      if (x.defined()) total += static_cast<int64_t>(x.nbytes());
  return total;
}

}  // namespace emend::models
