#include <emend/core/option.h>
#include <emend/devices/detail/control_group.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace emend::devices::detail {
namespace {

struct MemoryFiles {
  const char *limit, *used, *prefix;  // prefix: of what memory.stat counts of a group with those below it
};
constexpr MemoryFiles kSecond = {"memory.max", "memory.current", ""};
constexpr MemoryFiles kFirst = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};

std::optional<int64_t> number_in_file(const std::filesystem::path& file) {
  std::ifstream in(file);
  int64_t value = 0;
  return in >> value ? std::optional(value) : std::nullopt;  // "max" is no number
}

// Pages of files that the kernel takes back when memory is asked for.
int64_t reclaimable(const std::filesystem::path& group, const std::string& prefix) {
  std::ifstream in(group / "memory.stat");
  std::string name;
  int64_t value = 0, sum = 0;
  while (in >> name >> value)
    if (name == prefix + "inactive_file" || name == prefix + "active_file") sum += value;
  return sum;
}

void add_memory(ControlGroups& found, const std::filesystem::path& group, const MemoryFiles& files) {
  const int64_t limit = number_in_file(group / files.limit).value_or(0);
  // The first version writes no limit as the largest number of whole pages.
  if (limit <= 0 || limit > std::numeric_limits<int64_t>::max() / 2) return;
  const int64_t used = number_in_file(group / files.used).value_or(0) - reclaimable(group, files.prefix);
  const int64_t free = std::max<int64_t>(limit - std::max<int64_t>(used, 0), 0);
  found.free_bytes = found.memory_bytes > 0 ? std::min(found.free_bytes, free) : free;
  found.memory_bytes = found.memory_bytes > 0 ? std::min(found.memory_bytes, limit) : limit;
}

void add_processors(ControlGroups& found, double quota, double period) {
  if (quota <= 0 || period <= 0) return;
  const double processors = quota / period;
  found.processors = found.processors > 0 ? std::min(found.processors, processors) : processors;
}

// The group's folder below where its hierarchy is mounted, and all above it. In a container the path may be one of the
// machine's, which is not there, and the mounted root is the container's own group.
template <class Function>
void each_group(const std::filesystem::path& mount, const std::filesystem::path& group, const Function& look) {
  std::filesystem::path own = group.relative_path().lexically_normal();
  if (own.begin() != own.end() && *own.begin() == "..") own.clear();  // outside of what this process may see
  for (; !own.empty(); own = own.parent_path()) look(mount / own);
  look(mount);
}

}  // namespace

ControlGroups control_groups(const std::filesystem::path& root) {
  ControlGroups found;
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  const auto add = [&](const std::string& controllers, const std::filesystem::path& group) {
    if (controllers.empty())
      each_group(mount, group, [&](const std::filesystem::path& folder) {
        add_memory(found, folder, kSecond);
        double quota = 0, period = 0;
        if (std::ifstream(folder / "cpu.max") >> quota >> period) add_processors(found, quota, period);
      });
    for (const std::string& controller : list_items(controllers)) {
      if (controller == "memory")
        each_group(mount / "memory", group,
                   [&](const std::filesystem::path& folder) { add_memory(found, folder, kFirst); });
      if (controller == "cpu")
        each_group(mount / "cpu", group, [&](const std::filesystem::path& folder) {
          add_processors(found, static_cast<double>(number_in_file(folder / "cpu.cfs_quota_us").value_or(0)),
                         static_cast<double>(number_in_file(folder / "cpu.cfs_period_us").value_or(0)));
        });
    }
  };
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {  // "0::/user.slice/job", "9:cpu,cpuacct:/slurm/job_1"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    add(line.substr(first + 1, second - first - 1), line.substr(second + 1));
  }
  add("", "/");  // also where that file says nothing
  add("memory,cpu", "/");
  return found;
}

}  // namespace emend::devices::detail
