// Runs the project's programs as a user does and keeps what they print.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/error_of.h"

namespace emend::testing {

struct ProgramResult {
  int status = -1;  ///< exit status, or 128 + signal
  std::string out, err;
  int64_t peak_bytes = 0;  ///< largest resident size
};

struct ProgramOptions {
  int64_t file_size_limit = 0;  ///< bytes a file may grow to (a full disk, in effect); 0: none
  double signal_after = 0;      ///< seconds until `signal` is sent; 0: never
  int signal = SIGINT;
  /// Sends `signal` as soon as standard error or output contains this text.
  std::string signal_when;
  std::atomic<pid_t>* started = nullptr;          ///< receives the program's process id
  const std::atomic<pid_t>* signalled = nullptr;  ///< who gets the signal instead of the program
  std::filesystem::path folder;                   ///< working folder; empty: the test's own
  /// Variables set for the program, over those of the test; an empty value takes a variable away.
  std::map<std::string, std::string> environment;
};

inline std::filesystem::path program_path(const std::string& name) {
  return std::filesystem::path(EMEND_BINARY_DIR) / "bin" / name;
}

/// "NAME=value" of the test's environment with these changes.
inline std::vector<std::string> changed_environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> variables;
  for (char** at = environ; *at; ++at) {
    const std::string variable = *at;
    if (!changes.contains(variable.substr(0, variable.find('=')))) variables.push_back(variable);
  }
  for (const auto& [name, value] : changes)
    if (!value.empty()) variables.push_back(name + "=" + value);
  return variables;
}

/// "memit_edit" or "emend", or a program by its absolute path, with arguments; no shell. May be called by several
/// threads at once.
inline ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                                 const ProgramOptions& options = {}) {
  int out[2], err[2];  // closed in programs that other threads start meanwhile
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) return {};
  const std::string path = program_path(name).string();
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const auto variables = changed_environment(options.environment);
  std::vector<char*> environment;
  for (const auto& variable : variables) environment.push_back(const_cast<char*>(variable.c_str()));
  environment.push_back(nullptr);
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
    ::execve(path.c_str(), argv.data(), environment.data());
    ::_exit(127);
  }
  if (options.started) *options.started = child;
  ::close(out[1]);
  ::close(err[1]);
  ProgramResult result;
  const auto begin = std::chrono::steady_clock::now();
  bool sent = false;
  pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  for (int open = 2; open > 0;) {
    int wait = 50;  // milliseconds, less where the signal is due earlier
    if (options.signal_after > 0 && !sent) {
      const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      wait = std::clamp(static_cast<int>(1000 * (options.signal_after - passed)) + 1, 1, 50);
    }
    ::poll(fds, 2, wait);
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
    const auto says = [&](const std::string& text) { return text.find(options.signal_when) != std::string::npos; };
    const bool due = (options.signal_after > 0 && seconds > options.signal_after) ||
                     (!options.signal_when.empty() && (says(result.err) || says(result.out)));
    if (due && !sent) {
      ::kill(options.signalled ? options.signalled->load() : child, options.signal);
      sent = true;
    }
  }
  int status = 0;
  rusage usage{};
  ::wait4(child, &status, 0, &usage);
  result.peak_bytes = usage.ru_maxrss * 1024;
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

/// The same of one that ends well. Throws std::runtime_error with what it said, which fails a test, if it does not.
inline ProgramResult must_run(const std::string& name, const std::vector<std::string>& arguments,
                              const ProgramOptions& options = {}) {
  auto result = run_program(name, arguments, options);
  if (result.status == 0) return result;
  std::string words = name;
  for (const auto& argument : arguments) words += " " + argument;
  throw std::runtime_error(words + " ended with " + std::to_string(result.status) + ": " + result.err);
}

/// It ended with this status and said each of these words on standard error.
inline void expect_ended(const ProgramResult& result, int status, const std::vector<std::string>& words = {}) {
  EXPECT_EQ(result.status, status) << result.err;
  expect_parts(result.err, words);
}

}  // namespace emend::testing
