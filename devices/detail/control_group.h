// What the control groups of this process leave of the machine: containers, jobs of Slurm, units of systemd.
#pragma once

#include <cstdint>
#include <filesystem>

namespace emend::devices::detail {

struct ControlGroups {
  int64_t memory_bytes = 0;  ///< the lowest limit; 0: there is none
  int64_t free_bytes = 0;    ///< the least that a group with a limit has left, pages of files counted as free
  double processors = 0;     ///< the lowest quota; 0: there is none
};

/// Of the group that /proc/self/cgroup names and of all above it, since each of them limits: of both versions, which a
/// machine may mix. `root`: where proc and sys are. What cannot be read limits nothing.
[[nodiscard]] ControlGroups control_groups(const std::filesystem::path& root = "/");

}  // namespace emend::devices::detail
