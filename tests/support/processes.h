// Runs one of the project's programs as several processes at once, as a launcher does.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/program.h"

namespace emend::testing {

enum class Launcher {
  kVariables,  ///< no launcher: the test starts the processes with the variables that torchrun sets
  kMpirun,     ///< Open MPI's
};
inline std::string to_string(Launcher launcher) {
  return launcher == Launcher::kMpirun ? "mpirun" : "variables";
}

/// The absolute path of a program on PATH, or nothing.
inline std::string path_of(const std::string& program) {
  std::istringstream folders(std::getenv("PATH") ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const auto path = std::filesystem::path(folder) / program; ::access(path.c_str(), X_OK) == 0)
      return path.string();
  return {};
}

/// A TCP port of this machine that nobody uses at the moment.
inline int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ::bind(socket, reinterpret_cast<sockaddr*>(&address), size);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(socket);
  return ntohs(address.sin_port);
}

struct ProcessesOptions {
  /// Variables for one rank alone (Launcher::kVariables), such as a fault to be injected.
  std::map<int, std::map<std::string, std::string>> environment_of_rank;
  /// Arguments for one rank instead of the common ones (Launcher::kVariables).
  std::map<int, std::vector<std::string>> arguments_of_rank;
  /// A rank that is killed once the first process has written this to standard error (Launcher::kVariables).
  int killed_rank = -1;
  std::string kill_when;
  ProgramOptions program;  ///< for every process (Launcher::kVariables) or for mpirun
};

/// One result a process; with mpirun a single one, which holds the output of all.
inline std::vector<ProgramResult> run_processes(Launcher launcher, int count, const std::string& name,
                                                const std::vector<std::string>& arguments,
                                                const ProcessesOptions& options = {}) {
  if (launcher == Launcher::kMpirun) {
    std::vector<std::string> all = {"--allow-run-as-root", "--oversubscribe", "-n", std::to_string(count),
                                    program_path(name).string()};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return {run_program(path_of("mpirun"), all, options.program)};
  }
  std::vector<ProgramResult> results(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  std::atomic<pid_t> killed{0};
  const std::string port = std::to_string(free_port()), size = std::to_string(count);
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&, rank] {
      ProgramOptions one = options.program;
      one.environment.insert({{"RANK", std::to_string(rank)},
                              {"WORLD_SIZE", size},
                              {"LOCAL_RANK", std::to_string(rank)},
                              {"LOCAL_WORLD_SIZE", size},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", port}});
      if (const auto own = options.environment_of_rank.find(rank); own != options.environment_of_rank.end())
        for (const auto& [variable, value] : own->second) one.environment[variable] = value;
      if (rank == options.killed_rank) one.started = &killed;
      if (rank == 0 && options.killed_rank > 0) {
        one.signal_when = options.kill_when;
        one.signal = SIGKILL;
        one.signalled = &killed;
      }
      const auto other = options.arguments_of_rank.find(rank);
      results[static_cast<size_t>(rank)] =
          run_program(name, other == options.arguments_of_rank.end() ? arguments : other->second, one);
    });
  for (auto& thread : threads) thread.join();
  return results;
}

}  // namespace emend::testing
