// Registration of the simulated backend with LibTorch: device guard, generators, accelerator hooks.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <emend/core/error.h>
#include <emend/devices/detail/sim_backend.h>
#include <emend/devices/detail/sim_memory.h>
#include <emend/devices/placement.h>
#include <emend/devices/simulated.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <array>
#include <atomic>
#include <mutex>

namespace emend::devices {
namespace {

using c10::Device;
using c10::DeviceIndex;

std::atomic<int> g_count{0}, g_streams{0};

void require_ordinal(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < g_count, "invalid device ordinal: sim:", static_cast<int>(index), ", with ",
              g_count.load(), " simulated devices switched on");
}

/// Streams and events do nothing: every operator finishes before it returns.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSimulated; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kSimulated, detail::current_simulated_device()}; }
  void setDevice(Device device) const override {
    require_ordinal(device.index());
    detail::set_current_simulated_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) detail::set_current_simulated_device(device.index());
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  /// A new one at every call; the default stream stays the current one.
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++g_streams);
  }
  /// All that could ever be switched on: autograd makes its threads for this many at the first backward pass.
  DeviceIndex deviceCount() const noexcept override { return kMaxSimulated; }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

/// A CPU generator that answers to a simulated device.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kSimulated, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}
  [[nodiscard]] const at::Generator& host() const { return host_; }
  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override { host_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host_.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), host_.clone()); }
  at::Generator host_;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_count > 0; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(g_count); }
  DeviceIndex getCurrentDevice() const override { return detail::current_simulated_device(); }
  void setCurrentDevice(DeviceIndex index) const override {
    require_ordinal(index);
    detail::set_current_simulated_device(index);
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return detail::default_simulated_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override { return detail::make_simulated_generator(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard current(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

void register_backend() {
  if (c10::is_privateuse1_backend_registered() && c10::get_privateuse1_backend() != "sim")
    throw Error(ErrorClass::kUnsupported,
                {"simulated devices",
                 "the device type PrivateUse1 is already \"" + c10::get_privateuse1_backend() + "\" in this process",
                 "a process without another LibTorch backend", ""});
  // None of these is ever destroyed: tensors may outlive every static.
  static auto* guard = new Guard;
  static auto* hooks = new Hooks;
  c10::SetAllocator(kSimulated, &detail::simulated_allocator());
  static const c10::impl::DeviceGuardImplRegistrar registrar(kSimulated, guard);
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(hooks);
  detail::register_simulated_operators();
}

/// Autograd counts devices once, at the first backward pass of the process. If that is over, a fresh engine
/// that counts again takes its place; the old one's threads stay idle.
class FreshEngine final : public torch::autograd::Engine {
 public:
  static torch::autograd::Engine& instance() {
    static auto* engine = [] {
      auto* made = new FreshEngine;
      made->start_device_threads();
      return made;
    }();
    return *engine;
  }
};

void make_autograd_see_the_devices() {
  const at::AutoGradMode gradients(true);
  const auto x = at::ones({1}, c10::Device(kSimulated, 0)).requires_grad_();
  try {
    (x * 2).backward();
  } catch (const c10::Error&) {
    torch::autograd::set_default_engine_stub(&FreshEngine::instance);
    (x * 2).backward();
  }
}

}  // namespace

namespace detail {

int simulated_streams_taken() noexcept {
  return g_streams;
}

const at::Generator& default_simulated_generator(DeviceIndex index) {
  static const auto* generators = [] {
    auto* made = new std::array<at::Generator, kMaxSimulated>;
    for (int k = 0; k < kMaxSimulated; ++k)
      (*made)[static_cast<size_t>(k)] = make_simulated_generator(static_cast<DeviceIndex>(k));
    return made;
  }();
  return generators->at(static_cast<size_t>(index < 0 ? current_simulated_device() : index));
}

at::Generator make_simulated_generator(DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? current_simulated_device() : index);
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSimulated, "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace detail

void enable_simulated_devices(int count) {
  if (count < 1 || count > kMaxSimulated)
    refuse({"simulated devices", std::to_string(count) + " devices", "1 to " + std::to_string(kMaxSimulated), ""});
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const bool first = g_count == 0;
  if (first) register_backend();
  g_count = count;
  if (first) make_autograd_see_the_devices();
}

int simulated_device_count() noexcept {
  return g_count;
}

}  // namespace emend::devices
