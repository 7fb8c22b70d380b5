// What libemend_nccl.so offers: sums between the GPUs of several processes, over NCCL.
//
// Goals: a C ABI of plain functions, so that the plug-in needs neither LibTorch nor emend, and a program without it
// needs neither NCCL nor CUDA; nothing blocks, so that the caller can look after lost processes while it waits.
// Non-goals: operations that emend does not use. The loader is devices/detail/nccl_library.h, the reasons are in
// docs/adr/0014-gloo-and-an-nccl-plug-in.md.
#pragma once

#include <cstdint>

namespace emend::devices {

inline constexpr int32_t kNcclPluginAbi = 2;                     ///< raised with every change of NcclPlugin
inline constexpr int kNcclIdBytes = 128;                         ///< of the id that the members of a communicator share
inline constexpr char kNcclPluginEntry[] = "emend_nccl_plugin";  ///< the one symbol that a plug-in exports

/// The memory that the pointers of a plug-in's calls lead to.
enum class NcclMemory : int32_t {
  kCuda = 0,       ///< of CUDA devices
  kSimulated = 1,  ///< of simulated devices, which is host memory: for a stand-in without GPUs, in tests
};
/// Dtypes of a sum.
enum class NcclDtype : int32_t { kFloat64 = 0, kFloat32 = 1, kInt64 = 2 };
/// How far the work of a communicator is.
enum class NcclState : int32_t { kDone = 0, kRunning = 1, kFailed = 2 };

struct NcclCommunicator;  ///< made by NcclPlugin::create, the plug-in's own

/// The table that the entry point returns; it lives as long as the library. Functions that return an int give 0, or
/// anything else after a failure, which last_error describes. None of them throws. The communicator's GPU must be the
/// calling thread's current one, except for destroy: who calls knows how to choose it without waking up others.
/// `stream` is a cudaStream_t.
struct NcclPlugin {
  int32_t abi;        ///< kNcclPluginAbi of the plug-in; the only field to be read where it differs from the reader's
  NcclMemory memory;  ///< of the pointers below
  int32_t (*version)();        ///< NCCL's own version, 22809 for 2.28.9; 0 if it cannot be told
  int (*unique_id)(char* id);  ///< fills kNcclIdBytes bytes, in one process, for a new communicator of all
  /// Starts to join the communicator of `id` with the current GPU; every rank from 0 to size-1 must. Wait with poll.
  int (*create)(const char* id, int rank, int size, NcclCommunicator** result);
  /// Starts to replace `count` numbers by their sums over all ranks, after what the stream holds.
  int (*all_reduce_sum)(NcclCommunicator* group, void* data, int64_t count, NcclDtype dtype, void* stream);
  NcclState (*poll)(NcclCommunicator* group, void* stream);  ///< returns at once
  void (*destroy)(NcclCommunicator* group);  ///< gives up what still runs and frees; waits for no other rank
  const char* (*last_error)();               ///< of this thread's last failed call, or ""
};

}  // namespace emend::devices
