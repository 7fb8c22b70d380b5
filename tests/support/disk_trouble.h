// Kills and full disks at a chosen moment, counted in the calls of a program that change the disk: included by one
// source of a program, whose calls are then made here.
#pragma once

#include <signal.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

namespace disk_trouble {

enum class Trouble { kNone, kKill, kFull };
inline Trouble trouble = Trouble::kNone;
inline int calls_left = 0;  // until the trouble

/// Counts a call that changes the disk. True: it fails for want of space.
inline bool disturbed(bool needs_space) {
  if (trouble == Trouble::kNone || --calls_left >= 0) return false;
  if (trouble == Trouble::kKill) ::raise(SIGKILL);
  if (needs_space) errno = ENOSPC;
  return needs_space;
}

}  // namespace disk_trouble

// The calls of this program, in place of those of the C library.
extern "C" {
ssize_t write(int fd, const void* data, size_t size) {
  return fd > 2 && disk_trouble::disturbed(true) ? -1 : ::syscall(SYS_write, fd, data, size);
}
int fsync(int fd) {
  return disk_trouble::disturbed(true) ? -1 : static_cast<int>(::syscall(SYS_fsync, fd));
}
int mkdir(const char* path, mode_t mode) noexcept {
  return disk_trouble::disturbed(true) ? -1 : static_cast<int>(::syscall(SYS_mkdir, path, mode));
}
int rename(const char* from, const char* to) noexcept {
  return disk_trouble::disturbed(false) ? -1 : static_cast<int>(::syscall(SYS_rename, from, to));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  return disk_trouble::disturbed(false) ? -1 : static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}
}
