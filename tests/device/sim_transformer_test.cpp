// A small transformer cut over simulated devices: same loss and gradients as on the CPU, and what it costs in
// time.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/devices/route.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <iostream>
#include <random>

#include "support/guards.h"

namespace emend {
namespace sim_transformer_test {

using at::Tensor;
using devices::Purpose;
using testing::sim;

struct Shape {
  int64_t vocabulary, width, layers, heads;
};

struct Block {
  Tensor norm1, qkv, out, norm2, up, down;

  Tensor operator()(const Tensor& x_BTD, int64_t heads) const {
    const auto b = x_BTD.size(0), t = x_BTD.size(1), d = x_BTD.size(2);
    const auto h = at::layer_norm(x_BTD, {d}, norm1);
    const auto qkv_3BHTK = at::linear(h, qkv).view({b, t, 3, heads, d / heads}).permute({2, 0, 3, 1, 4});
    const auto a = at::scaled_dot_product_attention(qkv_3BHTK[0], qkv_3BHTK[1], qkv_3BHTK[2], {}, 0.0, true);
    const auto y = x_BTD + at::linear(a.transpose(1, 2).reshape({b, t, d}), out);
    return y + at::linear(at::gelu(at::linear(at::rms_norm(y, {d}, norm2, 1e-6), up)), down);
  }
};

struct Transformer {
  Shape shape;
  Tensor embedding, final_norm, head;
  std::vector<Block> blocks;

  explicit Transformer(Shape s) : shape(s) {
    at::manual_seed(0);
    const auto d = s.width;
    embedding = at::randn({s.vocabulary, d});
    final_norm = at::ones({d});
    head = at::randn({s.vocabulary, d}) * 0.05;
    for (int64_t l = 0; l < s.layers; ++l)
      blocks.push_back({at::ones({d}), at::randn({3 * d, d}) * 0.05, at::randn({d, d}) * 0.05, at::ones({d}),
                        at::randn({4 * d, d}) * 0.05, at::randn({d, 4 * d}) * 0.05});
    for (auto* p : parameters()) p->requires_grad_();
  }

  std::vector<Tensor*> parameters() {
    std::vector<Tensor*> all{&embedding, &final_norm, &head};
    for (auto& b : blocks) all.insert(all.end(), {&b.norm1, &b.qkv, &b.out, &b.norm2, &b.up, &b.down});
    return all;
  }

  void place(const std::vector<c10::Device>& layers, c10::Device first, c10::Device last) {
    const auto put = [](Tensor& t, c10::Device device) {
      t = devices::route_to(t.detach(), device, Purpose::kWeight).requires_grad_();
    };
    put(embedding, first);
    put(final_norm, last);
    put(head, last);
    for (size_t l = 0; l < blocks.size(); ++l) {
      auto& b = blocks[l];
      for (auto* p : {&b.norm1, &b.qkv, &b.out, &b.norm2, &b.up, &b.down}) put(*p, layers[l]);
    }
  }

  Tensor loss(const Tensor& ids, const Tensor& labels) const {
    auto x = at::embedding(embedding, devices::route_like(ids, embedding, Purpose::kInput));
    for (const auto& block : blocks) x = block(devices::route_like(x, block.qkv, Purpose::kHidden), shape.heads);
    x = devices::route_like(x, final_norm, Purpose::kHidden);
    const auto logits = at::linear(at::layer_norm(x, {shape.width}, final_norm), head);
    return at::cross_entropy_loss(logits.view({-1, shape.vocabulary}),
                                  devices::route_like(labels, logits, Purpose::kLabels));
  }

  std::vector<Tensor> gradients(const Tensor& ids, const Tensor& labels, Tensor& loss_out) {
    std::vector<Tensor> inputs;
    for (auto* p : parameters()) inputs.push_back(*p);
    loss_out = loss(ids, labels);
    return torch::autograd::grad({loss_out}, inputs);
  }
};

void expect_equal_to_cpu(const std::vector<c10::Device>& layers, c10::Device first, c10::Device last) {
  Transformer model({100, 32, static_cast<int64_t>(layers.size()), 4});
  const auto ids = at::randint(0, 100, {2, 9}, at::kLong), labels = at::randint(0, 100, {18}, at::kLong);
  Tensor cpu_loss, sim_loss;
  const auto expected = model.gradients(ids, labels, cpu_loss);
  model.place(layers, first, last);
  const auto got = model.gradients(ids, labels, sim_loss);
  EXPECT_EQ(cpu_loss.item<float>(), sim_loss.item<float>());
  const auto parameters = model.parameters();
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].device(), parameters[i]->device());
    EXPECT_TRUE(at::equal(got[i].cpu(), expected[i])) << "gradient " << i;
  }
}

TEST(SimTransformer, OneDeviceEqualsCpuBitForBit) {
  expect_equal_to_cpu(std::vector<c10::Device>(3, sim(0)), sim(0), sim(0));
}

TEST(SimTransformer, EveryCutEqualsCpuBitForBit) {
  for (size_t cut = 0; cut <= 4; ++cut) {
    std::vector<c10::Device> layers(4, sim(0));
    for (size_t l = cut; l < 4; ++l) layers[l] = sim(1);
    expect_equal_to_cpu(layers, sim(0), sim(1));
    expect_equal_to_cpu(layers, sim(1), sim(0));
  }
}

TEST(SimTransformer, MixOfHostAndDevicesEqualsCpu) {
  expect_equal_to_cpu({sim(7), c10::Device(c10::kCPU), sim(2), sim(7)}, c10::Device(c10::kCPU), sim(3));
}

TEST(SimTransformer, RandomMapsEqualCpuBitForBit) {
  std::mt19937 random(11);
  for (const int n_devices : {2, 3, 4, 8}) {
    const auto any = [&] { return sim(static_cast<int>(random() % static_cast<unsigned>(n_devices))); };
    for (int round = 0; round < 4; ++round) {
      std::vector<c10::Device> layers;
      for (int l = 0; l < 6; ++l) layers.push_back(any());
      expect_equal_to_cpu(layers, any(), any());
    }
  }
}

TEST(SimTransformer, AForgottenWeightIsFound) {
  Transformer model({50, 16, 2, 2});
  model.place({sim(0), sim(1)}, sim(0), sim(1));
  model.blocks[1].up = model.blocks[1].up.detach().to(sim(0));
  const auto ids = at::randint(0, 50, {1, 4}, at::kLong), labels = at::randint(0, 50, {4}, at::kLong);
  testing::expect_mix_refused([&] { (void)model.loss(ids, labels); });
}

TEST(SimTransformer, OverheadAgainstCpu) {
  Transformer model({1000, 256, 4, 8});
  const auto ids = at::randint(0, 1000, {4, 64}, at::kLong), labels = at::randint(0, 1000, {256}, at::kLong);
  const auto best_of = [&](int rounds) {
    double best = 1e9;
    Tensor loss;
    for (int i = 0; i < rounds; ++i) {
      const auto start = std::chrono::steady_clock::now();
      (void)model.gradients(ids, labels, loss);
      best =
          std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
  };
  const double cpu = best_of(6);
  model.place({sim(0), sim(0), sim(1), sim(1)}, sim(0), sim(1));
  const double simulated = best_of(6);
  const auto tiny = [](const Tensor& x) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 20000; ++i) (void)(x + x);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 20000;
  };
  const auto x = at::ones({4});
  std::cout << "forward and backward: cpu " << cpu << " ms, two simulated devices " << simulated << " ms, ratio "
            << simulated / cpu << "; tiny add: cpu " << tiny(x) << " us, simulated " << tiny(x.to(sim(0))) << " us\n";
  EXPECT_LT(simulated / cpu, 4) << "the goal is 2; the rest is room for a busy machine";
}

}  // namespace sim_transformer_test
}  // namespace emend
