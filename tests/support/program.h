// Runs the project's programs as a user does and keeps what they print.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace emend::testing {

struct ProgramResult {
  int status = -1;  ///< exit status, or 128 + signal
  std::string out, err;
};

struct ProgramOptions {
  int64_t file_size_limit = 0;  ///< bytes a file may grow to (a full disk, in effect); 0: none
  double signal_after = 0;      ///< seconds until `signal` is sent; 0: never
  int signal = SIGINT;
  /// Sends `signal` as soon as standard error contains this text.
  std::string signal_when;
  std::filesystem::path folder;  ///< working folder; empty: the test's own
};

inline std::filesystem::path program_path(const std::string& name) {
  return std::filesystem::path(EMEND_BINARY_DIR) / "bin" / name;
}

/// "memit_edit" or "emend", with arguments; no shell.
inline ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                                 const ProgramOptions& options = {}) {
  int out[2], err[2];
  if (::pipe(out) != 0 || ::pipe(err) != 0) return {};
  const std::string path = program_path(name).string();
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    for (int fd : {out[0], out[1], err[0], err[1]}) ::close(fd);
    if (!options.folder.empty() && ::chdir(options.folder.c_str()) != 0) ::_exit(126);
    if (options.file_size_limit > 0) {
      const rlimit limit{static_cast<rlim_t>(options.file_size_limit), static_cast<rlim_t>(options.file_size_limit)};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      ::signal(SIGXFSZ, SIG_IGN);
    }
    ::execv(path.c_str(), argv.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  ProgramResult result;
  const auto begin = std::chrono::steady_clock::now();
  bool sent = false;
  pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  for (int open = 2; open > 0;) {
    ::poll(fds, 2, 50);
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || !(fds[i].revents & (POLLIN | POLLHUP))) continue;
      char buffer[65536];
      const ssize_t n = ::read(fds[i].fd, buffer, sizeof buffer);
      if (n > 0) {
        (i == 0 ? result.out : result.err).append(buffer, static_cast<size_t>(n));
      } else {
        ::close(fds[i].fd);
        fds[i].fd = -1;
        --open;
      }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const bool due = (options.signal_after > 0 && seconds > options.signal_after) ||
                     (!options.signal_when.empty() && result.err.find(options.signal_when) != std::string::npos);
    if (due && !sent) {
      ::kill(child, options.signal);
      sent = true;
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace emend::testing
