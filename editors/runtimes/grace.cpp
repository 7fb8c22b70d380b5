// GRACE beside a model: at one layer, a token whose key lies within the radius of a codebook entry gets the entry's
// value as the output of the MLP; every other token is untouched, byte for byte.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/grace_book.h>

namespace emend::editors {
namespace {

at::Tensor row(const at::Tensor& x) {
  return x.detach().reshape({1, -1});
}

at::Tensor stacked(const at::Tensor& rows, const at::Tensor& added) {
  return rows.defined() ? at::cat({rows, added}) : added.clone();
}

class GraceRuntime final : public RuntimeEdit {
 public:
  GraceRuntime(GraceBook book, int layer) : book_(std::move(book)), layer_(layer) {}
  [[nodiscard]] std::vector<hooks::HookHandle> attach(const models::Model& model) const override {
    if (book_.size() == 0) return {};
    const at::Tensor home = model.weight(model.edit_site(layer_).weight_name);
    const auto there = [&](const at::Tensor& x) { return devices::route_like(x, home, devices::Purpose::kDelta); };
    const at::Tensor values_ED = there(book_.values_ED);
    return attach_grace(model, layer_, {there(book_.keys_EF), there(book_.radius_E)},
                        [values_ED] { return values_ED; });
  }

 private:
  GraceBook book_;
  int layer_;
};

}  // namespace

int64_t GraceBook::admit(const at::Tensor& key_F, const at::Tensor& value_D, const std::vector<int64_t>& label,
                         int64_t case_id, double radius, bool moving_average) {
  const at::NoGradGuard no_grad;
  const auto add = [&](double entry_radius) {
    keys_EF = stacked(keys_EF, row(key_F));
    values_ED = stacked(values_ED, row(value_D));
    radius_E = stacked(radius_E, at::full({1}, entry_radius, at::kFloat));
    labels.push_back(label);
    case_ids.push_back(case_id);
    return size() - 1;
  };
  if (size() == 0) return add(radius);
  const at::Tensor distances = (keys_EF - row(key_F)).norm(2, 1);
  const int64_t nearest = distances.argmin().item<int64_t>();
  const double distance = distances[nearest].item<double>(), reach = radius_E[nearest].item<double>();
  if (distance > radius + reach) return add(radius);
  if (labels[static_cast<size_t>(nearest)] != label) {
    if (distance < 1e-3 * radius) {  // the same prompt: the newer answer counts
      labels[static_cast<size_t>(nearest)] = label;
      case_ids[static_cast<size_t>(nearest)] = case_id;
      values_ED[nearest].copy_(value_D);
      return nearest;
    }
    // Two answers within reach: both get half the way between them.
    radius_E[nearest] = distance / 2 - 1e-5;
    return add(distance / 2);
  }
  if (distance > reach) {
    radius_E[nearest] = distance;
    if (moving_average) keys_EF[nearest].copy_((keys_EF[nearest] + key_F) / 2);
  }
  return nearest;
}

RuntimePart GraceBook::part(int layer, const models::EditSite& site) const {
  RuntimePart part;
  part.kind = "grace";
  part.values = {{"layer", layer},
                 {"shape", {site.out_features, site.in_features}},
                 {"distance", "euclidean"},
                 {"labels", labels},
                 {"case_ids", case_ids}};
  part.tensors = {{"keys", keys_EF}, {"values", values_ED}, {"radius", radius_E}};
  return part;
}

GraceBook GraceBook::from(const RuntimePart& part, const models::EditSite& site, const std::string& where) {
  GraceBook book;
  book.keys_EF = detail::part_tensor(part, "keys", {-1, site.in_features}, where).to(at::kFloat);
  const int64_t entries = book.keys_EF.size(0);
  book.values_ED = detail::part_tensor(part, "values", {entries, site.out_features}, where).to(at::kFloat);
  book.radius_E = detail::part_tensor(part, "radius", {entries}, where).to(at::kFloat);
  book.labels = part.values.at("labels").get<std::vector<std::vector<int64_t>>>();
  book.case_ids = part.values.at("case_ids").get<std::vector<int64_t>>();
  if (static_cast<int64_t>(book.labels.size()) != entries || static_cast<int64_t>(book.case_ids.size()) != entries ||
      part.values.at("distance") != "euclidean")
    throw Error(ErrorClass::kCorruption, {where, "a codebook whose lists differ in length", "a label an entry",
                                          "get the pack again from where it came"});
  return book;
}

std::pair<at::Tensor, at::Tensor> GraceLookup::find(const at::Tensor& query_NF) const {
  const at::NoGradGuard no_grad;
  // Plain differences: the shorter formula by inner products loses the small distances that decide here.
  constexpr int64_t kTokens = 64;
  std::vector<at::Tensor> nearest, within;
  const at::Tensor query = query_NF.detach().to(keys_EF.scalar_type());
  for (int64_t begin = 0; begin < query.size(0); begin += kTokens) {
    const at::Tensor some_NF = query.narrow(0, begin, std::min(kTokens, query.size(0) - begin));
    const auto [distance_N, index_N] = at::cdist(some_NF, keys_EF, 2, /*compute_mode=*/2).min(1);
    nearest.push_back(index_N);
    within.push_back(distance_N <= radius_E.index_select(0, index_N));
  }
  return {at::cat(nearest), at::cat(within)};
}

std::vector<hooks::HookHandle> attach_grace(const models::Model& model, int layer, GraceLookup lookup,
                                            std::function<at::Tensor()> values_ED) {
  const auto query = std::make_shared<at::Tensor>();
  std::vector<hooks::HookHandle> handles;
  handles.push_back(model.hooks().at({hooks::Site::kMlpDownIn, layer}).add([query](const at::Tensor& x) {
    *query = x.detach();
    return at::Tensor();
  }));
  handles.push_back(model.hooks()
                        .at({hooks::Site::kMlpDownOut, layer})
                        .add([query, lookup = std::move(lookup), values = std::move(values_ED)](const at::Tensor& x) {
                          const auto [entry_N, within_N] = lookup.find(*query);
                          *query = at::Tensor();
                          if (!within_N.any().item<bool>()) return at::Tensor();
                          const at::Tensor chosen_ND = values().index_select(0, entry_N).to(x.scalar_type());
                          return at::where(within_N.unsqueeze(1), chosen_ND, x);
                        }));
  return handles;
}

std::unique_ptr<RuntimeEdit> make_grace_runtime(const RuntimePart& part, const models::Model& model,
                                                const std::string& where) {
  const models::EditSite site = detail::part_site(part, model, where);
  return std::make_unique<GraceRuntime>(GraceBook::from(part, site, where), site.layer);
}

}  // namespace emend::editors
