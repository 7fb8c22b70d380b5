#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <emend/devices/kernels.h>
#include <emend/devices/placement.h>
#include <emend/models/detail/dot_products.h>
#include <emend/models/detail/few_queries.h>
#include <emend/models/detail/vectors.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

namespace emend::models::detail {
namespace {

constexpr int64_t kMostQueries = 8;    // a head; beyond, the library's products are faster
constexpr int64_t kMostLearning = 64;  // the same where a gradient is wanted: short texts, whose products are small
constexpr int64_t kAtOnce = 64;        // keys or values that are widened together

// Heads that make it worth waking another thread, of so many multiplications each.
int64_t heads_a_thread(int64_t multiplications) {
  constexpr int64_t kEnough = 1 << 18;
  return std::max<int64_t>(1, kEnough / std::max<int64_t>(1, multiplications));
}

struct Widen {
  template <class>
  [[gnu::always_inline]] static void run(const uint16_t* bfloat16, int64_t step, int64_t count, int64_t d, float* to) {
    for (int64_t s = 0; s < count; ++s, bfloat16 += step, to += d)
      for (int64_t c = 0; c < d; ++c) to[c] = std::bit_cast<float>(static_cast<uint32_t>(bfloat16[c]) << 16);
  }
};

struct Narrow {
  template <class>
  [[gnu::always_inline]] static void run(const float* x, int64_t count, uint16_t* bfloat16) {
    for (int64_t i = 0; i < count; ++i) bfloat16[i] = c10::detail::round_to_nearest_even(x[i]);
  }
};

// Entry (i, k) is at[i·row + k·column].
struct Matrix {
  const float* at;
  int64_t row, column;
};

// Columns that are multiplied together: one vector or, where a register holds fewer numbers, several.
constexpr int64_t kLanes = 16;

// c_{i,j} = Σ_k a_{i,k}·b_{k,j} for `n` rows, or added to what c holds.
struct Multiply {
  template <class Vector, int kRows>
  [[gnu::always_inline]] static void tile(Matrix a, const float* b, int64_t b_row, int64_t depth, int64_t columns,
                                          bool add, float* c) {
    constexpr int kParts = kLanes / kWidth<Vector>;
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      Vector sums[kRows][kParts] = {}, factor[kParts];
      for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) load(factor[p], b + k * b_row + j + p * kWidth<Vector>);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
          for (int p = 0; p < kParts; ++p) sums[r][p] += a.at[r * a.row + k * a.column] * factor[p];
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          float* to = c + r * columns + j + p * kWidth<Vector>;
          if (add) load(factor[p], to), sums[r][p] += factor[p];
          store(sums[r][p], to);
        }
    }
    for (; j < columns; ++j)
      for (int r = 0; r < kRows; ++r) {
        float sum = add ? c[r * columns + j] : 0;
        for (int64_t k = 0; k < depth; ++k) sum += a.at[r * a.row + k * a.column] * b[k * b_row + j];
        c[r * columns + j] = sum;
      }
  }

  template <class Vector>
  [[gnu::always_inline]] static void run(Matrix a, const float* b, int64_t b_row, int64_t n, int64_t depth,
                                         int64_t columns, bool add, float* c) {
    // Six rows: what the registers of AVX2 hold.
    for (; n >= 6; n -= 6, a.at += 6 * a.row, c += 6 * columns) tile<Vector, 6>(a, b, b_row, depth, columns, add, c);
    if (n >= 3) {
      tile<Vector, 3>(a, b, b_row, depth, columns, add, c);
      n -= 3, a.at += 3 * a.row, c += 3 * columns;
    }
    if (n == 2) tile<Vector, 2>(a, b, b_row, depth, columns, add, c);
    if (n == 1) tile<Vector, 1>(a, b, b_row, depth, columns, add, c);
  }
};

// Calls `use(head, rows, step, first, count)` for every key-value head of `x_BgSd` with its rows in float32, a part at
// a time; heads side by side. `queries`: of a head.
template <class Use>
void each_head(const at::Tensor& x_BgSd, int64_t queries, const Use& use) {
  const int64_t groups = x_BgSd.size(1), S = x_BgSd.size(2), d = x_BgSd.size(3), step = x_BgSd.stride(2);
  const bool wide = x_BgSd.scalar_type() == at::kFloat;
  at::parallel_for(0, x_BgSd.size(0) * groups, heads_a_thread(queries * S * d), [&](int64_t begin, int64_t end) {
    std::vector<float> part(wide ? 0 : static_cast<size_t>(kAtOnce * d));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t at = head / groups * x_BgSd.stride(0) + head % groups * x_BgSd.stride(1);
      if (wide) {
        use(head, x_BgSd.const_data_ptr<float>() + at, step, int64_t{0}, S);
        continue;
      }
      const auto* bits = static_cast<const uint16_t*>(x_BgSd.const_data_ptr()) + at;
      for (int64_t s = 0; s < S; s += kAtOnce) {
        const int64_t count = std::min(kAtOnce, S - s);
        run<Widen>(bits + s * step, step, count, d, part.data());
        use(head, part.data(), d, s, count);
      }
    }
  });
}

at::Tensor attend_unlearned(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                            const at::Tensor& mask, double scale) {
  const int64_t B = q_BhTd.size(0), h = q_BhTd.size(1), T = q_BhTd.size(2), d = q_BhTd.size(3);
  const int64_t groups = k_BgSd.size(1), S = k_BgSd.size(2), n = h / groups * T, width = v_BgSd.size(3);
  const at::Tensor q = (q_BhTd.to(at::kFloat) * scale).contiguous();
  at::Tensor scores = at::empty({B, h, T, S}, q.options()), out = at::zeros({B, h, T, width}, q.options());
  const auto* from = q.const_data_ptr<float>();
  auto* to = scores.mutable_data_ptr<float>();
  each_head(k_BgSd, n, [&](int64_t head, const float* keys, int64_t step, int64_t first, int64_t count) {
    dot_products(keys, step, count, from + head * n * d, n, d, S, to + head * n * S + first);
  });
  if (mask.defined()) scores.add_(mask);
  const at::Tensor pattern = at::softmax(scores, -1);
  const auto* weights = pattern.const_data_ptr<float>();
  auto* sums = out.mutable_data_ptr<float>();
  each_head(v_BgSd, n, [&](int64_t head, const float* values, int64_t step, int64_t first, int64_t count) {
    const Matrix part{weights + head * n * S + first, S, 1};
    run<Multiply>(part, values, step, n, count, width, true, sums + head * n * width);
  });
  return out.to(q_BhTd.scalar_type());
}

// With a gradient. What belongs to a key-value head is a few small matrices in float32, whose rows are filled up with
// zeros to whole vectors.

int64_t whole(int64_t columns) {
  return (columns + kLanes - 1) / kLanes * kLanes;
}

// The same with rows of b that lie without gaps.
void multiply(Matrix a, const float* b, int64_t n, int64_t depth, int64_t columns, float* c) {
  run<Multiply>(a, b, columns, n, depth, columns, false, c);
}

// p·(g − Σ p·g) in place of g, the gradient of the pattern p: that of the scores. Rows are whole vectors.
struct ThroughSoftmax {
  template <class Vector>
  [[gnu::always_inline]] static void run(const float* pattern, int64_t n, int64_t columns, float* grad) {
    for (int64_t i = 0; i < n; ++i, pattern += columns, grad += columns) {
      Vector sums = {}, p, g;
      for (int64_t s = 0; s < columns; s += kWidth<Vector>) load(p, pattern + s), load(g, grad + s), sums += p * g;
      const float sum = sum_of(sums);
      for (int64_t s = 0; s < columns; s += kWidth<Vector>) {
        load(p, pattern + s), load(g, grad + s);
        g = p * (g - sum);
        store(g, grad + s);
      }
    }
  }
};

// The heads of a tensor [B, heads, T, d] that share a key-value head: `rows` of them below each other.
struct HeadRows {
  const at::Tensor& x;
  int64_t groups;

  [[nodiscard]] int64_t rows() const { return x.size(1) / groups * x.size(2); }
  [[nodiscard]] int64_t columns() const { return whole(x.size(3)); }
  [[nodiscard]] std::vector<float> room() const { return std::vector<float>(static_cast<size_t>(rows() * columns())); }

  void read(int64_t group, std::vector<float>& to) const {
    const int64_t d = x.size(3), out = columns();
    each(group, [&](int64_t row, int64_t at) {
      if (x.scalar_type() == at::kFloat)
        std::copy_n(x.const_data_ptr<float>() + at, d, to.data() + row * out);
      else
        run<Widen>(static_cast<const uint16_t*>(x.const_data_ptr()) + at, 0, 1, d, to.data() + row * out);
    });
  }
  void write(int64_t group, const std::vector<float>& from) const {
    const int64_t d = x.size(3), in = columns();
    each(group, [&](int64_t row, int64_t at) {
      if (x.scalar_type() == at::kFloat)
        std::copy_n(from.data() + row * in, d, x.mutable_data_ptr<float>() + at);
      else
        run<Narrow>(from.data() + row * in, d, static_cast<uint16_t*>(x.mutable_data_ptr()) + at);
    });
  }

 private:
  template <class Use>
  void each(int64_t group, const Use& use) const {
    const int64_t together = x.size(1) / groups, batch = group / groups, first = group % groups * together;
    int64_t row = 0;
    for (int64_t head = first; head < first + together; ++head)
      for (int64_t t = 0; t < x.size(2); ++t) use(row++, batch * x.stride(0) + head * x.stride(1) + t * x.stride(2));
  }
};

// Laid out as the packed tokens are, [B, T, heads, d], so that packing the heads again copies nothing.
at::Tensor empty_heads(const at::Tensor& like_BhTd, int64_t width) {
  return at::empty({like_BhTd.size(0), like_BhTd.size(2), like_BhTd.size(1), width}, like_BhTd.options())
      .transpose(1, 2);
}

// Of x [rows, columns], [columns, rows]; what fills up the rows is not written.
void transpose(const std::vector<float>& x, int64_t rows, int64_t columns, std::vector<float>& to) {
  const int64_t in = whole(columns), out = whole(rows);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * out + r] = x[r * in + c];
}

// The pattern, [B, h, T, S] in float32, and the result.
std::pair<at::Tensor, at::Tensor> attend_forward(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd,
                                                 const at::Tensor& v_BgSd, const at::Tensor& mask, double scale) {
  const int64_t groups = k_BgSd.size(1), S = k_BgSd.size(2), d = q_BhTd.size(3), parts = q_BhTd.size(0) * groups;
  at::Tensor scores =
      at::empty({q_BhTd.size(0), q_BhTd.size(1), q_BhTd.size(2), S}, q_BhTd.options().dtype(at::kFloat));
  const HeadRows queries{q_BhTd, groups}, keys{k_BgSd, groups}, values{v_BgSd, groups}, all_scores{scores, groups};
  at::parallel_for(0, parts, heads_a_thread(queries.rows() * S * d), [&](int64_t begin, int64_t end) {
    auto q = queries.room(), k = keys.room(), made = all_scores.room();
    std::vector<float> k_dS(static_cast<size_t>(d * whole(S)));
    for (int64_t part = begin; part < end; ++part) {
      queries.read(part, q), keys.read(part, k);
      transpose(k, S, d, k_dS);
      multiply({q.data(), queries.columns(), 1}, k_dS.data(), queries.rows(), d, whole(S), made.data());
      all_scores.write(part, made);
    }
  });
  scores.mul_(scale);
  if (mask.defined()) scores.add_(mask);
  const at::Tensor pattern = at::softmax(scores, -1), out = empty_heads(q_BhTd, v_BgSd.size(3));
  const HeadRows patterns{pattern, groups}, results{out, groups};
  at::parallel_for(0, parts, heads_a_thread(queries.rows() * S * d), [&](int64_t begin, int64_t end) {
    auto p = patterns.room(), v = values.room(), made = results.room();
    for (int64_t part = begin; part < end; ++part) {
      patterns.read(part, p), values.read(part, v);
      multiply({p.data(), whole(S), 1}, v.data(), queries.rows(), S, values.columns(), made.data());
      results.write(part, made);
    }
  });
  return {pattern, out};
}

// The gradients of q, k and v.
std::array<at::Tensor, 3> attend_backward(const at::Tensor& grad_BhTd, const at::Tensor& q_BhTd,
                                          const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                                          const at::Tensor& pattern_BhTS, double scale) {
  const int64_t groups = k_BgSd.size(1), S = k_BgSd.size(2), padded = whole(S);
  std::array gradients{empty_heads(q_BhTd, q_BhTd.size(3)), empty_heads(k_BgSd, k_BgSd.size(3)),
                       empty_heads(v_BgSd, v_BgSd.size(3))};
  const HeadRows grads{grad_BhTd, groups}, queries{q_BhTd, groups}, keys{k_BgSd, groups}, values{v_BgSd, groups},
      patterns{pattern_BhTS, groups}, to_q{gradients[0], groups}, to_k{gradients[1], groups},
      to_v{gradients[2], groups};
  const int64_t n = queries.rows(), d = queries.columns(), width = values.columns();
  at::parallel_for(0, q_BhTd.size(0) * groups, heads_a_thread(n * S * d), [&](int64_t begin, int64_t end) {
    auto g = grads.room(), q = queries.room(), k = keys.room(), v = values.room(), p = patterns.room(), s = p;
    auto made_q = q, made_k = k, made_v = v;
    std::vector<float> v_dS(static_cast<size_t>(v_BgSd.size(3) * padded));
    for (int64_t part = begin; part < end; ++part) {
      grads.read(part, g), queries.read(part, q), keys.read(part, k), values.read(part, v), patterns.read(part, p);
      transpose(v, S, v_BgSd.size(3), v_dS);
      multiply({g.data(), width, 1}, v_dS.data(), n, v_BgSd.size(3), padded, s.data());
      run<ThroughSoftmax>(p.data(), n, padded, s.data());
      for (float& x : s) x *= static_cast<float>(scale);
      multiply({s.data(), padded, 1}, k.data(), n, S, d, made_q.data());
      multiply({s.data(), 1, padded}, q.data(), S, n, d, made_k.data());
      multiply({p.data(), 1, padded}, g.data(), S, n, width, made_v.data());
      to_q.write(part, made_q), to_k.write(part, made_k), to_v.write(part, made_v);
    }
  });
  return gradients;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class AttendFew : public torch::autograd::Function<AttendFew> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& mask, double scale) {
    const auto [pattern, out] = attend_forward(q, k, v, mask.value_or(at::Tensor()), scale);
    context->save_for_backward({q, k, v, pattern});
    context->saved_data["scale"] = scale;
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor grad = gradients[0].stride(-1) == 1 ? gradients[0] : gradients[0].contiguous();
    const auto [q, k, v] =
        attend_backward(grad, saved[0], saved[1], saved[2], saved[3], context->saved_data["scale"].toDouble());
    return {q, k, v, {}, {}};
  }
};

}  // namespace

bool takes_few_queries(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd) {
  bool learns = false;
  for (const at::Tensor& x : {q_BhTd, k_BgSd, v_BgSd}) {
    if (!devices::in_host_memory(x.device()) || !devices::own_kernels(x) || x.stride(-1) != 1) return false;
    learns = learns || devices::wants_gradient(x);
  }
  return q_BhTd.size(2) <= (learns ? kMostLearning : kMostQueries);
}

at::Tensor attend_few(const at::Tensor& q_BhTd, const at::Tensor& k_BgSd, const at::Tensor& v_BgSd,
                      const at::Tensor& mask, double scale) {
  for (const at::Tensor& x : {q_BhTd, k_BgSd, v_BgSd})
    if (devices::wants_gradient(x))
      return AttendFew::apply(q_BhTd, k_BgSd, v_BgSd, mask.defined() ? std::optional(mask) : std::nullopt, scale);
  return attend_unlearned(q_BhTd, k_BgSd, v_BgSd, mask, scale);
}

}  // namespace emend::models::detail
