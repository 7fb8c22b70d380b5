// Sums, exchanges and meetings of several processes, each with its own part of the work (statistics, evaluation).
//
// Goals: works on any machine over TCP (Gloo, which is inside LibTorch); a process alone needs no network and has no
// group; a process that dies ends the others within seconds, with a message; calls that do not match are an error in
// every process, not a hang. Non-goals: overlap with computation; splitting one model over processes (a placement plan
// does that within one process). Between GPUs the NCCL plug-in is used where every process has it and a GPU of its own,
// else tensors are staged through host memory (docs/adr/0014-gloo-and-an-nccl-plug-in.md).
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/core/log.h>
#include <emend/devices/process_environment.h>

#include <chrono>

namespace emend::devices {

/// What a group of processes can do together. Every process must make the same calls in the same order; every call
/// checks that and throws Error(kInvalidArgument) in all of them if not. When a process is lost, the others' next call
/// (or the one they wait in) throws Error(kDevice), and so do all later calls. Not thread-safe.
class Collectives {
 public:
  virtual ~Collectives() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;  ///< number of this process, from 0
  [[nodiscard]] virtual int size() const noexcept = 0;  ///< processes in the group

  /// Replaces `tensor` by the sum over all processes, the same bits in each. Floating point is summed in float64 and
  /// rounded once, integers in int64. Any device; shapes and dtypes must be equal everywhere. The order of the
  /// additions is the transport's: the last bits may differ between Gloo and NCCL, and with NCCL from one run to the
  /// next.
  virtual void all_reduce_sum(at::Tensor& tensor) = 0;
  /// Everyone's bytes, in the order of ranks. Lengths may differ and may be 0.
  [[nodiscard]] virtual std::vector<std::string> all_gather(std::string_view bytes) = 0;
  /// Returns when all have called it.
  virtual void barrier() = 0;
};

struct ProcessTimeouts {
  std::chrono::seconds join = std::chrono::minutes(5);  ///< for the others to appear
  std::chrono::seconds call =
      std::chrono::minutes(30);  ///< for the slowest to reach a call (a lost one is noticed at once)
};

/// Joins the group that `environment` describes; null where this process is alone.
/// Throws Error(kDevice) if the others do not appear in time or the port is taken. In a group of several, SIGPIPE is
/// ignored from then on unless the program handles it: a lost connection is an error, not the end of the process.
/// `log` hears once whether tensors on GPUs go through NCCL.
[[nodiscard]] std::unique_ptr<Collectives> join_processes(const ProcessEnvironment& environment,
                                                          ProcessTimeouts timeouts = {}, const Log& log = {});

}  // namespace emend::devices
