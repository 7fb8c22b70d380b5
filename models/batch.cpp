#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/safetensors.h>
#include <emend/devices/route.h>
#include <emend/models/batch.h>
#include <emend/models/config.h>

#include <algorithm>
#include <numeric>

namespace emend::models {
namespace {

[[noreturn]] void bad_batch(const std::string& got, const std::string& expected) {
  refuse({"token batch", got, expected, "check the rows that were tokenised"});
}

std::string row_name(int64_t row) {
  return "row " + std::to_string(row);
}

// [B,T] on the CPU as int64; `what` for messages.
at::Tensor host_matrix(const at::Tensor& x, const at::Tensor& like, const char* what) {
  if (!x.defined() || x.dim() != 2) bad_batch(std::string(what) + " is not a matrix", "[rows, columns]");
  if (like.defined() && x.sizes() != like.sizes())
    bad_batch(what + (" has shape " + shape_text(x.sizes())), "the shape of input_ids, " + shape_text(like.sizes()));
  if (!x.device().is_cpu() || !(at::isIntegralType(x.scalar_type(), /*includeBool=*/true)))
    bad_batch(std::string(what) + " is " + c10::toString(x.scalar_type()) + " on " + x.device().str(),
              "integers or booleans on the cpu");
  return x.to(at::kLong).contiguous();
}

}  // namespace

TokenBatch TokenBatch::continuing(const std::vector<std::vector<int64_t>>& rows, const std::vector<int64_t>& begins,
                                  const std::vector<int64_t>& columns) {
  const auto require = [&](const std::vector<int64_t>& list, const std::string& what) {
    if (list.size() != rows.size())
      bad_batch(std::to_string(list.size()) + " " + what + "s for " + std::to_string(rows.size()) + " rows",
                "one " + what + " a row");
  };
  require(begins, "begin");
  if (!columns.empty()) require(columns, "column");
  TokenBatch batch;
  for (const auto& row : rows) batch.width_ = std::max(batch.width_, std::ssize(row));
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t row = batch.rows(), begin = begins[r], column = columns.empty() ? begin : columns[r];
    if (begin < 0) bad_batch(row_name(row) + " begins at " + std::to_string(begin), "0 or more");
    if (rows[r].empty()) bad_batch(row_name(row) + " has no tokens", "at least one token a row");
    for (int64_t k = 0; k < std::ssize(rows[r]); ++k) {
      batch.ids_.push_back(rows[r][static_cast<size_t>(k)]);
      batch.positions_.push_back(begin + k);
      batch.columns_.push_back(column + k);
      batch.slots_.push_back(row * batch.width_ + k);
    }
    batch.row_begin_.push_back(batch.tokens());
  }
  batch.is_padding_.assign(batch.ids_.size(), false);
  batch.explicit_positions_ = true;
  return batch;
}

TokenBatch TokenBatch::from_rows(const std::vector<std::vector<int64_t>>& rows) {
  TokenBatch batch = continuing(rows, std::vector<int64_t>(rows.size(), 0));
  batch.explicit_positions_ = false;
  return batch;
}

TokenBatch TokenBatch::from_padded(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                                   const at::Tensor& position_ids, bool keep_padding) {
  const at::Tensor ids = host_matrix(input_ids, {}, "input_ids");
  const at::Tensor mask = host_matrix(attention_mask, ids, "attention_mask");
  const at::Tensor positions = position_ids.defined() ? host_matrix(position_ids, ids, "position_ids") : at::Tensor();
  const int64_t n_rows = ids.size(0), width = ids.size(1);
  const auto* id = ids.const_data_ptr<int64_t>();
  const auto* keep = mask.const_data_ptr<int64_t>();
  const auto* position = positions.defined() ? positions.const_data_ptr<int64_t>() : nullptr;
  TokenBatch batch;
  batch.width_ = width;
  batch.explicit_positions_ = position != nullptr;
  for (int64_t r = 0; r < n_rows; ++r) {
    bool any = false;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t i = r * width + c;
      any |= keep[i] != 0;
      if (keep[i] == 0 && !keep_padding) continue;
      batch.ids_.push_back(id[i]);
      batch.positions_.push_back(position ? position[i] : c);
      batch.columns_.push_back(c);
      batch.is_padding_.push_back(keep[i] == 0);
      batch.slots_.push_back(i);
    }
    if (!any) bad_batch(row_name(r) + " is all padding", "at least one real token a row");
    batch.row_begin_.push_back(batch.tokens());
  }
  return batch;
}

TokenBatch TokenBatch::padded(const std::vector<std::vector<int64_t>>& rows, int64_t pad) {
  const auto ids = mapped(rows, [](const auto& row) { return at::tensor(row, at::kLong); });
  const auto ones = mapped(ids, [](const at::Tensor& row) { return at::ones_like(row); });
  return from_padded(at::pad_sequence(ids, /*batch_first=*/true, static_cast<double>(pad)),
                     at::pad_sequence(ones, /*batch_first=*/true), {}, /*keep_padding=*/true);
}

int64_t TokenBatch::longest() const {
  int64_t longest = 0;
  for (int64_t r = 0; r < rows(); ++r) longest = std::max(longest, length(r));
  return longest;
}

int64_t TokenBatch::token(int64_t row, int64_t k) const {
  if (row < 0 || row >= rows()) bad_batch(row_name(row), "a row from 0 to " + std::to_string(rows() - 1));
  const int64_t n = length(row), index = k < 0 ? n + k : k;
  if (index < 0 || index >= n)
    bad_batch("token " + std::to_string(k) + " of " + row_name(row), "a token of a row of " + std::to_string(n));
  return row_begin_[row] + index;
}

std::vector<int64_t> TokenBatch::last_tokens() const {
  std::vector<int64_t> last;
  for (int64_t row = 0; row < rows(); ++row) last.push_back(token(row, -1));
  return last;
}

void TokenBatch::set_full_lengths(std::vector<int64_t> lengths) {
  if (!lengths.empty() && std::ssize(lengths) != rows())
    bad_batch(std::to_string(lengths.size()) + " full lengths for " + std::to_string(rows()) + " rows", "one a row");
  full_lengths_ = std::move(lengths);
}

at::Tensor TokenBatch::unpack(const at::Tensor& packed) const {
  if (!packed.defined() || packed.dim() < 1 || packed.size(0) != tokens())
    bad_batch("a tensor that does not hold " + std::to_string(tokens()) + " packed tokens", "[tokens, …]");
  auto shape = packed.sizes().vec();
  shape[0] = rows() * width_;
  at::Tensor flat = packed.new_zeros(shape).index_copy(0, devices::index_on(slots_, packed), packed);
  shape[0] = width_;
  shape.insert(shape.begin(), rows());
  return flat.view(shape);
}

at::Tensor TokenBatch::pack(const at::Tensor& unpacked) const {
  if (!unpacked.defined() || unpacked.dim() < 2 || unpacked.size(0) != rows() || unpacked.size(1) != width_)
    bad_batch(
        "a tensor that does not hold " + std::to_string(rows()) + " rows of " + std::to_string(width_) + " tokens",
        "[rows, tokens, …]");
  return unpacked.flatten(0, 1).index_select(0, devices::index_on(slots_, unpacked));
}

namespace {

int64_t common_prefix(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return x - a.begin();
}

struct Best {
  int64_t saved = 0;
  std::vector<SharedGroup> groups = {};
};

/// rows[begin, end) are sorted and have the first `depth` tokens in common.
Best best_partition(const std::vector<std::vector<int64_t>>& sequences, const std::vector<size_t>& rows, size_t begin,
                    size_t end, int64_t least) {
  if (end - begin == 1) return {0, {{0, {rows[begin]}}}};
  Best alone;
  const int64_t depth = common_prefix(sequences[rows[begin]], sequences[rows[end - 1]]);
  for (size_t i = begin; i < end;) {
    size_t j = i + 1;
    const auto& first = sequences[rows[i]];
    if (std::ssize(first) > depth)
      while (j < end && sequences[rows[j]][static_cast<size_t>(depth)] == first[static_cast<size_t>(depth)]) ++j;
    Best part = best_partition(sequences, rows, i, j, least);
    alone.saved += part.saved;
    std::move(part.groups.begin(), part.groups.end(), std::back_inserter(alone.groups));
    i = j;
  }
  const int64_t together = static_cast<int64_t>(end - begin - 1) * depth;
  if (depth == 0 || together < least || together <= alone.saved) return alone;
  return {
      together,
      {{depth, {rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.begin() + static_cast<std::ptrdiff_t>(end)}}}};
}

}  // namespace

std::vector<SharedGroup> share_beginnings(const std::vector<std::vector<int64_t>>& sequences, int64_t least) {
  if (sequences.empty()) return {};
  std::vector<size_t> rows(sequences.size());
  std::iota(rows.begin(), rows.end(), size_t{0});
  std::ranges::stable_sort(rows, [&](size_t a, size_t b) { return sequences[a] < sequences[b]; });
  return best_partition(sequences, rows, 0, rows.size(), least).groups;
}

int64_t shared_beginning(const ModelConfig& config, const std::vector<std::vector<int64_t>>& rows, int64_t left) {
  constexpr int64_t kLeastSaved = 96;  // tokens; a pass of its own costs as much as some of them
  if (rows.empty() || config.rotary_depends_on_length()) return 0;
  auto shared = std::ssize(rows[0]);
  for (const auto& row : rows) shared = std::min({shared, common_prefix(rows[0], row), std::ssize(row) - left});
  return shared * static_cast<int64_t>(rows.size() - 1) < kLeastSaved ? 0 : shared;
}

}  // namespace emend::models
