#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/fused_loss.h>
#include <emend/editors/detail/target_engines.h>
#include <torch/csrc/autograd/autograd.h>

namespace emend::editors::detail {
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
    const at::Tensor log_p = at::log_softmax(model.project(rows, raw_head), 1, work_dtype(model));
    const at::Tensor labels =
        devices::route_like(labels_M.narrow(0, begin, count), log_p, devices::Purpose::kLabels).unsqueeze(1);
    const at::Tensor picked = log_p.gather(1, labels).squeeze(1);
    at::Tensor above = -picked.detach();
    if (floor_M.defined())
      above =
          (above - devices::route_like(floor_M.narrow(0, begin, count), above, devices::Purpose::kLabels)).clamp_min(0);
    nll.push_back(above);
    if (wants.hits) hits.push_back(picked.detach() >= log_p.detach().amax(1));
    if (!wants.gradient) return;
    at::Tensor weight = devices::route_like(coefficient_M.narrow(0, begin, count), log_p, devices::Purpose::kLabels);
    if (floor_M.defined()) weight = weight * (above > 0);
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
