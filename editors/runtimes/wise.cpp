// WISE beside a model: each token asks every side memory how much it would change the layer's output. The one that
// would change it most, if that is more than its threshold, is added; other tokens keep the main memory's output, byte
// for byte.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/editors/wise_memory.h>

namespace emend::editors {
namespace {

class WiseRuntime final : public RuntimeEdit {
 public:
  WiseRuntime(std::vector<WiseMemory> memories, int layer) : memories_(std::move(memories)), layer_(layer) {}

  [[nodiscard]] std::vector<hooks::HookHandle> attach(const models::Model& model) const override {
    if (memories_.empty()) return {};
    const at::Tensor home = model.weight(model.edit_site(layer_).weight_name);
    std::vector<at::Tensor> deltas_DF;
    std::vector<double> thresholds;
    for (const auto& memory : memories_) {
      deltas_DF.push_back(devices::route_like(memory.delta_DF, home, devices::Purpose::kDelta));
      thresholds.push_back(memory.threshold);
    }
    const at::Tensor threshold_M1 =
        devices::route_like(at::tensor(thresholds, at::kDouble).to(at::kFloat), home, devices::Purpose::kDelta)
            .unsqueeze(1);
    const auto keys = std::make_shared<at::Tensor>();
    std::vector<hooks::HookHandle> handles;
    handles.push_back(model.hooks().at({hooks::Site::kMlpDownIn, layer_}).add([keys](const at::Tensor& x) {
      *keys = x.detach();
      return at::Tensor();
    }));
    handles.push_back(model.hooks().at({hooks::Site::kMlpDownOut, layer_}).add([=](const at::Tensor& x) {
      const at::NoGradGuard no_grad;
      const at::Tensor keys_NF = std::exchange(*keys, at::Tensor()).to(at::kFloat);
      std::vector<at::Tensor> change_MND;
      for (const auto& delta_DF : deltas_DF) change_MND.push_back(keys_NF.mm(delta_DF.t()));
      const at::Tensor all_MND = at::stack(change_MND);
      at::Tensor activation_MN = all_MND.norm(2, 2);
      activation_MN = at::where(activation_MN > threshold_M1, activation_MN, at::zeros_like(activation_MN));
      const auto [strongest_N, which_N] = activation_MN.max(0);
      const at::Tensor routed_N = strongest_N > 0;
      if (!routed_N.any().item<bool>()) return at::Tensor();
      const at::Tensor index_1ND = which_N.view({1, -1, 1}).expand({1, all_MND.size(1), all_MND.size(2)});
      const at::Tensor added_ND = all_MND.gather(0, index_1ND).squeeze(0);
      return at::where(routed_N.unsqueeze(1), (x.to(at::kFloat) + added_ND).to(x.scalar_type()), x);
    }));
    return handles;
  }

 private:
  std::vector<WiseMemory> memories_;
  int layer_;
};

}  // namespace

RuntimePart wise_part(const std::vector<WiseMemory>& memories, const models::EditSite& site) {
  RuntimePart part;
  part.kind = "wise";
  auto list = nlohmann::json::array();
  for (const auto& memory : memories) {
    part.tensors["memory." + std::to_string(list.size())] = memory.delta_DF;
    list.push_back({{"threshold", memory.threshold}, {"case_ids", memory.case_ids}});
  }
  part.values = {{"layer", site.layer}, {"shape", {site.out_features, site.in_features}}, {"memories", list}};
  return part;
}

std::vector<WiseMemory> wise_memories(const RuntimePart& part, const models::EditSite& site, const std::string& where) {
  std::vector<WiseMemory> memories;
  for (const auto& entry : part.values.at("memories")) {
    WiseMemory memory;
    memory.delta_DF = detail::part_tensor(part, "memory." + std::to_string(memories.size()),
                                          {site.out_features, site.in_features}, where)
                          .to(at::kFloat);
    memory.threshold = entry.at("threshold").get<double>();
    memory.case_ids = entry.at("case_ids").get<std::vector<int64_t>>();
    memories.push_back(std::move(memory));
  }
  return memories;
}

std::unique_ptr<RuntimeEdit> make_wise_runtime(const RuntimePart& part, const models::Model& model,
                                               const std::string& where) {
  const models::EditSite site = detail::part_site(part, model, where);
  return std::make_unique<WiseRuntime>(wise_memories(part, site, where), site.layer);
}

}  // namespace emend::editors
