// The NCCL plug-in of this process (devices/plugins/nccl_plugin.h): found, checked, and wrapped.
//
// It is looked for beside the program, then where the dynamic linker looks; EMEND_NCCL_PLUGIN=FILE names it and
// EMEND_NCCL_PLUGIN=none does without. A process without it is no error: the group then goes through host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <emend/core/log.h>
#include <emend/devices/plugins/nccl_plugin.h>

namespace emend::devices::detail {

struct NcclOpened {
  const NcclPlugin* plugin = nullptr;  ///< null if there is none to use
  std::string text;                    ///< what was opened, or why not, for people
};
/// Opens one file (without a folder: where the dynamic linker looks) and checks its ABI. Never throws; it stays open.
[[nodiscard]] NcclOpened open_nccl_plugin(const std::string& file);

/// This process's plug-in, looked for at the first call, which writes one line to `log`: a debug line, or a warning
/// where a file that EMEND_NCCL_PLUGIN names is of no use. To be called when LibTorch's CUDA library is loaded, so that
/// the plug-in finds the NCCL that came with it.
[[nodiscard]] const NcclPlugin* nccl_plugin(const Log& log);

/// A number that stands for the tensor's GPU among all machines, or 0 if this process cannot use NCCL on it.
[[nodiscard]] int64_t nccl_gpu(const at::Tensor& tensor, const Log& log);

/// This process's part of a communicator. Calls only start work on the device's current stream and give 0, or anything
/// else after a failure; poll says when it is done.
class NcclGroup {
 public:
  explicit NcclGroup(c10::Device device, const NcclPlugin& plugin) : plugin_(plugin), device_(device) {}
  ~NcclGroup() { plugin_.destroy(group_); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] int join(const std::string& id, int rank, int size);
  [[nodiscard]] int all_reduce_sum(at::Tensor& sum);  ///< contiguous, float64 or int64, on the device
  [[nodiscard]] NcclState poll() const;
  [[nodiscard]] std::string last_error() const { return plugin_.last_error(); }

 private:
  [[nodiscard]] void* stream() const;
  const NcclPlugin& plugin_;
  c10::Device device_;
  NcclCommunicator* group_ = nullptr;
};

}  // namespace emend::devices::detail
