// Threads that wait for each other sleep instead of spinning, unless the user's environment says otherwise.
//
// A small product ends in a barrier. A spinning thread keeps its core while the one it waits for is not running: beside
// one busy program an edit took three times as long. OpenMP's run-time library reads the policy when it is loaded,
// which is long before main; a setting made there comes too late. So the program starts itself once more with the
// policy in its environment, before the initialisers of the shared libraries have run and cost anything.
#include <unistd.h>

#include <cstring>

namespace {

bool names(const char* entry, const char* variable) {
  const size_t length = std::strlen(variable);
  return std::strncmp(entry, variable, length) == 0 && entry[length] == '=';
}

void let_waiting_threads_sleep(int, char** arguments, char** environment) {
  size_t count = 0;
  for (; environment[count]; ++count)
    if (names(environment[count], "OMP_WAIT_POLICY") || names(environment[count], "GOMP_SPINCOUNT")) return;
  // On the stack: nothing is initialised yet, the heap included.
  auto** const with_policy = static_cast<char**>(__builtin_alloca((count + 3) * sizeof(char*)));
  std::memcpy(with_policy, environment, count * sizeof(char*));
  char policy[] = "OMP_WAIT_POLICY=passive";
  char no_backtrace[] = "GGML_NO_BACKTRACE=1";  // ggml would start a debugger where the program ends by a signal
  with_policy[count] = policy;
  with_policy[count + 1] = no_backtrace;
  with_policy[count + 2] = nullptr;
  char path[4096];  // under its own name, which the kernel shows in lists of processes
  if (const auto size = ::readlink("/proc/self/exe", path, sizeof path - 1); size > 0) {
    path[size] = '\0';
    ::execve(path, arguments, with_policy);
  }
  ::execve("/proc/self/exe", arguments, with_policy);
  // Where /proc is missing the program goes on as it is, only slower on a busy machine.
}

}  // namespace

// Called by the dynamic linker before all other initialisers; only programs may have one.
__attribute__((section(".preinit_array"), used)) static void (*const early)(int, char**,
                                                                            char**) = let_waiting_threads_sleep;
