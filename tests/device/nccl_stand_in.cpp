// A stand-in for libemend_nccl.so without NCCL and without GPUs: the same interface over files in a folder, on the host
// memory of simulated devices. Every rank writes its numbers to OPERATION.RANK; poll is done when all are there.
//   EMEND_STAND_IN=fail:R   the sums of rank R fail;   exit:R   rank R ends in the middle of a sum (status 42)
//   EMEND_STAND_IN=stall:R  the work of rank R never ends, and the others' with it
#include <emend/devices/plugins/nccl_plugin.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#ifndef EMEND_STAND_IN_ABI
#define EMEND_STAND_IN_ABI emend::devices::kNcclPluginAbi
#endif

namespace emend::devices {

struct NcclCommunicator {
  std::filesystem::path folder;
  int rank = 0, size = 0, operations = 0;
  std::function<void()> finish;  ///< takes the result over; empty when nothing runs
};

namespace {

int g_sums = 0, g_alive = 0;

bool told_to(const char* what, int rank) {
  const char* order = std::getenv("EMEND_STAND_IN");
  return order && std::string(what) + ":" + std::to_string(rank) == order;
}

std::filesystem::path part(const NcclCommunicator& group, int rank) {
  return group.folder / (std::to_string(group.operations) + "." + std::to_string(rank));
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

int start(NcclCommunicator* group, const void* data, size_t bytes, std::function<void()> finish) {
  ++group->operations;
  if (told_to("stall", group->rank)) return 0;
  const auto path = part(*group, group->rank);
  std::ofstream(path.string() + ".new", std::ios::binary).write(static_cast<const char*>(data), std::streamsize(bytes));
  std::filesystem::rename(path.string() + ".new", path);
  group->finish = std::move(finish);
  return 0;
}

int unique_id(char* id) {
  std::strcpy(id, "/tmp/emend-stand-in-XXXXXX");
  return ::mkdtemp(id) ? 0 : 1;
}

int create(const char* id, int rank, int size, NcclCommunicator** result) {
  ++g_alive;
  *result = new NcclCommunicator{id, rank, size, 0, {}};
  return start(*result, "", 0, [] {});
}

template <class Number>
void add(NcclCommunicator* group, void* data, int64_t count) {
  auto* sum = static_cast<Number*>(data);
  std::fill_n(sum, count, Number{});
  for (int r = 0; r < group->size; ++r) {
    const std::string bytes = read(part(*group, r));
    for (int64_t i = 0; i < count; ++i) {
      Number number{};
      std::memcpy(&number, bytes.data() + static_cast<size_t>(i) * sizeof number, sizeof number);
      sum[i] += number;
    }
  }
}

int all_reduce_sum(NcclCommunicator* group, void* data, int64_t count, NcclDtype dtype, void*) {
  ++g_sums;
  if (told_to("fail", group->rank)) return 1;
  if (told_to("exit", group->rank)) ::_exit(42);
  return start(group, data, static_cast<size_t>(count) * 8, [=] {
    dtype == NcclDtype::kInt64 ? add<int64_t>(group, data, count) : add<double>(group, data, count);
  });
}

NcclState poll(NcclCommunicator* group, void*) {
  if (!group->finish) return NcclState::kRunning;
  for (int r = 0; r < group->size; ++r)
    if (!std::filesystem::exists(part(*group, r))) return NcclState::kRunning;
  group->finish();
  return NcclState::kDone;
}

void destroy(NcclCommunicator* group) {
  if (!group) return;
  std::error_code error;
  std::filesystem::remove_all(group->folder, error);  // nothing runs any more, or a process has failed
  delete group;
  --g_alive;
}

}  // namespace
}  // namespace emend::devices

extern "C" const emend::devices::NcclPlugin* emend_nccl_plugin() {
  using namespace emend::devices;
  static const NcclPlugin plugin{EMEND_STAND_IN_ABI,
                                 NcclMemory::kSimulated,
                                 [] { return int32_t{10203}; },
                                 unique_id,
                                 create,
                                 all_reduce_sum,
                                 poll,
                                 destroy,
                                 [] { return "the stand-in was told to fail"; }};
  return &plugin;
}

/// Sums and living communicators of this process, for the test.
extern "C" void emend_stand_in_counts(int* counts) {
  counts[0] = emend::devices::g_sums;
  counts[1] = emend::devices::g_alive;
}
