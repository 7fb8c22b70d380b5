// The thirty ways in which split models are known to fail: emend's own path is right, and where the failure is an
// operand on another device, a deliberate mix raises on simulated devices, so the guard works.
//
//    1 ids on another device than the embedding              here
//    2 hidden states cross a cut without moving              here; every cut: placement_suite_test
//    3 a residual kept on the old device inside a block      here: maps that split a block are refused
//    4 rotary tables and position ids on the first device    here
//    5 a learned position table away from the embedding      here
//    6 masks on the first device                             here
//    7 the KV cache concatenated over layers                 here; 24 tokens: placement_suite_test
//    8 the cache allocated on the first device               here
//    9 a tied head on two devices                            here; saving: family_placement_test
//   10 labels away from the logits                           guard_patterns_editing_test
//   11 a label outside the vocabulary                        guard_patterns_editing_test
//   12 loss terms on three devices                           guard_patterns_editing_test
//   13 a delta away from the layer's output                  guard_patterns_editing_test
//   14 a hook's output is a tuple or on another device       here
//   15 the head copied to where the loss is read             here
//   16 lookup indices on another device                      here
//   17 statistics, keys and residual on three devices        guard_patterns_editing_test
//   18 an inverse in half precision                          guard_patterns_editing_test
//   19 update and parameter on two devices; restoring        guard_patterns_editing_test
//   20 peer-to-peer copies that are silently wrong           here; found: device_doctor_test; real GPUs: Gpu.P20
//   21 a copy read before it has landed                      here: needs a GPU (simulated streams do nothing)
//   22 adapters left on the first device                     guard_patterns_editing_test
//   23 captured activations moved                            here
//   24 stacking tensors of several layers                    here
//   25 numbers of devices; maps without device 0             here
//   26 a stray allocation on device 0                        here (simulated); real GPUs: needs two
//   27 evaluation by another device rule than editing        guard_patterns_editing_test
//   28 right on two devices, wrong on four                   here; 2, 3, 4, 8 and random maps: placement_suite_test
//   29 the statistics' mask and batch on two devices         guard_patterns_editing_test
//   30 the optimiser's state away from its variable          guard_patterns_editing_test
#include <emend/devices/device_map.h>
#include <emend/devices/doctor.h>
#include <emend/devices/planner.h>
#include <emend/devices/runtime.h>
#include <emend/models/config.h>
#include <emend/models/kv_cache.h>
#include <gtest/gtest.h>

#include "support/guards.h"
#include "support/model_shape.h"
#include "support/placements.h"

namespace emend {
namespace guard_patterns_test {

using devices::PlacementPlan;
using devices::Purpose;
using testing::expect_error;
using testing::expect_mix_refused;
using testing::sim;

const c10::Device kCpu(c10::kCPU);

/// A placed model and the same one on the host.
struct Pair {
  Pair(const std::string& family, const PlacementPlan& plan, const nlohmann::json& changes = nlohmann::json::object())
      : config(testing::placed_config(family)) {
    config.update(changes);
    host.emplace(testing::placed_model(config));
    placed.emplace(testing::placed_model(config, &plan));
  }
  void expect_equal_logits(const models::TokenBatch& batch = testing::placed_batch()) const {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(devices::to_host(placed->forward(batch).logits), host->forward(batch).logits));
  }
  nlohmann::json config;
  std::optional<models::Model> host, placed;
};

/// Three layers.
PlacementPlan plan_of(c10::Device embedding, c10::Device l0, c10::Device l1, c10::Device l2, c10::Device head) {
  PlacementPlan plan;
  plan.embedding = plan.position = embedding;
  plan.layers = {l0, l1, l2};
  plan.final_norm = l2;
  plan.head = head;
  return plan;
}

PlacementPlan cut(int first = 0, int second = 1) {
  return plan_of(sim(first), sim(first), sim(second), sim(second), sim(second));
}

at::Tensor square(c10::Device device) {
  return devices::route_to(at::rand({8, 8}), device, Purpose::kOther);
}
at::Tensor index(c10::Device device) {
  return devices::route_to(at::tensor({1, 2}, at::kLong), device, Purpose::kOther);
}

TEST(Guard, P01_IdsGoToTheEmbedding) {
  for (const auto embedding : {kCpu, sim(0), sim(1), sim(3)}) {
    const Pair pair("llama", plan_of(embedding, sim(0), sim(0), sim(1), sim(1)));
    const devices::TransferScope scope;
    pair.expect_equal_logits();
    EXPECT_EQ(scope.total(Purpose::kWeight).count, 0) << "the ids move, not the table";
  }
  expect_mix_refused([] { (void)at::embedding(square(sim(1)), index(sim(0))); });
  expect_mix_refused([] { (void)square(sim(1)).index_select(0, index(kCpu)); });
}

TEST(Guard, P02_HiddenStatesCrossCuts) {
  const Pair pair("llama", cut());
  const devices::TransferScope scope;
  pair.expect_equal_logits();
  EXPECT_EQ(scope.total(Purpose::kHidden).count, 1) << "one cut, one transfer";
  expect_mix_refused([] { (void)at::linear(square(sim(0)), square(sim(1))); });
}

TEST(Guard, P03_BlocksAreNotSplit) {
  const auto config = models::parse_config(testing::placed_config("llama"), "llama");
  const auto names = models::device_module_names(models::family_named("llama"), config);
  std::vector<std::string> warnings;
  const auto spec =
      devices::parse_device_map(R"({"": "sim:0", "model.layers.1": "sim:1", "model.layers.1.mlp": "sim:0"})");
  expect_error(ErrorClass::kInvalidArgument, {"model.layers.1.mlp", "split the block", "model.layers.1"},
               [&] { (void)devices::place_explicitly(spec, names, config.n_layers, false, warnings); });
  expect_mix_refused([] { (void)(square(sim(0)) + square(sim(1))); });
}

TEST(Guard, P04_EveryDeviceHasItsRotaryTables) {
  const Pair pair("llama", plan_of(sim(2), sim(0), sim(1), sim(0), sim(1)));
  // Positions given by the caller, on the host.
  const auto batch = models::TokenBatch::continuing({{3, 17, 40}, {8, 9}}, {5, 0}, {0, 0});
  const devices::TransferScope scope;
  pair.expect_equal_logits(batch);
  std::set<int> with_tables;
  for (const auto& [key, total] : scope.totals())
    if (key.purpose == Purpose::kTable) with_tables.insert(key.to.index());
  EXPECT_EQ(with_tables, (std::set<int>{0, 1})) << "the devices with layers, and no other";
  expect_mix_refused([] { (void)(square(sim(1)) * at::cos(square(sim(0)))); });
  expect_mix_refused([] { (void)square(sim(1)).index_select(0, index(sim(0))); });
}

TEST(Guard, P05_PositionTableAndEmbeddingOnTwoDevices) {
  auto plan = plan_of(sim(0), sim(2), sim(2), sim(2), sim(0));
  plan.position = sim(1);
  for (const char* family : {"gpt2", "opt"}) {
    const Pair pair(family, plan);
    EXPECT_NE(pair.placed->placement().position, pair.placed->placement().embedding);
    pair.expect_equal_logits();
  }
  expect_mix_refused(
      [] { (void)(square(sim(0)).index_select(0, index(sim(0))) + square(sim(1)).index_select(0, index(sim(1)))); });
}

TEST(Guard, P06_MasksLiveWithTheirLayers) {
  // Rows of different lengths need a mask; sliding windows need one of another kind in other layers.
  at::Tensor ids = at::full({2, 6}, 7, at::kLong), mask = at::ones({2, 6}, at::kLong);
  mask[1].narrow(0, 0, 3).zero_();
  for (const char* family : {"mistral", "gemma3", "falcon"})
    for (const bool keep : {false, true}) {
      const auto n_layers = models::parse_config(testing::placed_config(family), family).n_layers;
      for (int64_t before = 0; before <= n_layers; ++before) {
        auto plan = PlacementPlan::single(sim(0), n_layers);
        for (int64_t l = before; l < n_layers; ++l) plan.layers[static_cast<size_t>(l)] = sim(1);
        Pair(family, plan).expect_equal_logits(models::TokenBatch::from_padded(ids, mask, {}, keep));
      }
    }
  expect_mix_refused([] {
    const auto q = square(sim(1)).view({1, 1, 8, 8});
    (void)at::scaled_dot_product_attention(q, q, q, square(sim(0)));
  });
  expect_mix_refused([] { (void)at::where(square(sim(0)) > 0, square(sim(1)), square(sim(1))); });
}

TEST(Guard, P07_TheCacheIsOnePairALayer) {
  const auto plan = plan_of(sim(0), sim(0), sim(1), sim(2), sim(2));
  const Pair pair("chatglm", plan);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(testing::generate_some(*pair.placed, 20), testing::generate_some(*pair.host, 20));
  models::KvCache cache(3);
  (void)pair.placed->forward(testing::placed_batch(), {.cache = &cache});
  const devices::TransferScope scope;
  const auto kept = cache.select_rows({2, 0});  // as when rows of a batch end
  for (int l = 0; l < 3; ++l) {
    EXPECT_EQ(cache.keys(l).device(), plan.layers[static_cast<size_t>(l)]);
    EXPECT_EQ(kept.values(l).device(), plan.layers[static_cast<size_t>(l)]);
  }
  EXPECT_EQ(scope.total(Purpose::kCache).count, 0) << "no keys or values ever travel";
  expect_mix_refused([&] { (void)at::cat({cache.keys(0), cache.keys(1)}, 2); });
  expect_mix_refused([&] { (void)at::stack({cache.values(0), cache.values(2)}); });
}

TEST(Guard, P08_NothingOfTheCacheIsOnTheFirstDevice) {
  const Pair pair("mistral", plan_of(sim(0), sim(5), sim(6), sim(6), sim(6)));
  const at::NoGradGuard no_grad;
  const auto before = devices::device_memory_stats(sim(0)).allocated;
  models::KvCache cache(3, 4096);
  const auto result = pair.placed->forward(testing::placed_batch(), {.cache = &cache});
  EXPECT_GT(cache.bytes(), 1 << 20);
  EXPECT_EQ(devices::device_memory_stats(sim(0)).allocated, before);
  expect_mix_refused([&] {
    const auto q = cache.keys(0);
    (void)at::scaled_dot_product_attention(q, q, devices::route_to(q, sim(0), Purpose::kOther));
  });
}

TEST(Guard, P09_TiedHeadsAreTogetherOrDeclaredCopies) {
  // The planner keeps them together, whatever the budget says.
  devices::PlanRequest request;
  request.map = devices::parse_device_map("sequential");
  request.model.n_layers = 4;
  request.model.hidden = request.model.mlp_width = 64;
  request.model.vocab = 1000;
  request.model.tied = true;
  testing::derive_bytes(request.model);
  request.machine = devices::parse_machine("3x1MiB,cpu=64GiB");
  const auto planned = devices::make_plan(request).placement;
  EXPECT_EQ(planned.head, planned.embedding);
  EXPECT_FALSE(planned.tied_copy);
  // By hand on two devices: a copy, and a write reaches both.
  auto plan = plan_of(sim(0), sim(0), sim(1), sim(1), sim(1));
  plan.tied_copy = true;
  Pair pair("qwen2", plan);
  pair.expect_equal_logits();
  const std::string name = "model.embed_tokens.weight";
  const auto copies = pair.placed->weight_copies(name);
  ASSERT_EQ(copies.size(), 2U);
  const at::Tensor changed = pair.host->weight(name) * 1.5;
  pair.host->set_weight(name, changed);
  pair.placed->set_weight(name, devices::route_like(changed, copies[0], Purpose::kWeight));
  pair.expect_equal_logits();
  expect_mix_refused([&] { (void)at::linear(at::rand({2, 32}).to(copies[1].options()), copies[0]); });
}

TEST(Guard, P14_HooksHandTensorsAndKeepTheirDevice) {
  // A hook is given the tensor that will be used; there is no tuple to unpack wrongly.
  static_assert(std::is_invocable_r_v<at::Tensor, hooks::HookFn, const at::Tensor&>);
  const Pair pair("llama", cut());
  for (const int layer : {0, 2}) {
    hooks::HookSession session(pair.placed->hooks());
    session.edit({hooks::Site::kLayerOut, layer}, [](const at::Tensor& x) {
      return devices::route_to(x * 2, x.device() == sim(0) ? sim(1) : sim(0), Purpose::kOther);
    });
    session.attach();
    expect_error(ErrorClass::kInvalidArgument, {"layer", "sim:", "route_like"},
                 [&] { (void)pair.placed->forward(testing::placed_batch()); });
  }
}

TEST(Guard, P15_HiddenStatesGoToTheHeadAndNotTheHeadToThem) {
  const Pair pair("llama", plan_of(sim(0), sim(0), sim(1), sim(2), sim(3)));
  const at::NoGradGuard no_grad;
  const at::Tensor rows = at::rand({4, 32});
  for (const auto device : {kCpu, sim(0), sim(1), sim(2), sim(3)}) {
    const devices::TransferScope scope;
    const at::Tensor logits = pair.placed->project(devices::route_to(rows, device, Purpose::kOther));
    EXPECT_EQ(logits.device(), sim(3));
    EXPECT_TRUE(at::equal(devices::to_host(logits), pair.host->project(rows)));
    EXPECT_EQ(scope.total(Purpose::kWeight).count, 0);
    EXPECT_LT(scope.total(Purpose::kHidden).largest, 257 * 32 * 4);
  }
  expect_mix_refused([&] { (void)at::linear(rows, pair.placed->weight("lm_head.weight")); });
}

TEST(Guard, P16_IndicesAreHostIntegers) {
  static_assert(std::is_same_v<decltype(models::ForwardOptions::logit_tokens), std::optional<std::vector<int64_t>>>);
  const Pair pair("llama", plan_of(sim(0), sim(1), sim(2), sim(3), sim(0)));
  const at::NoGradGuard no_grad;
  const auto batch = testing::placed_batch();
  const models::ForwardOptions options{.logit_tokens = {{batch.token(2, -1), batch.token(0, 1)}}};
  hooks::HookSession here(pair.host->hooks()), there(pair.placed->hooks());
  for (auto* session : {&here, &there})
    session->capture({hooks::Site::kMlpDownIn, 1}, {.tokens = options.logit_tokens}).attach();
  EXPECT_TRUE(at::equal(devices::to_host(pair.placed->forward(batch, options).logits),
                        pair.host->forward(batch, options).logits));
  EXPECT_TRUE(at::equal(devices::to_host(there.captured({hooks::Site::kMlpDownIn, 1})),
                        here.captured({hooks::Site::kMlpDownIn, 1})));
  expect_mix_refused([] { (void)square(sim(1)).index_select(0, index(sim(0))); });
  expect_mix_refused([] { (void)square(sim(1)).gather(0, index(sim(0)).unsqueeze(0)); });
  expect_mix_refused([] { (void)square(sim(1)).index_put_({index(sim(0))}, square(sim(1))[0]); });
}

// Pairs that are not trusted go through the host, and the numbers stay.
TEST(Guard, P20_CopiesGoRoundWhatIsBroken) {
  devices::stage_through_host(sim(0), sim(1));
  Pair("llama", cut()).expect_equal_logits();
  devices::stage_through_host(sim(0), sim(1), false);
}

std::vector<c10::Device> gpus() {
  std::vector<c10::Device> devices;
  for (int k = 0; k < devices::load_cuda_runtime().devices; ++k)
    devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(k));
  return devices;
}

TEST(Gpu, P20_CopiesAreChecked) {
  if (gpus().empty()) GTEST_SKIP() << "needs a CUDA device: " << devices::load_cuda_runtime().reason;
  auto devices = gpus();
  devices.push_back(kCpu);
  for (const auto& check : devices::check_copies(devices))
    EXPECT_EQ(check.status, devices::CheckStatus::kOk) << check.name << ": " << check.detail;
}

TEST(Gpu, P21_CopiesHaveLandedWhenTheyAreRead) {
  if (gpus().empty())
    GTEST_SKIP() << "streams of simulated devices do nothing; needs a CUDA device: "
                 << devices::load_cuda_runtime().reason;
  auto devices = gpus();
  devices.push_back(kCpu);
  std::mt19937 random(5);
  const at::Tensor start = at::randint(0, 1000, {4096}, at::kLong);
  at::Tensor x = start;
  for (int64_t i = 0; i < 10000; ++i) x = devices::route_to(x, devices[random() % devices.size()], Purpose::kOther) + 1;
  EXPECT_TRUE(at::equal(devices::to_host(x), start + 10000));
}

TEST(Guard, P23_CapturedActivationsStayWithTheirLayer) {
  const Pair pair("llama", plan_of(sim(0), sim(0), sim(1), sim(2), sim(2)));
  const at::NoGradGuard no_grad;
  hooks::HookSession session(pair.placed->hooks());
  for (int l = 0; l < 3; ++l) session.capture({hooks::Site::kLayerOut, l}).capture({hooks::Site::kMlpDownIn, l});
  session.attach();
  const devices::TransferScope scope;
  (void)pair.placed->forward(testing::placed_batch());
  for (int l = 0; l < 3; ++l) {
    EXPECT_EQ(session.captured({hooks::Site::kLayerOut, l}).device(), sim(l));
    EXPECT_EQ(session.captured({hooks::Site::kMlpDownIn, l}).device(), sim(l));
  }
  EXPECT_EQ(scope.total(Purpose::kHost).count + scope.total(Purpose::kKeys).count, 0);
  expect_mix_refused([&] {
    (void)(session.captured({hooks::Site::kLayerOut, 0}) - session.captured({hooks::Site::kLayerOut, 1}));
  });
}

TEST(Guard, P24_TensorsOfSeveralLayersAreGatheredWithATarget) {
  const Pair pair("llama", plan_of(sim(0), sim(0), sim(1), sim(2), sim(2)));
  const at::NoGradGuard no_grad;
  const auto outputs = [&](const models::Model& model) {
    hooks::HookSession session(model.hooks());
    for (int l = 0; l < 3; ++l) session.capture({hooks::Site::kLayerOut, l});
    session.attach();
    (void)model.forward(testing::placed_batch());
    std::vector<at::Tensor> all;
    for (int l = 0; l < 3; ++l) all.push_back(session.captured({hooks::Site::kLayerOut, l}));
    return all;
  };
  const auto here = outputs(*pair.host), there = outputs(*pair.placed);
  std::vector<at::Tensor> gathered;
  for (const auto& x : there) gathered.push_back(devices::route_like(x, there[1], Purpose::kHidden));
  EXPECT_EQ(at::stack(gathered).device(), sim(1));
  EXPECT_TRUE(at::equal(devices::to_host(at::stack(gathered)), at::stack(here)));
  expect_mix_refused([&] { (void)at::stack(there); });
}

TEST(Guard, P25_NamesOfDevicesAreCheckedAndDeviceZeroIsNotNeeded) {
  (void)sim(0);
  expect_error(ErrorClass::kInvalidArgument, {"cuda:0,1", "device_map auto"},
               [] { (void)devices::parse_device_map("cuda:0,1"); });
  expect_error(ErrorClass::kDevice, {"cuda:7", "not visible", "sim:0", "cpu"},
               [] { devices::require_visible(devices::parse_device_name("cuda:7"), "device \"cuda:7\""); });
  expect_error(ErrorClass::kInvalidArgument, {"cuda:-1"}, [] { (void)devices::parse_device_name("cuda:-1"); });
  Pair("llama", cut(2, 3)).expect_equal_logits();
}

TEST(Guard, P26_NothingIsAllocatedOnDevicesOutsideTheMap) {
  const Pair pair("gemma3", [] {
    auto plan = PlacementPlan::single(sim(1), 4);
    plan.layers[2] = plan.layers[3] = plan.final_norm = sim(2);
    return plan;
  }());
  devices::reset_peak_memory(sim(0));
  const auto before = devices::device_memory_stats(sim(0));
  EXPECT_EQ(before.peak, before.allocated);
  const auto [logits, gradient] = testing::logits_and_delta_gradient(*pair.placed, 3);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(testing::generate_some(*pair.placed, 8), testing::generate_some(*pair.host, 8));
  EXPECT_EQ(devices::device_memory_stats(sim(0)).peak, before.allocated) << "not even for a moment";
}

TEST(Gpu, P26_NoContextOnDeviceZero) {
  if (gpus().size() < 2)
    GTEST_SKIP() << "needs two CUDA devices, there are " << gpus().size() << "; simulated: Guard.P26";
  const auto free_bytes = [] {
    for (const auto& info : devices::visible_devices())
      if (info.device == gpus()[0]) return info.free_bytes;
    return int64_t{0};
  };
  const auto before = free_bytes();
  (void)devices::to_host(devices::route_to(at::ones({1000}), gpus()[1], Purpose::kOther) * 2);
  EXPECT_GT(free_bytes(), before - (32LL << 20)) << "a context takes hundreds of MiB";
}

TEST(Guard, P28_FourDevicesAreAsGoodAsTwo) {
  for (const int n : {2, 4}) {
    const auto plan = plan_of(sim(0), sim(1 % n), sim(2 % n), sim(3 % n), sim(n - 1));
    const Pair pair("gptj", plan);
    EXPECT_EQ(static_cast<int>(plan.devices().size()), n);
    for (int layer = 0; layer < 3; ++layer) {
      const auto here = testing::logits_and_delta_gradient(*pair.host, layer);
      const auto there = testing::logits_and_delta_gradient(*pair.placed, layer);
      EXPECT_TRUE(at::equal(devices::to_host(there.first), here.first));
      EXPECT_TRUE(at::equal(there.second, here.second));
    }
  }
  expect_mix_refused([] { (void)(square(sim(0)) + square(sim(3))); });
}

}  // namespace guard_patterns_test
}  // namespace emend
