// Inside the simulated backend: host views of simulated tensors, the boxed fallback, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emend::devices::detail {

/// A CPU tensor over the same bytes as `simulated`, with the same sizes and strides. Other tensors pass through.
[[nodiscard]] at::Tensor host_view(const at::Tensor& simulated);

/// Runs any operator: checks that all operands are on one device, gives the CPU's kernel host views of them, and turns
/// its results into simulated tensors. A result that shares an operand's storage becomes a view of that operand.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// The generator of a simulated device (of the current one for a negative index).
[[nodiscard]] const at::Generator& default_simulated_generator(c10::DeviceIndex index);
[[nodiscard]] at::Generator make_simulated_generator(c10::DeviceIndex index);
/// The CPU generator inside a simulated one. Throws c10::Error for a generator of another device.
[[nodiscard]] at::Generator host_generator(const at::Generator& generator);

/// What all simulated devices have done so far.
struct SimulatedCounts {
  int64_t launches = 0;    ///< operators that compute or copy on devices; views are none
  int64_t host_reads = 0;  ///< the host waits for a result
  int64_t uploads = 0;     ///< copies from the host
  int64_t waits = 0;       ///< those of them that wait for the device, being from memory that is not pinned
};
[[nodiscard]] SimulatedCounts simulated_counts() noexcept;
/// Counts a copy between devices, or to or from the host.
void count_simulated_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) noexcept;

/// How many streams were taken from the pool so far: each is a new one.
[[nodiscard]] int simulated_streams_taken() noexcept;
/// For tests: from now on, copies from one simulated device to another change a byte in every thousand, as a machine
/// with broken peer-to-peer transfers does. Index -1 ends it.
void break_simulated_copies(c10::DeviceIndex from, c10::DeviceIndex to);

/// Operators that the fallback cannot serve: allocation, copies, resizing, set_. Registers them and the fallback.
void register_simulated_operators();

}  // namespace emend::devices::detail
