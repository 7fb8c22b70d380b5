// Which process of a group this is: read from what torchrun, mpirun, srun and mpiexec leave in the environment.
#pragma once

#include <functional>
#include <string>

namespace emend::devices {

struct ProcessEnvironment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the processes of this machine
  int local_size = 1;
  std::string master_address = "127.0.0.1";
  int master_port = 29500;
  bool agent_store = false;                 ///< torchrun's agent already serves the store: rank 0 must not
  std::string attempt;                      ///< torchrun's restart count: keeps the keys of two attempts apart
  std::string source = "a single process";  ///< what said so: "torchrun", "Open MPI", "Slurm", "PMI"
};

/// Value of a variable, or null.
using EnvironmentFn = std::function<const char*(const char*)>;

/// Reads, in this order: RANK and WORLD_SIZE (torchrun); OMPI_COMM_WORLD_*; SLURM_PROCID and SLURM_STEP_NUM_TASKS (set
/// by srun for a step; a batch script without srun is a single process; where PMI_SIZE is another number, the step's
/// tasks are the proxies of an mpiexec, and PMI_* counts); PMI_RANK and PMI_SIZE. MASTER_ADDR and MASTER_PORT count
/// everywhere; without them the port is derived from the job's id, and the address must be given unless all processes
/// are on one machine or Slurm names the first node. Throws Error(kInvalidArgument) naming the variable for a value
/// that is missing, not a number, or out of range.
[[nodiscard]] ProcessEnvironment read_process_environment(const EnvironmentFn& environment = {});

}  // namespace emend::devices
