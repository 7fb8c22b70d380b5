// Operands on different devices are refused, in LibTorch's own words.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <emend/core/error.h>
#include <emend/devices/simulated.h>
#include <gtest/gtest.h>

#include "support/simulated.h"

namespace emend {
namespace sim_refusals_test {

using at::Tensor;
using testing::sim;

struct Refusal {
  const char* name;
  std::function<void(const Tensor& cpu, const Tensor& zero, const Tensor& one)> run;  ///< 8 × 8, on cpu, sim:0, sim:1
};

Tensor one_index() {
  return at::tensor({1}, at::kLong);
}

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> all = {
      {"add", [](auto&, auto& z, auto& o) { z + o; }},
      {"add_cpu", [](auto& c, auto& z, auto&) { z + c; }},
      {"cpu_add", [](auto& c, auto& z, auto&) { c + z; }},
      {"in_place", [](auto& c, auto& z, auto&) { c.clone().add_(z); }},
      {"in_place_on_sim", [](auto& c, auto& z, auto&) { z.clone().add_(c); }},
      {"mm", [](auto&, auto& z, auto& o) { z.mm(o); }},
      {"cpu_mm", [](auto& c, auto&, auto& o) { c.mm(o); }},
      {"addmm_in_place", [](auto&, auto& z, auto& o) { z.clone().addmm_(z, o); }},
      {"matmul", [](auto&, auto& z, auto& o) { z.unsqueeze(0).matmul(o); }},
      {"linear", [](auto& c, auto& z, auto&) { at::linear(z, c); }},
      {"linear_bias", [](auto&, auto& z, auto& o) { at::linear(z, z, o[0]); }},
      {"cat",
       [](auto&, auto& z, auto& o) {
         at::cat({z, o});
       }},
      {"cat_cpu",
       [](auto& c, auto& z, auto&) {
         at::cat({z, c});
       }},
      {"stack",
       [](auto&, auto& z, auto& o) {
         at::stack({z, o});
       }},
      {"embedding", [](auto&, auto& z, auto&) { at::embedding(z, one_index()); }},
      {"gather", [](auto& c, auto& z, auto&) { z.gather(1, c.argmax(1, true)); }},
      {"index_select", [](auto&, auto& z, auto&) { z.index_select(0, one_index()); }},
      {"index_select_scalar", [](auto&, auto& z, auto&) { z.index_select(0, one_index()[0]); }},
      {"index_add", [](auto& c, auto& z, auto&) { z.index_add(0, one_index().to(z.device()), c.slice(0, 0, 1)); }},
      {"index_other_sim", [](auto&, auto& z, auto& o) { z.index({one_index().to(o.device())}); }},
      {"index_put_values",
       [](auto&, auto& z, auto& o) { z.clone().index_put_({one_index().to(z.device())}, o.slice(0, 0, 1)); }},
      {"where", [](auto& c, auto& z, auto&) { at::where(c > 0, z, z); }},
      {"addcmul", [](auto&, auto& z, auto& o) { at::addcmul(z, z, o); }},
      {"layer_norm", [](auto&, auto& z, auto&) { at::layer_norm(z, {8}, at::ones({8})); }},
      {"rms_norm", [](auto&, auto& z, auto& o) { at::rms_norm(z, {8}, o[0], 1e-6); }},
      {"cross_entropy", [](auto&, auto& z, auto&) { at::cross_entropy_loss(z, at::zeros({8}, at::kLong)); }},
      {"attention",
       [](auto&, auto& z, auto& o) {
         const auto q = z.view({1, 1, 8, 8});
         at::scaled_dot_product_attention(q, q, o.view({1, 1, 8, 8}));
       }},
      {"attention_mask",
       [](auto&, auto& z, auto& o) {
         const auto q = z.view({1, 1, 8, 8});
         at::scaled_dot_product_attention(q, q, q, o);
       }},
      {"solve", [](auto&, auto& z, auto& o) { at::linalg_solve(z, o); }},
      {"cholesky_solve", [](auto&, auto& z, auto& o) { at::cholesky_solve(z, o); }},
      {"out",
       [](auto&, auto& z, auto& o) {
         auto out = at::empty_like(o);
         at::mm_out(out, z, z);
       }},
      {"scalar_of_other_sim", [](auto&, auto& z, auto& o) { z* o[0][0]; }},
      {"set_storage", [](auto&, auto& z, auto& o) { at::empty({0}, z.options()).set_(o); }},
      {"cpu_generator", [](auto&, auto& z, auto&) { at::randn({3}, at::detail::createCPUGenerator(1), z.options()); }},
  };
  return all;
}

class SimRefusals : public ::testing::TestWithParam<size_t> {};

TEST_P(SimRefusals, RaisesInLibTorchsWords) {
  const auto cpu = at::rand({8, 8}) + at::eye(8);
  const auto zero = cpu.to(sim(0)), one = cpu.to(sim(1));
  try {
    refusals()[GetParam()].run(cpu, zero, one);
    FAIL() << "operands on different devices went through";
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_TRUE(text.find("same device") != std::string::npos ||
                text.find("device type for generator") != std::string::npos)
        << text;
    EXPECT_EQ(text.find("INTERNAL ASSERT"), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimRefusals, ::testing::Range<size_t>(0, refusals().size()),
                         [](const auto& info) { return std::string(refusals()[info.param].name); });

TEST(SimCount, OnlySwitchedOnDevicesExist) {
  (void)sim(0);
  devices::enable_simulated_devices(2);
  EXPECT_EQ(devices::simulated_device_count(), 2);
  EXPECT_THROW(at::ones({1}).to(sim(2)), c10::Error);
  EXPECT_THROW(at::empty({1}, at::TensorOptions().device(sim(7))), c10::Error);
  EXPECT_THROW(devices::require_visible(devices::parse_device_name("sim:2"), "device"), Error);
  EXPECT_NO_THROW(devices::require_visible(devices::parse_device_name("sim:1"), "device"));
  devices::enable_simulated_devices(devices::kMaxSimulated);
  EXPECT_NO_THROW(at::ones({1}).to(sim(7)));
  EXPECT_THROW(devices::enable_simulated_devices(0), Error);
  EXPECT_THROW(devices::enable_simulated_devices(9), Error);
}

}  // namespace sim_refusals_test
}  // namespace emend
