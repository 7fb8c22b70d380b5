// libemend_nccl.so: the calls of nccl_plugin.h over NCCL. Without LibTorch; communicators are non-blocking.
#include <cuda_runtime_api.h>
#include <emend/devices/plugins/nccl_plugin.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <new>

namespace emend::devices {

struct NcclCommunicator {
  ncclComm_t handle = nullptr;
};

namespace {

static_assert(NCCL_UNIQUE_ID_BYTES == kNcclIdBytes);

thread_local char g_error[512] = "";

int fail(const char* call, const char* reason, const char* detail) {
  std::snprintf(g_error, sizeof g_error, "%s: %s%s%s", call, reason, detail && *detail ? ": " : "",
                detail ? detail : "");
  return 1;
}

/// 0, or 1 with last_error set. In a non-blocking communicator, "in progress" is a call that goes well.
int check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return 0;
  return fail(call, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

int32_t version() {
  int number = 0;
  return ncclGetVersion(&number) == ncclSuccess ? number : 0;
}

int unique_id(char* id) {
  ncclUniqueId made;
  if (check(ncclGetUniqueId(&made), "ncclGetUniqueId")) return 1;
  std::memcpy(id, made.internal, kNcclIdBytes);
  return 0;
}

void destroy(NcclCommunicator* group) {
  if (!group) return;
  if (group->handle) (void)ncclCommAbort(group->handle);
  delete group;
}

int create(const char* id, int rank, int size, NcclCommunicator** result) {
  *result = nullptr;
  auto* group = new (std::nothrow) NcclCommunicator;
  if (!group) return fail("create", "out of memory", "");
  ncclUniqueId shared;
  std::memcpy(shared.internal, id, kNcclIdBytes);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (check(ncclCommInitRankConfig(&group->handle, size, shared, rank, &config), "ncclCommInitRankConfig")) {
    destroy(group);
    return 1;
  }
  *result = group;
  return 0;
}

int all_reduce_sum(NcclCommunicator* group, void* data, int64_t count, NcclDtype dtype, void* stream) {
  const auto type = dtype == NcclDtype::kFloat64 ? ncclFloat64 : dtype == NcclDtype::kFloat32 ? ncclFloat32 : ncclInt64;
  return check(ncclAllReduce(data, data, static_cast<size_t>(count), type, ncclSum, group->handle,
                             static_cast<cudaStream_t>(stream)),
               "ncclAllReduce");
}

NcclState poll(NcclCommunicator* group, void* stream) {
  ncclResult_t state = ncclSuccess;
  if (check(ncclCommGetAsyncError(group->handle, &state), "ncclCommGetAsyncError")) return NcclState::kFailed;
  if (state == ncclInProgress) return NcclState::kRunning;
  if (check(state, "NCCL")) return NcclState::kFailed;
  const auto work = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (work == cudaSuccess) return NcclState::kDone;
  (void)cudaGetLastError();  // else the check behind this thread's next kernel finds it
  if (work == cudaErrorNotReady) return NcclState::kRunning;
  (void)fail("cudaStreamQuery", cudaGetErrorString(work), "");
  return NcclState::kFailed;
}

const char* last_error() {
  return g_error;
}

}  // namespace
}  // namespace emend::devices

extern "C" __attribute__((visibility("default"))) const emend::devices::NcclPlugin* emend_nccl_plugin() {
  using namespace emend::devices;
  static const NcclPlugin plugin{kNcclPluginAbi, NcclMemory::kCuda, version,   unique_id, create, all_reduce_sum,
                                 poll,           destroy,           last_error};
  return &plugin;
}
