#include <emend/core/text.h>
#include <emend/devices/process_environment.h>

#include <cstdlib>

namespace emend::devices {
namespace {

/// Reads variables and complains about them by name.
class Reader {
 public:
  explicit Reader(const EnvironmentFn& environment) : environment_(environment) {}

  [[nodiscard]] std::optional<std::string> text(const std::string& name) const {
    const char* value = environment_ ? environment_(name.c_str()) : std::getenv(name.c_str());
    return value && *value ? std::optional<std::string>(value) : std::nullopt;
  }
  [[nodiscard]] bool has(const std::string& name) const { return text(name).has_value(); }

  [[nodiscard]] int number(const std::string& name, int lowest, int highest) const {
    const auto value = text(name);
    if (!value) bad(name, "it is not set", lowest, highest);
    const auto number = number_in<int>(*value);
    if (!number || *number < lowest || *number > highest) bad(name, "\"" + *value + "\"", lowest, highest);
    return *number;
  }
  [[nodiscard]] int number_or(const std::string& name, int otherwise, int lowest, int highest) const {
    return has(name) ? number(name, lowest, highest) : otherwise;
  }

 private:
  [[noreturn]] static void bad(const std::string& name, const std::string& got, int lowest, int highest) {
    refuse({"environment variable " + name, got,
            "a number from " + std::to_string(lowest) + " to " + std::to_string(highest),
            "start the processes with torchrun, mpirun or srun, or unset the variable to run alone"});
  }
  const EnvironmentFn& environment_;
};

constexpr int kMaxProcesses = 1 << 20;

/// Names of the four numbers in one launcher's dialect.
struct Dialect {
  const char *source, *rank, *size, *local_rank, *local_size, *job;
};
constexpr Dialect kDialects[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"},
};

// A batch script has SLURM_PROCID=0 without being a step. MPICH's and Intel's mpiexec start a proxy on each machine as
// a step, and the processes of all proxies are others than the tasks of that.
bool is_task_of_slurm(const Reader& reader) {
  const auto tasks = reader.text("SLURM_STEP_NUM_TASKS"), processes = reader.text("PMI_SIZE");
  return tasks && (!reader.has("PMI_RANK") || !processes || processes == tasks);
}

const Dialect* spoken(const Reader& reader) {
  for (const auto& dialect : kDialects)
    if (reader.has(dialect.rank) && (std::string_view(dialect.source) != "Slurm" || is_task_of_slurm(reader)))
      return &dialect;
  return reader.has("WORLD_SIZE") ? &kDialects[0] : nullptr;  // of torchrun's two, one alone is an error
}

/// "node[03-07,9],other" → "node03".
std::string first_host(const std::string& list) {
  const auto bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, list.find_first_of("-,]", bracket) - bracket - 1);
}

/// A port that two jobs on one machine are unlikely to share, the same in every process of a job.
int port_of_job(const std::string& job) {
  uint32_t hash = 2166136261U;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return 20000 + static_cast<int>(hash % 10000);
}

}  // namespace

ProcessEnvironment read_process_environment(const EnvironmentFn& environment) {
  const Reader reader(environment);
  ProcessEnvironment result;
  const Dialect* dialect = spoken(reader);
  if (!dialect) return result;
  result.source = dialect->source;
  result.size = reader.number(dialect->size, 1, kMaxProcesses);
  result.rank = reader.number(dialect->rank, 0, result.size - 1);
  result.local_rank = reader.number_or(dialect->local_rank, result.rank, 0, kMaxProcesses);
  const int nodes = result.source == "Slurm" ? reader.number_or("SLURM_STEP_NUM_NODES", 1, 1, kMaxProcesses) : 1;
  result.local_size = reader.number_or(dialect->local_size, (result.size + nodes - 1) / nodes, 1, kMaxProcesses);
  if (auto job = reader.text(dialect->job)) {
    if (result.source == "Slurm") *job += "." + reader.text("SLURM_STEP_ID").value_or("");  // of several at once
    result.master_port = port_of_job(*job);
  }
  result.master_port = reader.number_or("MASTER_PORT", result.master_port, 1, 65535);
  result.agent_store = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.attempt = reader.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  if (const auto address = reader.text("MASTER_ADDR")) {
    result.master_address = *address;
  } else if (const auto nodes = reader.text("SLURM_STEP_NODELIST"); nodes && result.source == "Slurm") {
    result.master_address = first_host(*nodes);
  } else if (result.local_size < result.size) {
    refuse({"environment variable MASTER_ADDR",
            "it is not set, and the " + std::to_string(result.size) + " processes are on several machines",
            "the address of the machine of rank 0", "with mpirun: -x MASTER_ADDR=<first node>"});
  }
  return result;
}

}  // namespace emend::devices
